"""The worker and the clock in the event loop: nothing waits, and every run is the same."""

from __future__ import annotations

import asyncio
import time

import pytest

from aioengine import AsyncEngine, EngineDeadError, RequestTimeoutError, SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, in_virtual_time

OPTIONS = {"max_num_seqs": 4, "block_size": 4, "check_invariants": True, "seed": 0}


def make_executor(*, forward_s: float = 0.0) -> FakeExecutor:
    return FakeExecutor(num_blocks=65, block_size=4, in_loop=True, forward_s=forward_s)


def make_engine(executor: FakeExecutor) -> AsyncEngine:
    return AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), **OPTIONS)  # type: ignore[arg-type]


@in_virtual_time
async def test_an_hour_takes_no_time_and_timers_keep_their_order() -> None:
    start, order = time.monotonic(), []
    loop = asyncio.get_running_loop()

    async def note(after_s: float) -> None:
        await asyncio.sleep(after_s)
        order.append((after_s, loop.time()))

    await asyncio.gather(*(note(after_s) for after_s in (3600.0, 0.5, 60.0)))
    assert order == [(0.5, 0.5), (60.0, 60.0), (3600.0, 3600.0)]
    assert time.monotonic() - start < 5


@in_virtual_time
async def test_a_thread_is_waited_for() -> None:
    def slowly() -> int:
        time.sleep(0.01)
        return 5

    assert await asyncio.wait_for(asyncio.to_thread(slowly), timeout=1e6) == 5


@in_virtual_time
async def test_steps_take_the_time_that_they_should() -> None:
    loop = asyncio.get_running_loop()
    async with make_engine(make_executor(forward_s=0.25)) as engine:
        start = loop.time()
        (output,) = await engine.generate_batch([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
        assert len(output.token_ids) == 8
        assert loop.time() - start == pytest.approx(8 * 0.25)


@in_virtual_time
async def test_a_timeout_ends_a_request_after_so_many_steps() -> None:
    async with make_engine(make_executor(forward_s=1.0)) as engine:
        with pytest.raises(RequestTimeoutError, match=r"timed out after 10.5 s, with 10 output tokens"):
            async for _ in engine.generate([1, 2], SamplingParams(max_tokens=50, ignore_eos=True), timeout=10.5):
                pass


@in_virtual_time
async def test_a_step_that_fails_ends_the_engine_as_in_a_thread() -> None:
    executor = make_executor()
    engine = make_engine(executor)
    await engine.start()
    executor.fail_at(3)
    with pytest.raises(EngineDeadError, match="injected failure in step 3"):
        await engine.generate_batch([[1, 2]], SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
    await engine.shutdown()
    assert executor.is_shut_down


def test_a_hanging_step_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="with a thread"):
        FakeExecutor(in_loop=True).hang_at(1)


def test_the_same_run_gives_the_same_steps() -> None:
    @in_virtual_time
    async def steps() -> list[dict[str, int]]:
        executor = make_executor(forward_s=0.01)
        async with make_engine(executor) as engine:

            async def one(index: int) -> None:
                await asyncio.sleep(index * 0.013)
                async for _ in engine.generate([index] * (index + 1), SamplingParams(max_tokens=3 + index, ignore_eos=True)):
                    pass

            await asyncio.gather(*(one(index) for index in range(8)))
            return [output.num_scheduled_tokens for output in executor.outputs]

    first = steps()
    assert first == steps()
    assert max(len(step) for step in first) > 2
