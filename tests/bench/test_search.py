"""The highest rate under limits: which rates are tried, what counts as a miss, and the whole command on engines without a model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.cli import main
from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import AioEngineError, ConfigError
from aioengine.testing import FakeTokenizer
from aioengine_bench import console
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import Chunk
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.goal import parse_goals
from aioengine_bench.rate_search import RateSearch, SearchSettings
from aioengine_bench.search import Search, misses, search
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import DatasetSpec, RemoteSpec, SaveOptions
from aioengine_bench.target import Target
from tests.bench.conftest import FakeHost
from tests.server.sockets import serving

MakeHost = Callable[..., FakeHost]
BASE = ServeSettings(
    config=EngineConfig(model="fake", seed=0, max_num_seqs=8, block_size=4),
    dataset=DatasetSpec(num_prompts=8, input_len=8, output_len=4),
    num_warmups=0,
    disable_progress=True,
)


def tried(limit: float, *, start: float, most: int = 30, precision: float = 0.05) -> tuple[RateSearch, list[float]]:
    """A server that keeps its limits up to a rate and completes no more than twice that."""
    rates = RateSearch(start=start, precision=precision)
    tries: list[float] = []
    while (rate := rates.next_rate()) is not None and len(tries) < most:
        tries.append(rate)
        rates.note(rate, is_met=rate <= limit, throughput=min(rate, 2 * limit))
    return rates, tries


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.7, 130.0])
@pytest.mark.parametrize("start", [1.0, 5.0, math.inf])
def test_the_limit_lies_between_the_two_rates_that_are_found(limit: float, start: float) -> None:
    rates, tries = tried(limit, start=start)
    assert rates.met is not None
    assert rates.missed is not None
    assert rates.met <= limit < rates.missed <= rates.met * 1.05
    assert rates.met in tries
    assert rates.missed in tries
    assert len(tries) <= 16
    assert len(set(tries)) == len(tries)


def test_the_first_rate_is_the_users_or_all_at_once_and_then_what_was_completed() -> None:
    assert tried(10.0, start=3.0)[1][:3] == [3.0, 6.0, 12.0]
    assert tried(10.0, start=40.0)[1][:4] == [40.0, 20.0, 10.0, 15.0]
    assert tried(10.0, start=math.inf)[1][:4] == [math.inf, 20.0, 10.0, 15.0]


def test_a_server_that_takes_everything_at_once_is_asked_once() -> None:
    rates, tries = tried(math.inf, start=math.inf)
    assert (tries, rates.met, rates.missed) == ([math.inf], math.inf, None)


def test_lost_requests_miss_every_goal() -> None:
    goals = parse_goals("ttft_p99<=500")
    result: dict[str, Any] = {"p99_ttft_ms": 400.0, "num_prompts": 8, "completed": 8, "stop_reason": None}
    assert misses(result, goals) == []
    assert misses(result | {"p99_ttft_ms": 600.0}, goals) == ["ttft_p99 is 600.0 ms, over 500"]
    assert misses(result | {"completed": 6}, goals) == ["2 of 8 requests were not completed"]
    assert misses(result | {"completed": 6, "stop_reason": "over-saturated"}, goals) == ["over-saturated"]


def search_settings(base: ServeSettings, goals: str, **changes: Any) -> SearchSettings:
    return SearchSettings(base=base, goals=parse_goals(goals), **changes)


async def test_a_server_is_searched_and_every_try_is_in_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 50 tokens a second whatever the load: TPOT is 20 ms at every rate."""
    path = tmp_path / "r.json"
    async with serving({"tokens_per_s": 50}) as served:
        base = dataclasses.replace(
            BASE,
            remote=RemoteSpec(base_url=f"http://127.0.0.1:{served.port}"),
            arrivals=ArrivalProcess(request_rate=100.0),
            save=SaveOptions(output_json=str(path)),
            metrics=("ttft",),
        )
        host = FakeHost().host()
        assert not await search(search_settings(base, "tpot_p90<=1000", tries=2), host)
        result = json.loads(path.read_text())
        found = result["goal_search"]
        assert [(one["request_rate"], one["meets_goal"], one["misses"]) for one in found["tries"]] == [(100.0, True, []), (200.0, True, [])]
        assert (found["request_rate"], found["lowest_rate_that_misses"], found["is_precise"]) == (200.0, None, False)
        assert (result["request_rate"], result["completed"], result["model_id"]) == (200.0, 8, "fake")
        assert result["p90_tpot_ms"] == pytest.approx(20, abs=15)
        with pytest.raises(AioEngineError, match="No rate that was tried meets tpot_p90<=5; the lowest was 50 requests/s"):
            await search(search_settings(base, "tpot_p90<=5", tries=2), host)
    found = json.loads(path.read_text())["goal_search"]
    assert [one["request_rate"] for one in found["tries"]] == [100.0, 50.0]
    assert found["tries"][0]["misses"][0].startswith("tpot_p90 is ")
    out = capsys.readouterr().out
    assert "1. 100 requests/s: tpot_p90" in out
    assert "Highest rate that meets tpot_p90<=1000: 200 requests/s; no rate above it was tried" in out


async def test_each_try_on_an_engine_finds_an_empty_prefix_cache(make_host: MakeHost, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    base = dataclasses.replace(BASE, arrivals=ArrivalProcess(request_rate=500.0), save=SaveOptions(output_json=str(path)))
    await search(search_settings(base, "e2el_p99<=60000", tries=3), make_host().host())
    result = json.loads(path.read_text())
    assert [one["total_cached_tokens"] for one in result["goal_search"]["tries"]] == [0, 0, 0]
    assert result["num_preemptions"] == 0


@pytest.mark.parametrize("can_reset", [True, False])
async def test_a_server_that_cannot_be_reset_gets_other_prompts_each_time(can_reset: bool) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.prompts: list[tuple[int, ...]] = []

        async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
            self.prompts.append(tuple(request.prompt_token_ids))
            yield Chunk(request.max_tokens, "a", finish_reason="length")

    client = Recorder()
    target = Target(client, FakeTokenizer(), FakeTokenizer.vocab_size, None, dict, (lambda: None) if can_reset else None)
    base = dataclasses.replace(BASE, arrivals=ArrivalProcess(request_rate=1000.0))
    await Search(search_settings(base, "ttft_p99<=60000", tries=2), console.output_stream(stdout_is_taken=False)).run(target)
    assert len(client.prompts) == 16
    assert len(set(client.prompts)) == (8 if can_reset else 16)


async def test_an_interrupted_search_keeps_its_tries(make_host: MakeHost, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    base = dataclasses.replace(BASE, arrivals=ArrivalProcess(request_rate=1.0), save=SaveOptions(output_json=str(path)))
    task = asyncio.create_task(search(search_settings(base, "ttft_p99<=60000"), make_host().host()))
    await asyncio.sleep(0.3)
    task.cancel()
    assert await task
    result = json.loads(path.read_text())
    assert result["interrupted"]
    assert result["goal_search"]["request_rate"] is None


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"max_duration": 3.0}, "--max-duration"),
        ({"requests_jsonl": "x"}, "--requests-jsonl"),
        ({"save": SaveOptions(detailed=True)}, "--save-detailed"),
        ({"publish": PublishOptions(record=Path("x"))}, "--record"),
    ],
)
def test_what_a_search_cannot_do_is_refused(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        search_settings(dataclasses.replace(BASE, **changes), "ttft_p99<=5")


async def test_a_dataset_with_its_own_times_is_refused(make_host: MakeHost) -> None:
    base = dataclasses.replace(BASE, dataset=DatasetSpec(name="burst", num_prompts=4, input_len=8, output_len=4))
    with pytest.raises(ConfigError, match="arrival times"):
        await search(search_settings(base, "ttft_p99<=5"), make_host().host())


def test_the_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in (
        (["--goal", "ttft<=5"], "ttft_p99<=500"),
        (["--goal-tries", "3"], "need a --goal"),
        (["--goal", "ttft_p99<=5", "--goal-tries", "0"], "goal_tries must be at least 1"),
        (["--goal", "ttft_p99<=5", "--goal-precision", "0"], "goal_precision must be above 0"),
    ):
        assert main(["bench", "serve", *options]) == 2
        assert word in capsys.readouterr().err
