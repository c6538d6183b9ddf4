"""Emptying the prefix cache of a running engine, and outputs that end because they repeat themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioengine import AsyncEngine, EngineDeadError, RepetitionDetectionParams, SamplingParams
from aioengine.commands.demo import StepMeter
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.testing import FakeExecutor, scripted
from aioengine_tui.model.metrics import HISTORY_BUCKET_S
from aioengine_tui.model.state import DashboardState

PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams = PARAMS) -> Any:
    return [output async for output in engine.generate(prompt, params)][-1]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"num_speculative_tokens": 3}, {"max_num_batched_tokens": 8}])
async def test_a_reset_under_running_requests_changes_no_output(start_rig: Any, wait_for: Any, options: dict[str, Any]) -> None:
    prompts = ["the same beginning, " + name for name in "abcdef"]
    async with start_rig(**options) as rig:
        expected = [output.token_ids for output in await asyncio.gather(*(collect(rig.engine, prompt) for prompt in prompts))]
        await rig.settle()
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8, forward_s=0.001)
    async with start_rig(executor, **options) as rig:
        tasks = [asyncio.create_task(collect(rig.engine, prompt)) for prompt in prompts]
        num_resets = 0
        for _ in range(6):
            num_steps = len(executor.outputs)
            await wait_for(lambda n=num_steps: len(executor.outputs) > n + 3 or all(task.done() for task in tasks))
            if rig.engine.stats().num_running_reqs:
                assert not rig.engine.reset_prefix_cache()
                assert rig.engine.reset_prefix_cache(reset_running_requests=True)
                assert rig.engine.stats().num_cached_blocks == rig.engine.stats().num_used_blocks == 0
                num_resets += 1
        outputs = await asyncio.gather(*tasks)
        assert num_resets >= 2
        assert [output.token_ids for output in outputs] == expected
        stats = rig.engine.stats()
        assert stats.num_resumed_reqs == stats.num_preemptions > 0
        assert stats.prefix_cache_queries == sum(len(output.prompt_token_ids) for output in outputs)
        await rig.settle()


async def test_the_dashboard_follows_a_reset(start_rig: Any) -> None:
    state = DashboardState()
    async with start_rig() as rig:
        rig.engine.bus.add_observer(state.apply)
        rig.engine.pause()
        tasks = [asyncio.create_task(collect(rig.engine, [i] * 9)) for i in range(3)]
        for _ in range(4):
            await asyncio.sleep(0.005)
            await rig.engine.step()
        assert rig.engine.reset_prefix_cache(reset_running_requests=True)
        state.apply(rig.engine.snapshot())  # a viewer that attaches just now
        await rig.engine.step()
        assert {row.num_preemptions for row in state.requests.values()} == {1}
        assert {row.state for row in state.requests.values()} == {"running"}
        assert state.blocks.num_used == rig.engine.stats().num_used_blocks
        rig.engine.reset_prefix_cache(reset_running_requests=True)
        rig.engine.resume()
        await asyncio.gather(*tasks)
        assert all("the prefix cache was reset" in line.text for line in state.log.lines if line.kind == "preempted")
        assert {row.num_preemptions for row in [*state.requests.values(), *state.finished.values()]} == {2}
        await rig.settle()


async def test_a_dead_engine_resets_no_requests(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.fail_at(2)
    async with start_rig(executor) as rig:
        with pytest.raises(EngineDeadError):
            await collect(rig.engine, [1, 2, 3])
        with pytest.raises(EngineDeadError):
            rig.engine.reset_prefix_cache(reset_running_requests=True)


async def test_demo_and_dashboard_do_not_show_thrashing_as_sharing(start_rig: Any) -> None:
    """Six prompts that share nothing, and blocks for two of them: what comes back finds blocks of its own."""
    state, meter = DashboardState(), StepMeter()
    executor = FakeExecutor(num_blocks=14, block_size=4, max_num_seqs=8)
    async with start_rig(executor, max_model_len=48) as rig:
        rig.engine.bus.add_observer(state.apply)
        rig.engine.bus.add_observer(meter.add)
        await asyncio.gather(*(collect(rig.engine, [40 * i + k for k in range(20)]) for i in range(6)))
        stats = rig.engine.stats()
        await rig.settle()
    assert stats.num_preemptions > 0
    assert stats.num_preempted_hits > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (120, 0)
    assert (meter.prefix_cache_queries, meter.prefix_cache_hits) == (120, 0)
    assert state.gauges().prefix_hit_rate == 0
    state.tick(state.now + 2 * HISTORY_BUCKET_S)  # the last bucket is shown when it is complete
    assert {0.0} <= set(state.history("hit_rate")) <= {0.0, None}, "no bucket shows a hit"
    totals = state.totals
    assert totals.num_prompt_tokens_computed <= 120
    assert totals.num_recomputed_tokens > 0
    shown = sum(value or 0 for value in state.history("prefill_tokens")) * HISTORY_BUCKET_S
    assert shown == totals.num_prompt_tokens_computed


# ------------------------------------------------------------------ repetition
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"num_speculative_tokens": 4}])
async def test_an_output_that_repeats_itself_ends_with_that_reason(start_rig: Any, options: dict[str, Any]) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8, next_token=scripted("well, " + "no " * 80))
    events: list[Any] = []
    async with start_rig(executor, **options) as rig:
        rig.engine.bus.add_observer(events.append)
        params = SamplingParams(max_tokens=90, temperature=0, repetition_detection=RepetitionDetectionParams(8, 2, 4))
        output, plain = await asyncio.gather(
            collect(rig.engine, "Is it?", params), collect(rig.engine, "Is it?", SamplingParams(max_tokens=90, temperature=0))
        )
        await rig.settle()
    assert output.text == "well, no no no no "[:-1], "four times ' no'"
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("repetition", "repetition_detected")
    assert plain.finish_reason == "length"
    assert output.token_ids == plain.token_ids[: len(output.token_ids)]
    ends = [info.finish_reason for event in events if isinstance(event, (StepEvent, StepResultEvent)) for info in event.finished]
    assert sorted(ends) == ["length", "repetition"]


async def test_each_continuation_ends_by_its_own_repetition(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8, next_token=scripted("ab" * 40))
    async with start_rig(executor) as rig:
        params = SamplingParams(max_tokens=60, n=3, seed=1, repetition_detection=RepetitionDetectionParams(2, 2, 5))
        output = await collect(rig.engine, "x", params)
        assert [(completion.text, completion.finish_reason) for completion in output.outputs] == [("ab" * 5, "repetition")] * 3
        await rig.settle()
