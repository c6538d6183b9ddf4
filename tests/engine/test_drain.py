"""`shutdown(drain=True)`: what was taken in ends well, nothing new comes in, and whoever cannot wait says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioengine import ConfigError, EngineDeadError, SamplingParams
from aioengine.testing import FakeExecutor, in_virtual_time

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


async def finish(engine: Any, prompt: list[int], params: SamplingParams = PARAMS) -> int:
    outputs = [output async for output in engine.generate(prompt, params)]
    assert outputs[-1].finish_reason == "length"
    return len(outputs[-1].token_ids)


async def test_running_and_waiting_requests_end_and_new_ones_are_refused(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=2, forward_s=0.001)
    async with start_rig(executor, max_num_seqs=2) as rig:
        tasks = [asyncio.create_task(finish(rig.engine, [index])) for index in range(6)]
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 2)
        shutdown = asyncio.create_task(rig.engine.shutdown(drain=True))
        await wait_for(lambda: rig.engine.is_draining)
        for call in (anext(rig.engine.generate([1])), rig.engine.generate_batch([[1]]), rig.engine.submit_unattended([1])):
            with pytest.raises(EngineDeadError, match="shutting down: it finishes its requests and takes no new ones"):
                await call
        with pytest.raises(EngineDeadError, match="shutting down"):
            rig.engine.pause()
        rig.engine.check_health()
        assert rig.engine.num_unfinished_reqs == 6
        await shutdown
        assert await asyncio.gather(*tasks) == [20] * 6
        assert rig.engine.stats().num_running_reqs == rig.engine.stats().num_waiting_reqs == rig.engine.num_unfinished_reqs == 0
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(rig.engine.generate([1]))
    assert executor.is_shut_down


async def test_a_request_that_is_being_tokenised_is_refused(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    async with start_rig(FakeExecutor(num_blocks=4000, block_size=4, forward_s=0.001)) as rig:
        running = asyncio.create_task(finish(rig.engine, [1]))
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 1)
        late = asyncio.create_task(anext(rig.engine.generate("x" * 5000, SamplingParams(truncate_prompt_tokens=9))))
        await asyncio.sleep(0)
        await rig.engine.shutdown(drain=True)
        with pytest.raises(EngineDeadError):
            await late
        assert await running == 20


@in_virtual_time
async def test_the_rest_is_cut_off_after_the_timeout(
    start_rig: Any, wait_for: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4, forward_s=0.005, in_loop=True)) as rig:
        slow, quick = asyncio.create_task(finish(rig.engine, [1], long)), asyncio.create_task(finish(rig.engine, [2]))
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 2)
        start = asyncio.get_running_loop().time()
        await rig.engine.shutdown(drain=True, drain_timeout=0.4)
        assert 0.4 <= asyncio.get_running_loop().time() - start < 1
        assert await quick == 20
        with pytest.raises(EngineDeadError, match="was shut down"):
            await slow
    assert "1 requests have not ended within the drain_timeout of 0.4 s" in caplog.text


async def test_a_second_shutdown_does_not_wait(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.hang_at(2)
    async with start_rig(executor) as rig:
        task = asyncio.create_task(finish(rig.engine, [1]))
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 1)
        drain = asyncio.create_task(rig.engine.shutdown(drain=True))
        await wait_for(lambda: rig.engine.is_draining)
        await asyncio.wait_for(rig.engine.shutdown(), 5)
        await asyncio.wait_for(drain, 5)
        with pytest.raises(EngineDeadError, match="was shut down"):
            await task


async def test_a_paused_engine_is_resumed(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    async with start_rig() as rig:
        rig.engine.pause()
        task = asyncio.create_task(finish(rig.engine, [1]))
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 1)
        await asyncio.wait_for(rig.engine.shutdown(drain=True), 5)
        assert await task == 20


async def test_an_engine_that_dies_while_it_drains_does_not_hang(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, forward_s=0.001)
    executor.fail_at(12)
    async with start_rig(executor) as rig:
        task = asyncio.create_task(finish(rig.engine, [1]))
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 1)
        await asyncio.wait_for(rig.engine.shutdown(drain=True), 5)
        with pytest.raises(EngineDeadError, match="injected failure in step 12"):
            await task


async def test_draining_with_nothing_to_do_and_twice(start_rig: Any) -> None:
    async with start_rig() as rig:
        await asyncio.wait_for(asyncio.gather(rig.engine.shutdown(drain=True), rig.engine.shutdown(drain=True)), 5)
        await rig.engine.shutdown(drain=True)


@pytest.mark.parametrize("drain_timeout", [-1, float("nan")])
async def test_a_drain_timeout_that_makes_no_sense(start_rig: Any, drain_timeout: float) -> None:
    async with start_rig() as rig:
        with pytest.raises(ConfigError, match="drain_timeout must be >= 0"):
            await rig.engine.shutdown(drain=True, drain_timeout=drain_timeout)
