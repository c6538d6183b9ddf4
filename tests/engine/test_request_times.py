"""Why a request was slow: the waits by reason add up to the time in the queue, and each reason is told where it is the reason."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aioengine.engine.async_engine import AsyncEngine
from aioengine.events.step_event import StepEvent
from aioengine.outputs import RequestMetrics
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer

FORWARD_S = 0.004


async def run(engine: AsyncEngine, prompt: Any, *, max_tokens: int = 8, **options: Any) -> RequestMetrics:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = [output async for output in engine.generate(prompt, params, **options)]
    return outputs[-1].metrics


def engine_with(**options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4}
    settings |= {"num_kv_cache_blocks": 200, "enable_prefix_caching": False, "check_invariants": True, **options}
    return AsyncEngine(executor=FakeExecutor(forward_s=FORWARD_S, block_size=settings["block_size"]), tokenizer=FakeTokenizer(), **settings)


def check(metrics: RequestMetrics) -> None:
    """What must hold of any request that ran."""
    assert metrics.queue_s is not None
    assert metrics.prefill_s is not None
    assert metrics.decode_s is not None
    assert metrics.finished_time is not None
    assert math.isclose(sum(metrics.waits.values()), metrics.queue_s, abs_tol=1e-6), metrics
    assert all(seconds > 0 for seconds in metrics.waits.values())
    parts = metrics.queue_s + metrics.prefill_s + metrics.decode_s
    assert math.isclose(parts, metrics.finished_time - metrics.queued_time, abs_tol=1e-9)
    assert 0 <= metrics.preempted_s <= metrics.finished_time - metrics.queued_time
    assert (metrics.preempted_s > 0) == (metrics.num_preemptions > 0)


async def test_alone_a_request_waits_for_nothing() -> None:
    async with engine_with() as engine:
        metrics = await run(engine, "hello")
        check(metrics)
        assert set(metrics.waits) <= {"prepare", "step"}
        assert metrics.queue_s is not None
        assert metrics.queue_s < 0.05


CAUSES: dict[str, dict[str, Any]] = {
    "seqs": {"max_num_seqs": 1},
    "budget": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True, "max_num_seqs": 8},
    "blocks": {"num_kv_cache_blocks": 14},
}


@pytest.mark.parametrize("cause", CAUSES)
async def test_the_reason_that_is_the_reason_has_nearly_all_of_the_wait(cause: str) -> None:
    async with engine_with(**CAUSES[cause]) as engine:
        found = await asyncio.gather(*(run(engine, "x" * 31, max_tokens=8) for _ in range(6)))
        for metrics in found:
            check(metrics)
        latest = max(found, key=lambda metrics: metrics.queue_s or 0.0)
        assert latest.queue_s is not None
        assert latest.queue_s > 5 * FORWARD_S
        assert latest.waits[cause] > 0.6 * latest.queue_s, latest


async def test_preempted_requests_know_how_long_they_stood() -> None:
    async with engine_with(num_kv_cache_blocks=26) as engine:
        found = await asyncio.gather(*(run(engine, "x" * 20, max_tokens=40) for _ in range(4)))
        assert engine.stats().num_preemptions > 0
        for metrics in found:
            check(metrics)
        assert sum(metrics.num_preemptions for metrics in found) == engine.stats().num_preemptions
        assert max(metrics.preempted_s for metrics in found) > FORWARD_S


async def test_the_times_are_those_of_the_events() -> None:
    """The engine's own books: a request's scheduled_time is when the step began that first has it."""
    seen: dict[str, float] = {}

    def note(event: object) -> None:
        if isinstance(event, StepEvent):
            for new in event.output.scheduled_new_reqs:
                seen[new.req_id] = event.schedule_start

    async with engine_with(max_num_seqs=2) as engine:
        engine.bus.add_observer(note)
        names = [f"r{index}" for index in range(7)]
        found = await asyncio.gather(*(run(engine, "x" * 9, request_id=name) for name in names))
        assert {name: metrics.scheduled_time for name, metrics in zip(names, found, strict=True)} == seen
        parts = engine._life.parts
        assert parts is not None
        assert len(parts.output._times) == 0, "nothing is kept of who has ended"


async def test_who_leaves_before_it_ran_and_who_never_could_are_forgotten_too() -> None:
    async with engine_with(max_num_seqs=1) as engine:
        long = asyncio.create_task(run(engine, "x", max_tokens=100))
        waiting = asyncio.create_task(run(engine, "y", request_id="waits"))
        await asyncio.sleep(5 * FORWARD_S)
        engine.abort("waits")
        metrics = await waiting
        assert metrics.scheduled_time is None
        assert metrics.queue_s is None
        assert metrics.waits["seqs"] > FORWARD_S
        with pytest.raises(Exception, match="max_model_len"):
            await run(engine, "x" * 1000)
        await long
        parts = engine._life.parts
        assert parts is not None
        assert len(parts.output._times) == 0


async def test_several_continuations_tell_of_the_first() -> None:
    async with engine_with() as engine:
        outputs = [output async for output in engine.generate("x", SamplingParams(n=3, max_tokens=4, ignore_eos=True))]
        check(outputs[-1].metrics)
