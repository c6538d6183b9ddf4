"""Bugs that users of other engines have reported, replayed on this one. What each is a case of has its test elsewhere too."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from typing import Any

import pytest

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.testing import FakeExecutor, make_request, make_scheduler, scripted


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


async def run(start_rig: Any, prompts: list[list[int]], params: SamplingParams, **options: Any) -> tuple[list[list[int]], list[Event], int]:
    """The tokens of each, all events, and how often something was preempted. The fake worker checks what it is given."""
    num_blocks = options.pop("num_blocks", 400)
    events: list[Event] = []
    async with start_rig(FakeExecutor(num_blocks=num_blocks, block_size=4, max_num_seqs=8), **options) as rig:
        rig.engine.bus.add_observer(events.append)
        outputs = await asyncio.wait_for(rig.engine.generate_batch(prompts, params, progress=False), 60)
        await rig.settle()
        return [output.token_ids for output in outputs], events, rig.engine.stats().num_preemptions


def steps_of(events: list[Event]) -> list[StepEvent]:
    return [event for event in events if isinstance(event, StepEvent) and not event.output.is_cleanup_only]


# One that is preempted while a step in flight still samples for it; a late token of it is taken in once, or dropped.
@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_two_requests_in_a_pool_for_one_and_a_half_give_the_tokens_of_an_unhurried_run(start_rig: Any, prefix_caching: bool) -> None:
    prompts, params = [[1, 2, 3], [4, 5, 6]], greedy(64)
    calm, _, num_preemptions = await run(start_rig, prompts, params, async_scheduling=False)
    assert num_preemptions == 0
    tokens, events, num_preemptions = await run(start_rig, prompts, params, num_blocks=27, enable_prefix_caching=prefix_caching)
    assert tokens == calm
    assert num_preemptions > 0
    preempting = [event for event in steps_of(events) if event.output.preempted_req_ids]
    assert any(event.queue_depth == 2 for event in preempting), "none was preempted with a step in flight"


# Everybody is preempted for blocks that are on their way, or resumes and is preempted again for ever.
async def test_three_long_requests_in_a_pool_for_hardly_more_than_one_move_in_every_step(start_rig: Any) -> None:
    prompts = [[index] * 40 for index in (1, 2, 3)]
    tokens, events, num_preemptions = await run(start_rig, prompts, greedy(60), num_blocks=32, enable_prefix_caching=False)
    assert [len(ids) for ids in tokens] == [60, 60, 60]
    steps = steps_of(events)
    assert all(step.output.total_num_scheduled_tokens > 0 for step in steps)
    alive = [step for step in steps if step.stats.num_running_reqs]
    assert len(alive) == len(steps), "somebody runs whenever there is work"
    assert all(step.output.num_scheduled_tokens for step in steps)
    assert num_preemptions <= 2 * len(prompts), "no more than what makes room, and nobody over and over again"
    assert not any(len(step.output.preempted_req_ids) >= step.stats.num_running_reqs + 1 for step in steps), "never everybody at once"


# A request that a step had to leave out continues from its real last token, not from a placeholder.
def test_a_request_that_a_step_has_no_budget_for_goes_on_from_its_last_token() -> None:
    """A budget below the number of running requests, which settings do not allow: the scheduler's own, changed while they run."""
    prompts = {"a": [1, 2, 3], "b": [4], "c": [5, 6], "d": [7], "e": [8]}
    alone = {name: drive({name: prompt}, budget=16)[0][name] for name, prompt in prompts.items()}
    tokens, num_left_out = drive(prompts, budget=2)
    assert tokens == alone
    assert num_left_out > 20, "the budget was meant to leave running requests out"


def drive(prompts: dict[str, list[int]], *, budget: int) -> tuple[dict[str, list[int]], int]:
    """The tokens of each with two steps in flight, and how often a step left a running request out."""
    scheduler = make_scheduler(num_kv_cache_blocks=65, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
    executor = FakeExecutor(num_blocks=65, block_size=4)
    executor.load_model().result()
    executor.initialize_kv_cache(65).result()
    for name, prompt in prompts.items():
        scheduler.add_request(make_request(prompt, request_id=name, max_tokens=12, ignore_eos=True))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    planned: deque[SchedulerOutput] = deque()
    num_left_out = 0
    while scheduler.has_work or planned:
        while len(planned) < 2 and (out := scheduler.schedule()) is not None:
            if len(scheduler.running) == len(prompts):
                scheduler.config = dataclasses.replace(scheduler.config, max_num_batched_tokens=budget)
            num_left_out += sum(request.request_id not in out.num_scheduled_tokens for request in scheduler.running)
            planned.append(out)
        out = planned.popleft()
        executor.execute_model(out).result()
        for output in scheduler.update_from_output(out, executor.sample_tokens().result()):
            tokens[output.request_id] += output.new_token_ids
    executor.shutdown()
    return tokens, num_left_out


@pytest.mark.parametrize("when", ["added", "scheduled", "in flight", "back", "told"])
async def test_an_abort_at_any_point_of_a_step_is_safe_and_can_be_said_twice(when: str, start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=65, block_size=4, max_num_seqs=8, forward_s=0.001)
    async with start_rig(executor) as rig:
        engine = rig.engine

        def abort() -> None:
            engine.abort("victim")
            assert not engine.abort("victim")
            assert not engine.abort("nobody")

        def observe(event: Event) -> None:
            if isinstance(event, StepEvent) and "victim" in event.output.num_scheduled_tokens:
                if when == "scheduled" and event.step_id >= 3:
                    abort()
                elif when == "in flight" and event.step_id == 3:
                    asyncio.get_running_loop().call_soon(abort)
            elif isinstance(event, StepResultEvent) and "victim" in event.num_new_tokens and when == "back":
                abort()

        engine.bus.add_observer(observe)
        mate = asyncio.create_task(engine.generate_batch([[7, 8, 9]], greedy(12), progress=False))
        await asyncio.sleep(0)
        last: RequestOutput | None = None
        async for last in engine.generate([1, 2, 3], greedy(200), request_id="victim"):
            if when == "told" or (when == "added" and not last.finished):
                abort()
        assert last is not None
        assert last.finish_reason == "abort"
        (output,) = await mate
        assert len(output.token_ids) == 12
        await rig.settle()
        assert executor.outputs, "the worker was asked for something"
    alone, _, _ = await run(start_rig, [[7, 8, 9]], greedy(12))
    assert output.token_ids == alone[0]


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_of_several_tokens_leaks_nothing_into_the_stream(include: bool, start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=65, next_token=scripted("4.\n\nQ no\n\nQ: next"))
    params = SamplingParams(
        max_tokens=50, stop=("\n\nQ:",), output_kind=RequestOutputKind.DELTA, include_stop_str_in_output=include, temperature=0.0
    )
    pieces: list[str] = []
    async with start_rig(executor, block_size=16) as rig:
        async for output in rig.engine.generate("2+2?", params):
            pieces.append(output.text)
            assert "4.\n\nQ no".startswith("".join(pieces)) or include
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", "\n\nQ:")
    assert "".join(pieces) == "4.\n\nQ no" + ("\n\nQ:" if include else "")
