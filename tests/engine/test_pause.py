"""Pausing an engine and letting it take single steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioengine import AioEngineError, EngineDeadError, SamplingParams
from aioengine.testing import FakeExecutor

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


async def collect(engine: Any, prompt: list[int]) -> list[int]:
    outputs = [output async for output in engine.generate(prompt, PARAMS)]
    return list(outputs[-1].token_ids)


async def test_a_paused_engine_schedules_nothing_and_goes_on_with_the_same_tokens(rig: Any, wait_for: Callable[..., Any]) -> None:
    expected = await collect(rig.engine, [1, 2, 3])
    num_steps = len(rig.executor.outputs)
    await rig.settle()
    rig.engine.pause()
    rig.engine.pause()
    task = asyncio.create_task(collect(rig.engine, [1, 2, 3]))
    await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 1)
    await asyncio.sleep(0.02)
    assert rig.engine.is_paused
    assert len(rig.executor.outputs) in (num_steps, num_steps + 1)  # the clean-up of the first may still have run
    assert not task.done()
    rig.engine.resume()
    assert await task == expected


async def test_steps_in_flight_end_and_single_steps_run_one_at_a_time(rig: Any) -> None:
    task = asyncio.create_task(collect(rig.engine, [5] * 40))
    await asyncio.sleep(0)
    rig.engine.pause()
    first = await rig.engine.step()
    steps = [await rig.engine.step() for _ in range(3)]
    assert steps == [first + 1, first + 2, first + 3]
    assert rig.engine.snapshot().num_in_flight == 0
    assert rig.engine.snapshot().paused
    results = await asyncio.gather(rig.engine.step(), rig.engine.step())
    assert list(results) == [first + 4, first + 5]
    rig.engine.resume()
    assert len(await task) == 6


async def test_a_step_with_nothing_to_run_says_so(rig: Any) -> None:
    with pytest.raises(AioEngineError, match="pause"):
        await rig.engine.step()
    rig.engine.pause()
    assert await rig.engine.step() is None
    rig.engine.resume()


async def test_resuming_answers_whoever_waits_for_a_step_that_was_not_scheduled_yet(start_rig: Any) -> None:
    """At once, and not when the engine has nothing to do, which may be never."""
    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.002)) as rig:
        async with rig.engine.generate([1, 2], SamplingParams(max_tokens=1000, ignore_eos=True)) as stream:
            await anext(stream)
            rig.engine.pause()
            steps = [asyncio.create_task(rig.engine.step()) for _ in range(2)]
            asyncio.get_running_loop().call_soon(rig.engine.resume)  # after both step(), before the loop's task has its turn
            assert await asyncio.wait_for(asyncio.gather(*steps), 1) == [None, None]
            assert rig.engine.num_unfinished_reqs == 1
        await rig.settle()


async def test_requests_can_be_aborted_while_paused(rig: Any, wait_for: Callable[..., Any]) -> None:
    rig.engine.pause()
    stream = rig.engine.generate([1] * 9, PARAMS, request_id="a")
    task = asyncio.create_task(anext(stream))
    await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 1)
    assert rig.engine.abort("a")
    assert (await task).finished
    await stream.aclose()
    rig.engine.resume()


async def test_whoever_waits_for_a_step_learns_of_the_end(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.hang_at(1)
    async with start_rig(executor) as rig:
        rig.engine.pause()
        request = asyncio.create_task(collect(rig.engine, [1, 2]))
        await asyncio.sleep(0.01)
        step = asyncio.create_task(rig.engine.step())
        await asyncio.sleep(0.01)
        await rig.engine.shutdown()
        for task in (step, request):
            with pytest.raises(EngineDeadError):
                await task


async def test_a_failing_step_fails_its_waiter(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.fail_at(1)
    async with start_rig(executor) as rig:
        rig.engine.pause()
        request = asyncio.create_task(collect(rig.engine, [1, 2]))
        await asyncio.sleep(0.01)
        for task in (asyncio.create_task(rig.engine.step()), request):
            with pytest.raises(EngineDeadError):
                await task
        with pytest.raises(EngineDeadError):
            rig.engine.pause()
