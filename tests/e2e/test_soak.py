"""A minute of everything at once: `benchmarks/soak.py` runs the same for as long as one likes."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer
from aioengine_bench.random_load import Soak, SoakOptions, SoakReport

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 10,
    "max_num_batched_tokens": 48,
    "max_model_len": 300,
    "check_invariants": True,
    "max_num_queued_reqs": 30,
    "step_timeout_s": 60,
    "seed": 1,
}


def check(report: SoakReport) -> None:
    assert report.violations == []
    assert report.num_rounds >= 2
    assert report.num_preemptions > 0
    assert report.num_probes > 0
    assert {"length", "stop", "abort", "left", "timed out"} <= report.endings.keys()


@pytest.mark.parametrize("overlap", [True, False])
async def test_soak_without_a_model(overlap: bool) -> None:
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
            options = SoakOptions(duration_s=18, seed=int(overlap), clients_per_round=24)
            report = await Soak(engine, options, on_round=lambda report: executor.outputs.clear()).run()
    finally:
        tracemalloc.stop()
    check(report)
    assert executor.req_ids == set()
    assert report.growth()[0] < 1 << 20, report.memory


async def test_soak_with_a_tiny_model(tiny_model: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "num_kv_cache_blocks": 40, "block_size": 8, "dtype": "float32", "device": "cpu"}
    async with AsyncEngine(str(tiny_model), scheduling_policy="priority", **options) as engine:
        report = await Soak(engine, SoakOptions(duration_s=20, seed=5, clients_per_round=24)).run()
    check(report)
    assert report.growth()[1] < 64 << 20, report.memory
