from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioengine.worker.cuda_graphs import CapturedGraph, DecodeGraphs, graph_batch_sizes


def test_sizes_to_capture() -> None:
    assert graph_batch_sizes(1) == [1]
    assert graph_batch_sizes(3) == [1, 2, 3]
    assert graph_batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = graph_batch_sizes(256)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-1] == 256
    assert len(sizes) == 35
    assert graph_batch_sizes(100_000)[-1] == 512


@pytest.mark.parametrize("max_num_seqs", [1, 7, 64, 300, 512])
def test_every_decode_step_fits_and_wastes_little(max_num_seqs: int) -> None:
    graphs = captured(graph_batch_sizes(max_num_seqs))
    for num_reqs in range(1, max_num_seqs + 1):
        size = graphs.size_for(num_reqs=num_reqs, max_query_len=1)
        assert size is not None
        assert num_reqs <= size < num_reqs + (8 if num_reqs <= 256 else 16)


def captured(sizes: list[int]) -> DecodeGraphs:
    graphs = DecodeGraphs(sizes)
    graphs.capture(
        lambda size: torch.full((size, 2), float(size)), capture_graph=lambda forward: CapturedGraph(lambda: None, output=forward())
    )
    return graphs


def test_what_runs_eagerly() -> None:
    graphs = captured([1, 2, 4])
    assert graphs.size_for(num_reqs=3, max_query_len=1) == 4
    assert graphs.size_for(num_reqs=5, max_query_len=1) is None
    assert graphs.size_for(num_reqs=1, max_query_len=2) is None
    assert DecodeGraphs([1, 2, 4]).size_for(num_reqs=1, max_query_len=1) is None, "nothing was captured"


def test_captures_the_largest_first_and_replays_the_right_one() -> None:
    order: list[str] = []

    def capture_graph(forward: Callable[[], torch.Tensor]) -> CapturedGraph:
        output = forward()
        order.append(f"capture {len(output)}")
        return CapturedGraph(lambda: order.append(f"replay {len(output)}"), output)

    graphs = DecodeGraphs([1, 4, 2])
    graphs.capture(lambda size: torch.zeros(size, 3), capture_graph=capture_graph)
    assert graphs.run(2).shape == (2, 3)
    assert order == ["capture 4", "capture 2", "capture 1", "replay 2"]


@pytest.mark.parametrize("pipeline", ["graphs"], indirect=True)
def test_a_decode_step_runs_in_a_graph_and_a_chunk_does_not(make_driver: Callable[..., Any]) -> None:
    driver = make_driver()
    replayed: list[int] = []
    run = driver.runner._graphs.run

    def noted_run(size: int) -> Any:
        replayed.append(size)
        return run(size)

    driver.runner._graphs.run = noted_run
    driver.add("r", range(1, 6))
    driver.add("a", range(7, 12))
    driver.step({"r": 5, "a": 1})
    assert replayed == []
    driver.step({"r": 1, "a": 1})  # a chunk of one token is no different
    assert replayed == [2]
    driver.step({"r": 1})
    assert replayed == [2, 1]
