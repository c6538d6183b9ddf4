"""`AsyncEngine.generate`: what a stream yields, and what happens when its consumer is slow or gone."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import AioEngineError, ConfigError, EngineDeadError, InvalidRequestError
from aioengine.executor.base import GrammarOutput
from aioengine.outputs import ModelRunnerOutput, RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.testing import EOS_TOKEN_ID, FakeExecutor, FakeTokenizer, make_model_info, scripted

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=400)


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams | None = GREEDY, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


# ---------------------------------------------------------------------------------------------------- streaming
async def test_a_stream_grows_to_its_final_output(rig: Any) -> None:
    outputs = await collect(rig.engine, "Once upon a time", request_id="story")
    final = outputs[-1]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert "".join(o.text_delta for o in outputs) == final.text
    assert all(final.text.startswith(o.text) for o in outputs)
    assert final.request_id == "story"
    assert final.prompt == "Once upon a time"
    assert final.prompt_token_ids == FakeTokenizer().encode("Once upon a time")
    assert (len(final.token_ids), final.finish_reason) == (12, "length")
    assert final.text == FakeTokenizer().decode(final.token_ids)
    metrics = final.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.queued_time < metrics.first_token_time < metrics.finished_time
    assert outputs[0].metrics.finished_time is None


async def test_prompts_may_be_text_token_ids_or_messages(rig: Any) -> None:
    text = await collect(rig.engine, "Hi")
    ids = await collect(rig.engine, FakeTokenizer().encode("Hi"))
    chat = await collect(rig.engine, [{"role": "user", "content": "Hi"}])
    assert text[-1].token_ids == ids[-1].token_ids
    assert ids[-1].prompt is None
    assert chat[-1].prompt == "<bos><|user|>Hi<eos><|assistant|>"
    assert chat[-1].prompt_token_ids.count(257) == 1, "the template's <bos> is not added again"


async def test_a_stop_token_is_in_the_ids_but_not_in_the_text(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("hello")), max_num_seqs=4) as rig:
        final = (await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False)))[-1]
        assert (final.text, final.finish_reason, final.outputs[0].stop_reason) == ("hello", "stop", None)
        assert final.token_ids == [*b"hello", EOS_TOKEN_ID]
        final = (await collect(rig.engine, "x", SamplingParams(temperature=0, stop_token_ids=(ord("l"),))))[-1]
        assert (final.text, final.finish_reason, final.outputs[0].stop_reason) == ("he", "stop", ord("l"))
        final = (await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))[-1]
        assert (final.text, final.finish_reason, len(final.token_ids)) == ("hello", "length", 8)
        await rig.settle()


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_stop_string_ends_the_request_and_its_text(start_rig: Any, overlap: bool) -> None:
    executor = FakeExecutor(block_size=4, next_token=scripted("one END two"))
    async with start_rig(executor, async_scheduling=overlap) as rig:
        outputs = await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=20, stop=("END",), logprobs=1))
        final = outputs[-1]
        assert (final.text, final.finish_reason, final.outputs[0].stop_reason) == ("one ", "stop", "END")
        assert rig.engine.stats().num_running_reqs == 0, "it does not run on behind the user's back"
        assert bytes(final.token_ids) == b"one END"
        assert "".join(o.text_delta for o in outputs) == "one "
        assert final.outputs[0].logprobs is not None
        assert len(final.outputs[0].logprobs) == len(final.token_ids)
        # The stop string completes with the last token that max_tokens allows: it is the stop that is told.
        final = (await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=7, stop=("END",))))[-1]
        assert (final.text, final.finish_reason) == ("one ", "stop")
        # The end comes while "EN" is held back.
        final = (await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=6, stop=("END",))))[-1]
        assert (final.text, final.finish_reason) == ("one EN", "length")
        await rig.settle()


async def test_text_token_ids_and_logprobs_of_an_output_belong_together(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("héllo wörld"))) as rig:
        outputs = await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=10, logprobs=3))
        for output in outputs:
            completion = output.outputs[0]
            assert completion.logprobs is not None
            assert [next(iter(logprobs)) for logprobs in completion.logprobs] == completion.token_ids
            assert FakeTokenizer().decode(completion.token_ids).rstrip("\ufffd") == completion.text
        assert (await collect(rig.engine, "x"))[-1].outputs[0].logprobs is None


async def test_max_tokens_beyond_the_models_length_ends_with_length(start_rig: Any) -> None:
    async with start_rig(max_model_len=32) as rig:
        for max_tokens in (1000, None):
            final = (await collect(rig.engine, list(range(20)), SamplingParams(temperature=0, max_tokens=max_tokens)))[-1]
            assert (len(final.token_ids), final.finish_reason) == (12, "length")
        final = (await collect(rig.engine, list(range(31)), ENDLESS))[-1]
        assert len(final.token_ids) == 1
        await rig.settle()


async def test_without_a_tokenizer_there_are_token_ids_only(start_rig: Any) -> None:
    async with start_rig(tokenizer=None) as rig:
        final = (await collect(rig.engine, [1, 2, 3]))[-1]
        assert (len(final.token_ids), final.text) == (12, "")
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            await collect(rig.engine, "text")
        with pytest.raises(AioEngineError, match="no tokenizer"):
            _ = rig.engine.tokenizer


async def test_seeds(start_rig: Any) -> None:
    """A request's own seed decides; else the engine's seed gives each request one, in order."""
    random = SamplingParams(max_tokens=8)

    async def run(seed: int | None) -> list[list[int]]:
        async with start_rig(seed=seed) as rig:
            return [(await collect(rig.engine, "x", random))[-1].token_ids for _ in range(2)]

    first, second = await run(1)
    assert first != second
    assert await run(1) == [first, second]
    assert await run(2) != [first, second]
    async with start_rig() as rig:
        seeded = SamplingParams(max_tokens=8, seed=5)
        assert (await collect(rig.engine, "x", seeded))[-1].token_ids == (await collect(rig.engine, "x", seeded))[-1].token_ids


async def test_a_slow_consumer_gets_steps_merged(rig: Any, wait_for: Callable[..., Awaitable[None]]) -> None:
    stream = rig.engine.generate("slow", GREEDY)
    outputs = [await anext(stream)]
    await wait_for(lambda: rig.engine.stats().num_running_reqs == 0)
    outputs += [output async for output in stream]
    assert len(outputs) == 2, "everything after the first output was merged into one"
    assert outputs[0].text + outputs[1].text_delta == outputs[1].text
    assert len(outputs[1].token_ids) == 12


class InstantExecutor(FakeExecutor):
    """Runs each step inside the call: its futures are done before the loop looks at them."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        future: Future[None] = Future()
        self._execute(scheduler_output)
        future.set_result(None)
        return future

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._sample(grammar_output))
        return future


async def test_other_coroutines_run_between_steps(start_rig: Any) -> None:
    """Even when the worker is faster than the loop."""
    async with start_rig(InstantExecutor(num_blocks=129, block_size=4)) as rig:
        outputs = await collect(rig.engine, "x", SamplingParams(temperature=0, max_tokens=200))
        assert len(outputs) == 200, "the consumer saw each step"
        await rig.settle()


# ---------------------------------------------------------------------------------------------------- the consumer leaves
async def test_breaking_out_of_the_loop_aborts(rig: Any) -> None:
    stream = rig.engine.generate("x", ENDLESS)
    async for output in stream:
        if len(output.token_ids) >= 3:
            break
    await stream.aclose()
    assert rig.engine.stats().num_running_reqs == 0
    await rig.settle()


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_cancelling_the_consumers_task_aborts(rig: Any, after: int) -> None:
    reached = asyncio.Event()

    async def consume() -> None:
        if after == 0:
            reached.set()
        count = 0
        async for _ in rig.engine.generate("x", ENDLESS):
            count += 1
            if count == after:
                reached.set()

    task = asyncio.create_task(consume())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.stats().num_running_reqs == 0
    await rig.settle()


async def test_losing_the_generator_aborts(rig: Any, wait_for: Callable[..., Awaitable[None]]) -> None:
    async def lose() -> None:
        stream = rig.engine.generate("x", ENDLESS)
        await anext(stream)

    await lose()
    gc.collect()
    await wait_for(lambda: rig.engine.stats().num_running_reqs == 0)
    await rig.settle()


async def test_a_stream_that_was_never_started_costs_nothing(rig: Any) -> None:
    stream = rig.engine.generate("x", ENDLESS)
    del stream
    await asyncio.sleep(0)
    assert rig.engine.stats().num_waiting_reqs == 0


# ---------------------------------------------------------------------------------------------------- abort and ids
async def test_abort_ends_the_stream_with_what_there_is(rig: Any) -> None:
    outputs = []
    async for output in rig.engine.generate("x", ENDLESS, request_id="a"):
        outputs.append(output)
        if len(outputs) == 3:
            assert rig.engine.abort("a")
    assert outputs[-1].finish_reason == "abort"
    assert "".join(o.text_delta for o in outputs) == outputs[-1].text
    assert not rig.engine.abort("a")
    assert not rig.engine.abort("unknown")


async def test_a_live_request_id_cannot_be_taken_again(rig: Any) -> None:
    stream = rig.engine.generate("x", GREEDY, request_id="a")
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        await collect(rig.engine, "y", request_id="a")
    rest = [output async for output in stream]
    assert len(rest[-1].token_ids) == 12, "the first one is not disturbed"


async def test_two_that_take_the_same_id_at_once(start_rig: Any) -> None:
    """Neither is admitted when they are checked first, as both are being tokenised in a thread: one wins."""
    executor = FakeExecutor(num_blocks=2000, block_size=4, model_info=make_model_info(max_position_embeddings=8192))
    async with start_rig(executor, max_num_batched_tokens=4096) as rig:
        text = "x" * 5000
        results = await asyncio.gather(*(collect(rig.engine, text, request_id="same") for _ in range(2)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["InvalidRequestError", "list"]
        await rig.settle()


async def test_an_id_can_be_reused_as_soon_as_its_stream_ended(rig: Any) -> None:
    """Also while the worker has not been told yet that the old request is gone."""
    expected = (await collect(rig.engine, "x", request_id="a"))[-1].token_ids
    for _ in range(20):
        final = (await collect(rig.engine, "x", request_id="a"))[-1]
        assert (final.request_id, final.token_ids) == ("a", expected)
    stream = rig.engine.generate("x", ENDLESS, request_id="a")
    await anext(stream)
    await stream.aclose()
    final = (await collect(rig.engine, "x", request_id="a"))[-1]
    assert (final.request_id, final.token_ids) == ("a", expected)


# ---------------------------------------------------------------------------------------------------- life of the engine
async def test_use_before_start_and_after_shutdown() -> None:
    engine = AsyncEngine(executor=FakeExecutor())
    with pytest.raises(AioEngineError, match="not started"):
        await collect(engine, [1])
    with pytest.raises(AioEngineError, match="not started"):
        engine.stats()
    async with engine:
        with pytest.raises(AioEngineError, match="started before"):
            await engine.start()
        with pytest.raises(AioEngineError, match="started before"):
            async with engine:
                pass
        engine.check_health()
    for _ in range(2):
        await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(engine, [1])
    with pytest.raises(EngineDeadError, match="shut down"):
        await engine.start()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.check_health()


async def test_shutdown_ends_live_streams(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.005)) as rig:
        stream = rig.engine.generate("x", ENDLESS)
        await anext(stream)
        waiting = asyncio.create_task(collect(rig.engine, "y", ENDLESS))
        await asyncio.sleep(0.01)
        await rig.engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await waiting


async def test_an_engine_belongs_to_its_loop(rig: Any) -> None:
    def elsewhere() -> None:
        asyncio.run(collect(rig.engine, "x"))

    with pytest.raises(AioEngineError, match="another event loop"):
        await asyncio.to_thread(elsewhere)


async def test_a_failing_start_stops_what_it_started() -> None:
    class NoMemory(FakeExecutor):
        def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
            future: Future[None] = Future()
            future.set_exception(MemoryError("no room for the cache"))
            return future

    executor = NoMemory()
    engine = AsyncEngine(executor=executor)
    with pytest.raises(MemoryError):
        await engine.start()
    assert executor.is_shut_down
    with pytest.raises(EngineDeadError, match="did not start") as info:
        await collect(engine, [1])
    assert isinstance(info.value.__cause__, MemoryError)


async def test_shutdown_while_starting(wait_for: Callable[..., Awaitable[None]]) -> None:
    class Slow(FakeExecutor):
        def load_model(self) -> Any:
            return self._worker.submit(self._released.wait)

    executor = Slow()
    engine = AsyncEngine(executor=executor)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0.01)
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="while it was starting"):
        await starting
    assert executor.is_shut_down


async def test_cancelled_start_stops_the_executor() -> None:
    class Slow(FakeExecutor):
        def load_model(self) -> Any:
            return self._worker.submit(self._released.wait)

    executor = Slow()
    starting = asyncio.create_task(AsyncEngine(executor=executor).start())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert executor.is_shut_down


def test_options_are_checked_when_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match="unknown engine option max_seqs"):
        AsyncEngine("smollm2", max_seqs=3)
    with pytest.raises(ConfigError, match="block_size"):
        AsyncEngine("smollm2", block_size=0)


async def test_an_executor_without_facts_is_refused() -> None:
    class Bare(FakeExecutor):
        def __init__(self) -> None:
            super().__init__()
            del self.model_info

    with pytest.raises(ConfigError, match="without model_info"):
        await AsyncEngine(executor=Bare()).start()
    async with AsyncEngine(executor=FakeExecutor(), model_info=make_model_info(vocab_size=300), max_num_seqs=4) as engine:
        assert engine.model_info.vocab_size == 300
        assert engine.resolved_config.scheduler.max_num_seqs == 4
        assert engine.config.max_num_seqs == 4


def test_the_event_loop_may_end_around_the_engine() -> None:
    """No shutdown(), as after an exception elsewhere: nothing hangs, a warning says what was forgotten, the worker is stopped."""

    async def main() -> None:
        engine = AsyncEngine(executor=executor)
        await engine.start()
        await anext(engine.generate([1, 2], ENDLESS))

    executor = FakeExecutor(forward_s=0.001)
    with pytest.warns(ResourceWarning, match=r"dropped without being shut down: use `async with AsyncEngine\(...\)`"):
        asyncio.run(main())
    deadline = time.monotonic() + 5
    while not executor.is_shut_down and time.monotonic() < deadline:
        time.sleep(0.001)
    assert executor.is_shut_down


@pytest.mark.skipif("sys.platform == 'win32'")
def test_it_runs_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> list[int]:
        async with AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer()) as engine:
            return (await collect(engine, "x"))[-1].token_ids

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        on_uvloop = runner.run(main())
    assert on_uvloop == asyncio.run(main())
