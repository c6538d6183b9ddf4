"""The measurement of the engine's own cost measures the real loop. Figures are not judged here: the machine is shared."""

from __future__ import annotations

import asyncio
import json

import pytest

from aioengine.testing import make_request, make_scheduler
from aioengine_bench import host_cost
from aioengine_bench.null_executor import StepSampler
from aioengine_bench.overhead import WATCHERS, OverheadCase, Watcher, cases, growth, overhead, run_case
from aioengine_bench.settings import OverheadSettings
from aioengine_bench.specs import SaveOptions


@pytest.mark.parametrize("watcher", WATCHERS)
async def test_every_watcher(watcher: Watcher) -> None:
    row = await run_case(OverheadCase(3, watcher=watcher), num_steps=12)
    assert row["watcher"] == watcher
    assert all(row[f"{phase}_us"] > 0 for phase in ("schedule", "update", "output", "publish", "total"))


@pytest.mark.parametrize("overlap", [True, False])
async def test_mixed_steps_with_consumers(overlap: bool) -> None:
    row = await run_case(OverheadCase(4, "mixed", async_scheduling=overlap, with_consumers=True), num_steps=50)
    assert row["total_us"] > 0
    assert row["total_us_per_request"] == pytest.approx(row["total_us"] / 4)


async def test_a_forward_is_waited_for() -> None:
    row = await run_case(OverheadCase(2, forward_s=0.003, async_scheduling=False), num_steps=10)
    assert row["total_us"] > 2500


def test_the_sampler_knows_who_samples() -> None:
    """Chunks, prefix-cache hits and preemption: it must answer exactly where the scheduler expects a token."""
    scheduler = make_scheduler(num_kv_cache_blocks=12, max_num_batched_tokens=8, long_prefill_token_threshold=5)
    sampler = StepSampler()
    for _ in range(3):
        scheduler.add_request(make_request(list(range(13)), max_tokens=6, ignore_eos=True))
    num_tokens = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        num_tokens += sum(len(new.new_token_ids) for new in scheduler.update_from_output(output, sampler(output)))
    assert num_tokens == 18


def test_growth_is_the_slope_of_plain_decode_rows() -> None:
    rows = [
        {"num_reqs": n, "total_us": 50 + 10 * n, "mode": "decode", "watcher": "nobody", "with_consumers": False, "forward_ms": 0.0}
        for n in (1, 10, 100)
    ]
    rows.append({**rows[0], "total_us": 1e9, "watcher": "recorder"})
    assert growth(rows) == {"us_per_further_request": [pytest.approx(10.0), pytest.approx(10.0)], "last_ratio": pytest.approx(1.0)}


def test_the_cases_cover_what_is_promised() -> None:
    todo = cases(OverheadSettings())
    assert {case.num_reqs for case in todo} == {1, 32, 256, 1024}
    assert {case.mode for case in todo} == {"decode", "mixed"}
    assert {case.watcher for case in todo} == set(WATCHERS)
    assert {case.async_scheduling for case in todo if case.forward_s} == {True, False}


async def test_overhead_interrupted(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    settings = OverheadSettings(num_reqs=[2], num_steps=20, save=SaveOptions(output_json="-"))
    task = asyncio.create_task(overhead(settings))
    await asyncio.sleep(0.3)
    task.cancel()
    assert await task is True
    result = json.loads(capsysbinary.readouterr().out)
    assert result["interrupted"] is True


def test_host_cost_measures_pure_decode_steps() -> None:
    cost = host_cost.measure(4, num_steps=8)
    assert (cost.engine, cost.num_reqs) == ("aioengine", 4)
    assert 0 < cost.schedule_min_us <= cost.schedule_median_us
    assert cost.min_us == cost.schedule_min_us + cost.update_min_us
