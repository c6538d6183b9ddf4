"""The runner under the real scheduler: preemption, prefix-cache hits, chunks and steps in flight change no token."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from aioengine.core.scheduler import Scheduler
from aioengine.request import Request
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams
from tests.covering import every_pair

SHARED = [5, 11, 23, 42, 8, 30, 17, 2, 50]
PROMPTS = [SHARED + [i, 3 * i + 1] * (i % 4) + [i + 20] for i in range(7)]
NUM_BLOCKS_BIG, NUM_BLOCKS_TINY = 60, 14


def make_requests() -> list[Request]:
    requests = []
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=0.0 if i % 2 else 1.2,
            top_p=0.95,
            seed=i,
            max_tokens=6 + 3 * i,
            ignore_eos=i % 3 == 0,
            logprobs=2 if i == 4 else None,
        )
        requests.append(Request(f"r{i}", prompt, sampling_params=params))
    return requests


def drive(
    driver: Any,
    config: ResolvedConfig,
    *,
    num_blocks: int,
    requests: list[Request],
    reset_every: int = 0,
    later_budget: int | None = None,
) -> tuple[dict[str, list[int]], Scheduler]:
    """The engine's loop without an engine: up to `max_concurrent_batches` planned steps wait for the runner.

    reset_every: steps from one reset of the prefix cache, with whoever runs, to the next; 0: none.
    later_budget: of a step, once all requests run.
    """
    scheduler = Scheduler(
        config.scheduler,
        cache=config.cache,
        num_kv_cache_blocks=num_blocks,
        eos_token_ids=config.model.eos_token_ids,
        check_invariants=True,
    )
    for request in requests:
        scheduler.add_request(request)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    planned: deque[Any] = deque()
    while scheduler.has_work or planned:
        while len(planned) < config.scheduler.max_concurrent_batches and (out := scheduler.schedule()) is not None:
            planned.append(out)
        if later_budget is not None and len(scheduler.running) == len(requests):
            scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=later_budget)
        if reset_every and planned[0].step_id % reset_every == 0:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        out = planned.popleft()
        driver.runner.execute_model(out)
        for core_output in scheduler.update_from_output(out, driver.sample()):
            outputs[core_output.request_id] += core_output.new_token_ids
    return outputs, scheduler


@pytest.fixture
def run(make_driver: Callable[..., Any], make_config: Callable[..., ResolvedConfig]) -> Callable[..., Any]:
    def run(
        requests: list[Request],
        *,
        num_blocks: int = NUM_BLOCKS_BIG,
        reset_every: int = 0,
        later_budget: int | None = None,
        **options: Any,
    ) -> tuple[dict[str, list[int]], Scheduler]:
        driver = make_driver(num_blocks=num_blocks, **options)
        result = drive(
            driver,
            make_config(**options),
            num_blocks=num_blocks,
            requests=requests,
            reset_every=reset_every,
            later_budget=later_budget,
        )
        assert driver.runner.states.num_free_slots == driver.runner.states.max_num_reqs
        assert driver.runner.states.num_requests == 0
        return result

    return run


@pytest.fixture(scope="module")
def alone_by_pipeline() -> dict[Any, dict[str, list[int]]]:
    return {}


@pytest.fixture
def find_alone(run: Callable[..., Any], pipeline: str, alone_by_pipeline: dict[Any, dict[str, list[int]]]) -> Callable[..., Any]:
    """What each request gives by itself, one step at a time."""

    def find(layer_windows: tuple[int | None, ...]) -> dict[str, list[int]]:
        key = pipeline, layer_windows
        if key not in alone_by_pipeline:
            alone_by_pipeline[key] = {}
            for request in make_requests():
                outputs, _ = run([request], async_scheduling=False, enable_prefix_caching=False, layer_windows=layer_windows)
                alone_by_pipeline[key] |= outputs
        return alone_by_pipeline[key]

    return find


@pytest.fixture
def alone(find_alone: Callable[..., Any]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = find_alone(())
    return result


@pytest.mark.parametrize(
    ("overlap", "num_blocks", "budget", "prefix_caching"),
    every_pair([True, False], [NUM_BLOCKS_BIG, NUM_BLOCKS_TINY], [3, 16, 64], [True, False]),
)
def test_same_tokens_as_alone(
    run: Callable[..., Any], alone: dict[str, list[int]], overlap: bool, num_blocks: int, budget: int, prefix_caching: bool
) -> None:
    outputs, scheduler = run(
        make_requests(),
        num_blocks=num_blocks,
        async_scheduling=overlap,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    assert outputs == alone
    assert (scheduler.totals.num_preemptions > 0) == (num_blocks == NUM_BLOCKS_TINY)
    assert (scheduler.make_stats().prefix_cache_hits > 0) == prefix_caching
    assert max(len(tokens) for tokens in alone.values()) > 15


@pytest.mark.parametrize(
    ("overlap", "num_blocks", "budget", "prefix_caching", "layer_windows"),
    every_pair([True, False], [NUM_BLOCKS_BIG, 17], [3, 16], [True, False], [(None, 6), (6, 9)]),
)
def test_same_tokens_as_alone_where_layers_have_windows_of_their_own(
    run: Callable[..., Any],
    find_alone: Callable[..., Any],
    overlap: bool,
    num_blocks: int,
    budget: int,
    prefix_caching: bool,
    layer_windows: tuple[int | None, ...],
) -> None:
    """Two block tables a request over one cache, whose unwritten slots hold NaN, as does the null block."""
    outputs, scheduler = run(
        make_requests(),
        num_blocks=num_blocks,
        async_scheduling=overlap,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
        layer_windows=layer_windows,
    )
    alone = find_alone(layer_windows)
    assert outputs == alone
    assert alone not in (find_alone(()), find_alone((6, None))), "windows change what a request gives"
    assert num_blocks == NUM_BLOCKS_BIG or layer_windows == (6, 9) or scheduler.totals.num_preemptions > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_who_is_left_out_of_a_step_goes_on_from_its_last_token(run: Callable[..., Any], alone: dict[str, list[int]], overlap: bool) -> None:
    """Steps with room for two of seven: what the others sampled last waits on the device, and no placeholder is ever an input."""
    outputs, scheduler = run(make_requests(), async_scheduling=overlap, max_num_seqs=8, later_budget=2)
    assert scheduler.config.max_num_batched_tokens == 2
    assert outputs == alone


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_same_tokens_when_the_prefix_cache_is_reset_under_running_requests(run: Callable[..., Any], overlap: bool) -> None:
    expected, _ = run(make_requests(), async_scheduling=overlap, max_num_batched_tokens=16)
    outputs, scheduler = run(make_requests(), async_scheduling=overlap, max_num_batched_tokens=16, reset_every=5)
    assert outputs == expected
    assert scheduler.make_stats().num_resumed_reqs > 10
