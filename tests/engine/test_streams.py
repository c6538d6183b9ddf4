"""The stream that `generate()` returns, in every way that a consumer may stop: for a moment, or for good."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioengine import AioEngineError, EngineDeadError, InvalidRequestError, RequestTimeoutError, SamplingParams
from aioengine.sampling_params import RequestOutputKind
from aioengine.testing import FakeExecutor, FakeTokenizer

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
DELTAS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def slow(forward_s: float = 0.002, **options: Any) -> FakeExecutor:
    return FakeExecutor(num_blocks=600, block_size=4, forward_s=forward_s, **options)


async def ended(rig: Any) -> bool:
    """Whether everything ends soon."""
    for _ in range(1000):
        if not rig.engine.num_unfinished_reqs:
            await rig.settle()
            return True
        await asyncio.sleep(0.001)
    return False


async def runs_on(rig: Any) -> bool:
    await asyncio.sleep(0.02)
    return bool(rig.engine.num_unfinished_reqs)


async def reads_the_end(stream: Any, reason: str) -> None:
    """An output with that finish_reason, and then nothing more, however often one asks."""
    outputs = []
    with contextlib.suppress(StopAsyncIteration):
        while True:
            outputs.append(await anext(stream))
    assert outputs[-1].finish_reason == reason
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


# ---------------------------------------------------------------------------------------------------- stopping for a moment
async def by_wait_for(stream: Any, seconds: float) -> Any:
    return await asyncio.wait_for(anext(stream), seconds)


async def by_wait_for_in_a_wrapper(stream: Any, seconds: float) -> Any:
    async def read() -> Any:
        return await anext(stream)

    return await asyncio.wait_for(read(), seconds)


async def by_timeout_block(stream: Any, seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await anext(stream)


async def by_cancelled_task(stream: Any, seconds: float) -> Any:
    task = asyncio.create_task(anext(stream))
    await asyncio.wait([task], timeout=seconds)
    if not task.cancel():
        return task.result()
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    raise TimeoutError


async def by_default_value(stream: Any, seconds: float) -> Any:
    output = await asyncio.wait_for(anext(stream, None), seconds)
    if output is None:
        raise StopAsyncIteration
    return output


WAYS = [by_wait_for, by_wait_for_in_a_wrapper, by_timeout_block, by_cancelled_task, by_default_value]


@pytest.mark.parametrize("way", WAYS)
async def test_a_time_out_of_anext_loses_nothing_and_ends_nothing(start_rig: Any, way: Any) -> None:
    """Whenever it strikes: before the request is submitted, while it waits, in the moment in which an output comes."""
    rng = random.Random(1)
    async with start_rig(slow(0.001)) as rig:
        (expected,) = await rig.engine.generate_batch([[1, 2]], DELTAS)
        stream = rig.engine.generate([1, 2], DELTAS)
        outputs, num_timeouts = [], 0
        while True:
            try:
                outputs.append(await way(stream, rng.choice([0, 0.0001, 0.0005, 0.001, 0.0015])))
            except TimeoutError:
                num_timeouts += 1
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
            except StopAsyncIteration:
                break
        assert num_timeouts > 5
        assert [token_id for output in outputs for token_id in output.token_ids] == expected.token_ids
        assert "".join(output.text for output in outputs) == expected.text
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        await rig.settle()


@pytest.mark.parametrize("way", WAYS)
async def test_a_prompt_whose_preparation_takes_longer_than_every_time_out_gets_there(start_rig: Any, way: Any) -> None:
    class Slow(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            time.sleep(0.1)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with start_rig(FakeExecutor(num_blocks=2000, block_size=4), tokenizer=Slow()) as rig:
        stream = rig.engine.generate("x" * 5000, SamplingParams(max_tokens=1, truncate_prompt_tokens=9))
        num_timeouts = 0
        while True:
            try:
                output = await way(stream, 0.01)
                break
            except TimeoutError:
                num_timeouts += 1
        assert num_timeouts >= 3
        assert output.finish_reason == "length"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_refusal_that_comes_while_nobody_waits_is_told_to_the_next_one(start_rig: Any, caplog: Any) -> None:
    class Picky(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            time.sleep(0.03)
            raise ValueError("cannot encode this")

    async with start_rig(tokenizer=Picky()) as rig:
        stream = rig.engine.generate("x" * 5000)
        with pytest.raises(TimeoutError):
            await by_wait_for(stream, 0.005)
        await asyncio.sleep(0.06)
        with pytest.raises(InvalidRequestError, match="cannot encode this"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        dropped = rig.engine.generate("x" * 5000)
        with pytest.raises(TimeoutError):
            await by_wait_for(dropped, 0.005)
        await asyncio.sleep(0.06)
        del dropped
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_deadline_goes_on_while_nobody_waits(start_rig: Any) -> None:
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS, timeout=0.05)
        await anext(stream)
        await asyncio.sleep(0.07)
        with pytest.raises(RequestTimeoutError):
            await by_wait_for(stream, 1)
        await rig.settle()


async def test_the_death_of_the_engine_reaches_a_reader_that_was_away(start_rig: Any) -> None:
    executor = slow(0.005)
    executor.fail_at(4)
    async with start_rig(executor) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS)
        await anext(stream)
        with contextlib.suppress(TimeoutError):
            await by_wait_for(stream, 0.001)
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDeadError):
            await reads_the_end(stream, "nothing")


# ---------------------------------------------------------------------------------------------------- stopping for good
async def breaks(stream: Any) -> None:
    async for _ in stream:
        break


async def returns(stream: Any) -> None:
    async for _ in stream:
        return


async def raises(stream: Any) -> None:
    with contextlib.suppress(KeyError):
        async for _ in stream:
            raise KeyError


async def comprehension_raises(stream: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        [1 / 0 async for _ in stream]  # noqa: RUF100


async def is_cancelled_while_it_waits(stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    await cancelled(read())


async def is_cancelled_in_the_body(stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            await asyncio.sleep(100)

    await cancelled(read())


async def is_cancelled_before_the_first_output(stream: Any) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    await cancelled(read(), after=0)


async def times_out_around_the_loop(stream: Any) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            async for _ in stream:
                pass


async def times_out_in_wait_for(stream: Any) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(times_out_around_the_loop_never(stream), 0.01)


async def times_out_around_the_loop_never(stream: Any) -> None:
    async for _ in stream:
        pass


async def loop_in_a_generator_is_closed(stream: Any) -> None:
    async def texts() -> AsyncIterator[str]:
        async for output in stream:
            yield output.text

    generator = texts()
    await anext(generator)
    await generator.aclose()  # type: ignore[attr-defined]


async def reader_by_anext_is_cancelled(stream: Any) -> None:
    has_read = asyncio.Event()

    async def read() -> None:
        while True:
            await anext(stream)
            has_read.set()

    await cancelled(read(), after=has_read)


async def reader_by_anext_with_heartbeats_is_cancelled(stream: Any) -> None:
    has_read = asyncio.Event()

    async def read() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await anext(stream)
                    has_read.set()

    await cancelled(read(), after=has_read)


async def cancelled(coroutine: Any, *, after: float | asyncio.Event = 0.01) -> None:
    task = asyncio.create_task(coroutine)
    if isinstance(after, asyncio.Event):
        await after.wait()
        await asyncio.sleep(0.0005)
    else:
        await asyncio.sleep(after)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    KEPT.append(task)


KEPT: list[Any] = []  # tasks, so that nothing ends because they do


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    KEPT.clear()


@pytest.mark.parametrize(
    "leave",
    [
        breaks,
        returns,
        raises,
        comprehension_raises,
        is_cancelled_while_it_waits,
        is_cancelled_in_the_body,
        is_cancelled_before_the_first_output,
        times_out_around_the_loop,
        times_out_in_wait_for,
        loop_in_a_generator_is_closed,
        reader_by_anext_is_cancelled,
        reader_by_anext_with_heartbeats_is_cancelled,
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_ends_the_request_also_while_the_stream_is_referenced(start_rig: Any, leave: Any, n: int) -> None:
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], SamplingParams(max_tokens=400, ignore_eos=True, n=n))
        await leave(stream)
        assert await ended(rig)
        assert rig.engine.stats().num_aborted_reqs == n
        await reads_the_end(stream, "abort")


async def test_aclose_and_the_end_of_async_with_end_the_request_at_once(start_rig: Any) -> None:
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS)
        await anext(stream)
        await stream.aclose()
        assert rig.engine.num_unfinished_reqs == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        async with rig.engine.generate([1, 2], ENDLESS) as stream:
            await anext(stream)
        assert rig.engine.num_unfinished_reqs == 0
        async with contextlib.aclosing(rig.engine.generate([1, 2], ENDLESS)) as other:
            async for _ in other:
                break
        assert rig.engine.num_unfinished_reqs == 0
        never = rig.engine.generate([1, 2], ENDLESS)
        await never.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(never)
        await rig.settle()


async def test_anext_reads_a_part_and_somebody_else_the_rest(start_rig: Any) -> None:
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], DELTAS)

        async def first() -> list[int]:
            return list((await anext(stream)).token_ids)

        token_ids = await asyncio.create_task(first())
        assert await runs_on(rig)
        async for output in stream:
            token_ids += output.token_ids
        assert len(token_ids) == 40
        await rig.settle()


async def test_who_takes_over_from_a_cancelled_reader_reads_on(start_rig: Any) -> None:
    """Its task ends of the cancellation, but another one reads already."""
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], DELTAS)

        async def read() -> None:
            try:
                while True:
                    await anext(stream)
            finally:
                KEPT.append(asyncio.create_task(anext(stream)))
                await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert (await KEPT[-1]).finish_reason is None
        await reads_the_end(stream, "length")


@pytest.mark.parametrize("where", ["in the loop", "in another thread", "in a cycle"])
async def test_a_stream_that_is_dropped_ends_its_request(start_rig: Any, where: str) -> None:
    async with start_rig(slow()) as rig:
        streams = [rig.engine.generate([1, 2], ENDLESS)]
        await anext(streams[0])
        assert await runs_on(rig)
        if where == "in the loop":
            streams.clear()
        elif where == "in another thread":
            thread = threading.Thread(target=streams.clear)
            thread.start()
            thread.join()
        else:
            cycle: list[Any] = [streams.pop()]
            cycle.append(cycle)
            del cycle
            gc.collect()
        assert await ended(rig)


async def test_a_stream_that_is_dropped_while_its_prompt_is_prepared_is_never_run(start_rig: Any) -> None:
    may_go_on = threading.Event()

    class Slow(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            may_go_on.wait(5)
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with start_rig(tokenizer=Slow()) as rig:
        for way in ("del", "aclose", "break"):
            stream = rig.engine.generate("x" * 5000, SamplingParams(truncate_prompt_tokens=9))
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.005)
            if way == "aclose":
                await stream.aclose()
                with pytest.raises(AioEngineError, match="closed while its prompt was being prepared"):
                    await task
            else:
                task.cancel()
                await asyncio.wait([task])
                if way == "break":
                    await is_cancelled_before_the_first_output(stream)
                    with pytest.raises(AioEngineError, match="closed while its prompt was being prepared"):
                        await anext(stream)
            del stream, task
        gc.collect()
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.sleep(0.02)
        assert rig.executor.outputs == []
        await rig.settle()


async def test_a_single_anext_keeps_its_request_as_long_as_its_task_is_referenced(start_rig: Any) -> None:
    async with start_rig(slow()) as rig:
        task = asyncio.create_task(anext(rig.engine.generate([1, 2], ENDLESS)))
        await task
        assert await runs_on(rig)
        del task
        assert await ended(rig)


# ---------------------------------------------------------------------------------------------------- misuse
async def test_two_readers_at_once_are_told_and_the_first_goes_on(start_rig: Any) -> None:
    executor = slow()
    executor.hang_at(2)
    async with start_rig(executor) as rig:
        stream = rig.engine.generate([1, 2], DELTAS)
        await anext(stream)
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        with pytest.raises(AioEngineError, match="a stream has one reader at a time"):
            await anext(stream)
        with pytest.raises(AioEngineError, match="a stream has one reader at a time"):
            async for _ in stream:
                pass
        executor.release()
        assert (await first).finish_reason in (None, "abort")


async def test_aclose_while_another_task_waits_gives_that_one_the_end(start_rig: Any) -> None:
    executor = slow()
    executor.hang_at(2)
    async with start_rig(executor) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS)
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        await stream.aclose()
        assert (await waiting).finish_reason == "abort"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        executor.release()


async def test_a_stream_belongs_to_its_loop_and_may_be_closed_from_any(start_rig: Any) -> None:
    async with start_rig(slow()) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS)
        await anext(stream)

        async def read() -> None:
            await anext(stream)

        with pytest.raises(AioEngineError, match=r"anext\(\) of a stream: the engine runs in another event loop"):
            await asyncio.to_thread(asyncio.run, read())
        with pytest.raises(AioEngineError, match="no event loop runs in this thread"):
            await asyncio.to_thread(anext(stream).send, None)
        assert await runs_on(rig)
        await asyncio.to_thread(asyncio.run, stream.aclose())
        assert await ended(rig)


async def test_many_heartbeats_and_streams_leave_nothing_at_a_long_lived_task(start_rig: Any) -> None:
    async with start_rig(slow(0.0005)) as rig:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(5):
            async with rig.engine.generate([1, 2], ENDLESS) as stream:
                for _ in range(20):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.0007):
                            await anext(stream)
        callbacks: Callable[[], Any] = lambda: getattr(task, "_callbacks", None) or []  # noqa: E731
        assert sum("_on_reader_end" in repr(callback) for callback in callbacks()) == 0


@pytest.mark.parametrize("seconds", [10**400, -(10**400), 1e300, 10**5000], ids=["1e400", "-1e400", "1e300", "1e5000"])
async def test_a_timeout_beyond_all_measure_is_refused(rig: Any, seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"timeout must be >= 0 and <= 1e\+09 seconds, or None, got"):
        await anext(rig.engine.generate([1], timeout=seconds))


async def test_a_loop_that_another_one_has_followed_ends_nothing_when_it_goes(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4, in_loop=True)) as rig:
        stream = rig.engine.generate([1, 2], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True), request_id="a")
        first = aiter(stream)
        await anext(first)
        second = aiter(stream)
        await anext(second)
        del first
        outputs = [output async for output in second]
        assert outputs[-1].finish_reason == "length"
        assert len(outputs[-1].token_ids) == 100
