"""Everything at once, for some rounds or, in CI, for a minute: `benchmarks/soak.py` runs the same for as long as one likes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer
from aioengine_bench.random_load import Soak, SoakOptions, SoakReport
from tests.covering import LEFT_TO_CI

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 10,
    "max_num_batched_tokens": 48,
    "max_model_len": 300,
    "check_invariants": True,
    "max_num_queued_reqs": 30,
    "step_timeout_s": 60,
    "seed": 1,
}


ENDINGS = frozenset({"length", "stop", "abort", "left", "timed out"})
# Six rounds, which take some seconds, or a third of a minute of them.
DURATIONS = [0.0, pytest.param(20.0, marks=LEFT_TO_CI)]


def check(report: SoakReport) -> None:
    assert report.violations == []
    assert report.num_rounds >= 2
    assert report.num_preemptions > 0
    assert report.num_probes > 0
    assert report.endings.keys() >= ENDINGS


@pytest.mark.parametrize("duration_s", DURATIONS)
@pytest.mark.parametrize("overlap", [True, False])
async def test_soak_without_a_model(overlap: bool, duration_s: float) -> None:
    executor = FakeExecutor(num_blocks=120, block_size=4, max_num_seqs=10)
    tracemalloc.start()
    try:
        async with AsyncEngine(
            executor=executor,
            tokenizer=FakeTokenizer(),
            block_size=4,
            async_scheduling=overlap,
            scheduling_policy="priority" if overlap else "fcfs",
            **OPTIONS,
        ) as engine:
            options = SoakOptions(duration_s, min_rounds=6, wanted_endings=ENDINGS, seed=int(overlap), clients_per_round=12)
            report = await Soak(engine, options, on_round=lambda report: executor.outputs.clear()).run()
    finally:
        tracemalloc.stop()
    check(report)
    assert executor.req_ids == set()
    assert report.growth()[0] < 1 << 20, report.memory


@pytest.mark.parametrize("duration_s", DURATIONS)
async def test_soak_with_a_tiny_model(tiny_model: Path, duration_s: float) -> None:
    options: dict[str, Any] = {**OPTIONS, "num_kv_cache_blocks": 40, "block_size": 8, "dtype": "float32", "device": "cpu"}
    async with AsyncEngine(str(tiny_model), scheduling_policy="priority", **options) as engine:
        report = await Soak(engine, SoakOptions(duration_s, min_rounds=6, wanted_endings=ENDINGS, seed=5, clients_per_round=12)).run()
    check(report)
    assert report.growth()[1] < 64 << 20, report.memory
