"""Structured output in the step loop: masks beside the forward, nobody else disturbed, nothing left behind."""

from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import EngineDeadError, InvalidRequestError, RequestTimeoutError
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.executor.base import GrammarOutput
from aioengine.outputs import ModelRunnerOutput, RequestOutput
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output import compiler
from aioengine.structured_output.compiler import build_grammar
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import GrammarError
from aioengine.testing import EOS_TOKEN_ID, FakeExecutor, scripted
from aioengine_tui.model.state import DashboardState

REGEX = r"[a-f]{6}-[0-9]{4,8};"


def params(regex: str | None = REGEX, **options: Any) -> SamplingParams:
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "structured_outputs": structured, **options})


def num_matchers(rig: Any) -> int:
    return len(rig.engine._life.started().structured_output)


async def final(rig: Any, prompt: list[int], sampling_params: SamplingParams, **options: Any) -> RequestOutput:
    outputs = [output async for output in rig.engine.generate(prompt, sampling_params, **options)]
    assert isinstance(outputs[-1], RequestOutput)
    return outputs[-1]


class Recorder(FakeExecutor):
    """Notes, in the engine's thread, what is submitted; and for each mask which forwards had ended by then."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[tuple[str, int]] = []
        self.executed: list[Future[None]] = []
        self.num_sampled = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        self.log.append(("execute", scheduler_output.step_id))
        future = super().execute_model(scheduler_output)
        self.executed.append(future)
        return future

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        self.num_sampled += 1
        self.log.append(("sample" if grammar_output is None else "sample masked", self.num_sampled))
        return super().sample_tokens(grammar_output)


async def test_the_mask_is_computed_while_the_forward_runs(start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with two steps in flight: step N + 1 is on the worker before its mask, which needs the token of step N, is known."""
    executor = Recorder(block_size=4, forward_s=0.005)
    running: list[bool] = []
    compute = StructuredOutputManager.bitmask

    def bitmask(self: StructuredOutputManager, request_id: str) -> bytes:
        executor.log.append(("mask", len(executor.executed)))
        running.append(not executor.executed[-1].done())
        return compute(self, request_id)

    monkeypatch.setattr(StructuredOutputManager, "bitmask", bitmask)
    async with start_rig(executor) as rig:
        output = await final(rig, [1, 2, 3], params())
        await rig.settle()
        assert num_matchers(rig) == 0
    assert re.fullmatch(REGEX, output.text)
    num_masks = len(running)
    assert num_masks >= len(output.token_ids)
    assert sum(running) >= num_masks // 2, "all of them, but for hiccups of the machine"
    for step in range(1, num_masks + 1):
        execute, mask, sample = (executor.log.index((kind, step)) for kind in ("execute", "mask", "sample masked"))
        assert execute < mask < sample
        # The worker has one more step than it has been told to sample, and never two.
        if ("execute", step + 1) in executor.log:
            assert sample < executor.log.index(("execute", step + 1))
    assert max(depth_of(executor.log)) == 1


def depth_of(log: list[tuple[str, int]]) -> list[int]:
    """After each entry: how many steps were executed and not sampled."""
    depth, depths = 0, []
    for kind, _ in log:
        depth += {"execute": 1, "mask": 0}.get(kind, -1)
        depths.append(depth)
    return depths


async def test_events_tell_when_the_masks_were_computed_and_who_needs_one(start_rig: Any) -> None:
    state = DashboardState()
    events: list[Event] = []
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.005)) as rig:
        rig.engine.bus.add_observer(events.append)
        rig.engine.bus.add_observer(state.apply)
        await asyncio.gather(final(rig, [1, 2], params(), request_id="masked"), final(rig, [3], params(regex=None), request_id="free"))
        await rig.settle()
    outputs = {event.step_id: event.output for event in events if isinstance(event, StepEvent)}
    results = [event for event in events if isinstance(event, StepResultEvent)]
    assert {event.step_id for event in results if event.grammar_start is not None} == {
        step_id for step_id, output in outputs.items() if output.structured_output_request_ids
    }
    num_masked = 0
    for event in results:
        record = state.step(event.step_id)
        assert record is not None
        assert {share.request_id for share in record.shares if share.needs_mask} == outputs[event.step_id].structured_output_request_ids
        if event.grammar_start is not None:
            num_masked += 1
            assert event.grammar_end is not None
            assert record.lanes.grammar == (event.grammar_start, event.grammar_end)
            assert record.lanes.schedule[1] <= event.grammar_start <= event.grammar_end <= event.update_start
    assert 10 < num_masked < len(results)


async def test_two_steps_are_in_flight_all_the_same(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.003)) as rig:
        with rig.engine.events() as subscription:
            await final(rig, [1, 2, 3], params())
            events = [event for event in subscription.drain() if isinstance(event, StepEvent)]
    assert max(event.queue_depth for event in events) == 2
    assert all(event.output.structured_output_request_ids == frozenset(event.output.num_scheduled_tokens) for event in events[:8])


async def test_a_step_without_such_requests_keeps_its_order(start_rig: Any) -> None:
    executor = Recorder(block_size=4)
    async with start_rig(executor) as rig:
        await rig.engine.generate_batch([[1, 2], [3]], params(None), progress=False)
    kinds = [kind for kind, _ in executor.log]
    assert kinds == ["execute", "sample"] * (len(kinds) // 2)


PROMPTS = [[(7 * index + position) % 256 for position in range(3 + 9 * index)] for index in range(10)]
PARAMS = [
    params(REGEX if index % 3 else None, seed=index, temperature=index % 2, min_tokens=index, logprobs=1 if index % 4 else None)
    for index in range(10)
]


async def run_all(start_rig: Any, *, alone: bool = False, **options: Any) -> list[tuple[list[int], str | None, Any]]:
    num_blocks = options.pop("num_blocks", 400)
    async with start_rig(FakeExecutor(num_blocks=num_blocks, block_size=4, max_num_seqs=options.get("max_num_seqs", 8)), **options) as rig:
        if alone:
            outputs = [await final(rig, prompt, p) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
        else:
            outputs = await rig.engine.generate_batch(PROMPTS, PARAMS, progress=False)
        await rig.settle()
        assert num_matchers(rig) == 0
        assert (rig.engine.stats().num_preemptions > 0) == (num_blocks == 40)
        return [(output.token_ids, output.finish_reason, output.outputs[0].logprobs) for output in outputs]


async def test_every_way_of_scheduling_gives_the_same_tokens(start_rig: Any) -> None:
    """Those of requests with a grammar, and of their batch mates without: the oracle is each request alone, step by step."""
    oracle = await run_all(start_rig, alone=True, async_scheduling=False, enable_prefix_caching=False, max_num_batched_tokens=256)
    for index, (token_ids, finish_reason, logprobs) in enumerate(oracle):
        if index % 3:
            assert re.fullmatch(REGEX, bytes(token_ids[:-1]).decode())
            assert (token_ids[-1], finish_reason) == (EOS_TOKEN_ID, "stop")
        if logprobs is not None:
            assert [next(iter(entry)) for entry in logprobs] == token_ids
    for overlap in (True, False):
        for num_blocks in (400, 40):
            for budget in (8, 256):
                result = await run_all(start_rig, async_scheduling=overlap, num_blocks=num_blocks, max_num_batched_tokens=budget)
                assert result == oracle, (overlap, num_blocks, budget)


async def test_no_step_is_submitted_behind_one_that_waits_to_be_sampled(start_rig: Any) -> None:
    """An engine of two steps in flight never comes to that point, one of three would."""
    executor = Recorder(num_blocks=400, block_size=4, forward_s=0.001)
    async with start_rig(executor) as rig:
        rig.engine._life.started().core._max_concurrent_batches = 3
        outputs = await rig.engine.generate_batch(PROMPTS, PARAMS, progress=False)
        await rig.settle()
    assert [output.token_ids for output in outputs] == [token_ids for token_ids, *_ in await run_all(start_rig)]
    assert max(depth_of(executor.log)) == 1


async def test_aborts_at_any_time_leave_no_matcher(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=60, block_size=4, forward_s=0.0005, max_num_seqs=8)) as rig:

        async def give_up_after(index: int) -> None:
            stream = rig.engine.generate([index] * (1 + index % 20), params("[a-z]*", seed=index, temperature=1.0, max_tokens=40))
            num_outputs = 0
            async for _ in stream:
                num_outputs += 1
                if num_outputs > index % 7:
                    break
            await stream.aclose()

        others = asyncio.create_task(rig.engine.generate_batch([[9] * 5] * 3, params(), progress=False))
        tasks = [asyncio.create_task(give_up_after(index)) for index in range(60)]
        await asyncio.sleep(0.01)
        for task in tasks[::5]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(re.fullmatch(REGEX, output.text) for output in await others)
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_ends_of_all_kinds(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("abcabcabc"))) as rig:
        cut = await final(rig, [1], params("[abc]+", max_tokens=4))
        assert (cut.text, cut.finish_reason) == ("abca", "length")
        stopped = await final(rig, [1], params("[abc]+", stop="ca"))
        assert (stopped.text, stopped.finish_reason, stopped.outputs[0].stop_reason) == ("ab", "stop", "ca")
        by_id = await final(rig, [1], params("[abc]+", stop_token_ids=[ord("c")]))
        assert (by_id.token_ids, by_id.outputs[0].stop_reason) == ([*b"abc"], ord("c"))
        too_short = await final(rig, [1], params("ab", min_tokens=10))
        assert (too_short.token_ids, too_short.finish_reason) == ([*b"ab", EOS_TOKEN_ID], "stop")
        long_enough = await final(rig, [1], params("[ab]*", min_tokens=6))
        assert len(long_enough.token_ids) >= 6
        assert re.fullmatch("[ab]*", long_enough.text)
        assert long_enough.finish_reason == "stop"
        going_on = await final(rig, [1], params("ab", ignore_eos=True, max_tokens=5))
        assert (going_on.token_ids, going_on.finish_reason) == ([*b"ab", *[EOS_TOKEN_ID] * 3], "length")
        assert going_on.text == "ab"
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_errors_come_to_the_caller_and_to_nobody_else(start_rig: Any) -> None:
    async with start_rig() as rig:
        other = asyncio.create_task(final(rig, [1], params()))
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await final(rig, [1], params("a(b"))
        with pytest.raises(InvalidRequestError, match=r"(?s)prompt 1: .*unclosed group"):
            await rig.engine.generate_batch([[1], [2]], [params(), params("a(b")], progress=False)
        assert re.fullmatch(REGEX, (await other).text)
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_a_grammar_that_cannot_go_on_ends_its_request_with_the_cause(start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = StructuredOutputManager.bitmask
    calls: dict[str, int] = {}

    def bitmask(self: StructuredOutputManager, request_id: str) -> bytes:
        calls[request_id] = calls.get(request_id, 0) + 1
        if request_id == "bad" and calls[request_id] == 4:
            raise GrammarError("too much work")
        return compute(self, request_id)

    monkeypatch.setattr(StructuredOutputManager, "bitmask", bitmask)
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.001)) as rig:
        bad, good = await asyncio.gather(
            final(rig, [1, 2], params(), request_id="bad"), final(rig, [1, 2], params(), request_id="good"), return_exceptions=True
        )
        assert isinstance(good, RequestOutput)
        assert re.fullmatch(REGEX, good.text)
        assert isinstance(bad, RequestOutput)
        assert bad.finish_reason == "error"
        assert len(bad.token_ids) == 3
        assert "too much work" in str(bad.outputs[0].stop_reason)
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_several_continuations_each_have_a_matcher(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4)) as rig:
        output = await final(rig, [1, 2], params("[a-z]{3,8}", n=4, seed=1, temperature=1.0))
        assert all(re.fullmatch("[a-z]{3,8}", one.text) for one in output.outputs)
        assert len({one.text for one in output.outputs}) > 1
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_single_steps_of_a_paused_engine(start_rig: Any, wait_for: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4)) as rig:
        rig.engine.pause()
        task = asyncio.create_task(final(rig, [1, 2], params("ab")))
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 1)
        steps = [rig.engine.step() for _ in range(2)]
        assert await asyncio.gather(*steps) == [1, 2]
        rig.engine.resume()
        assert (await task).text == "ab"


@pytest.mark.parametrize("phase", ["execute", "sample"])
async def test_a_failing_step_fails_the_stream_while_another_waits_to_be_sampled(start_rig: Any, phase: Any) -> None:
    executor = FakeExecutor(block_size=4, forward_s=0.002)
    executor.fail_at(4, phase=phase)
    async with start_rig(executor) as rig:
        with pytest.raises(EngineDeadError) as caught:
            await final(rig, [1, 2], params())
        assert "injected failure in step 4" in str(caught.value.__cause__ or caught.value)


async def test_shutdown_while_a_grammar_is_compiled(start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        started.set()
        go_on.wait(5)
        return build_grammar(*args, **options)

    monkeypatch.setattr(compiler, "build_grammar", slowly)
    async with start_rig() as rig:
        task = asyncio.create_task(final(rig, [1], params()))
        queued = asyncio.create_task(final(rig, [1], params("b")))
        await asyncio.to_thread(started.wait, 5)
        await rig.engine.shutdown()
        go_on.set()
        results = await asyncio.wait_for(asyncio.gather(task, queued, return_exceptions=True), 5)
        assert all(isinstance(result, EngineDeadError) for result in results), results


class Disobedient(FakeExecutor):
    """Samples what its script says, whatever the mask."""

    def _next_allowed(self, token_id: int, bitmask: bytes) -> int:
        return token_id


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("abx", {}),
        ("ab", {}),  # and then the end token, which comes too early
        ("abx", {"max_tokens": 3}),  # also where the request would end by that token
        ("abx", {"stop": "x"}),
        ("abx", {"stop_token_ids": [ord("x")]}),
    ],
)
async def test_a_token_that_does_not_match_ends_its_request_with_error(
    start_rig: Any, script: str, options: dict[str, Any], overlap: bool
) -> None:
    async with start_rig(Disobedient(block_size=4, next_token=scripted(script)), async_scheduling=overlap) as rig:
        output = await final(rig, [1], params("[abc]{3}", **options))
        assert (output.finish_reason, output.token_ids) == ("error", [*b"ab"])
        assert "structured output cannot go on" in str(output.outputs[0].error)
        assert (await final(rig, [1], params(None, max_tokens=2))).finish_reason == "length"
        await rig.settle()
        assert num_matchers(rig) == 0


async def test_an_end_token_in_the_middle_of_a_grammar_is_an_error_not_an_end(start_rig: Any) -> None:
    structured = StructuredOutputsParams(grammar='start: "a" <eos> "b"')
    async with start_rig(FakeExecutor(block_size=4)) as rig:
        output = await final(rig, [1], SamplingParams(max_tokens=9, structured_outputs=structured))
        assert output.finish_reason == "error"
        assert "asks for more behind the end-of-sequence token 256" in str(output.outputs[0].error)
        whole = await final(rig, [1], SamplingParams(max_tokens=9, ignore_eos=True, structured_outputs=structured))
        assert (whole.text, whole.token_ids[:3]) == ("ab", [ord("a"), EOS_TOKEN_ID, ord("b")])


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_limit_of_the_parser_that_is_reached_late_is_an_error(start_rig: Any, overlap: bool) -> None:
    """The beginning takes any token, the end has more alternatives than the parser can keep."""
    many = " | ".join(f'"option {number}" x' for number in range(2_500))
    structured = StructuredOutputsParams(grammar=f'start: /[a-z]{{30}}-/ item\nitem: {many}\nx: "x"')
    async with start_rig(FakeExecutor(block_size=4), async_scheduling=overlap) as rig:
        output = await final(rig, [1], SamplingParams(max_tokens=60, structured_outputs=structured))
        assert output.finish_reason == "error"
        assert "max is 2000" in str(output.outputs[0].error)


async def test_a_request_that_times_out_does_not_wait_for_its_grammar(start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(compiler, "build_grammar", lambda *args, **options: go_on.wait(10) and build_grammar(*args, **options))
    async with start_rig() as rig:
        with pytest.raises(RequestTimeoutError):
            await asyncio.wait_for(final(rig, [1], params(), timeout=0.1), 2)
        go_on.set()
        assert (await final(rig, [1], params())).finish_reason == "stop"
