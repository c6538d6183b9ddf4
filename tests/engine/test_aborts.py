"""Requests may end at any point of a step; blocks and worker slots come back, and others are not disturbed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor


async def consume(engine: Any, rng: random.Random, number: int) -> list[int] | None:
    """One request that ends in a random way; its tokens if it ran to its own end."""
    prompt = [(number * 13 + index // 7) % 256 for index in range(rng.randrange(1, 60))]
    params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 25), stop=rng.choice([(), ("a", "the")]))
    way = rng.choice(["finish", "finish", "break", "abort", "cancel", "timed abort"])
    count, reason = 0, None
    limit = rng.randrange(1, 12)
    request_id = f"r{number}"
    if way == "timed abort":
        asyncio.get_running_loop().call_later(rng.random() * 0.01, engine.abort, request_id)
    stream = engine.generate(prompt, params, request_id=request_id)
    try:
        async for output in stream:
            count, reason = count + 1, output.finish_reason
            if count == limit and way == "break":
                break
            if count == limit and way == "abort":
                engine.abort(request_id)
            if count == limit and way == "cancel":
                raise asyncio.CancelledError
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.002)
        if reason in ("length", "stop"):
            return [*prompt, *output.token_ids]
    except asyncio.CancelledError:
        pass
    finally:
        await stream.aclose()
    return None


@pytest.mark.parametrize("overlap", [True, False])
async def test_a_thousand_requests_that_end_in_any_way(start_rig: Any, overlap: bool) -> None:
    """Books checked after every scheduler call, by the scheduler and by the worker; a tiny cache, so preemptions too."""
    rng = random.Random(1)
    executor = FakeExecutor(num_blocks=60, block_size=4, max_num_seqs=8)
    async with start_rig(executor, async_scheduling=overlap, max_num_batched_tokens=24) as rig:
        start_stats = rig.engine.stats()
        running: set[asyncio.Task[list[int] | None]] = set()
        num_finished = 0
        for number in range(500):
            running.add(asyncio.create_task(consume(rig.engine, random.Random(rng.random()), number)))
            if rng.random() < 0.05:
                next(iter(running)).cancel()
            if len(running) >= 16:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                num_finished += sum(not task.cancelled() and task.result() is not None for task in done)
        done, _ = await asyncio.wait(running)
        await rig.settle()
        assert num_finished > 50
        assert rig.engine.stats().num_free_blocks == start_stats.num_free_blocks
        assert rig.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("phase", ["execute", "sample"])
@pytest.mark.parametrize("step", [1, 2, 3])
async def test_abort_while_its_step_hangs_in_the_worker(start_rig: Any, phase: Any, step: int) -> None:
    executor = FakeExecutor(block_size=4)
    executor.hang_at(step, phase=phase)
    async with start_rig(executor) as rig:
        other = asyncio.create_task(rig.engine.generate_batch([[9, 8, 7]], SamplingParams(temperature=0, max_tokens=8)))
        task = asyncio.create_task(anext(rig.engine.generate([1, 2, 3], SamplingParams(max_tokens=50), request_id="a")))
        await asyncio.sleep(0.02)
        rig.engine.abort("a")
        executor.release()
        await task
        (output,) = await other
        assert len(output.token_ids) == 8
        await rig.settle()


async def test_aborting_all_waiting_requests(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.001), max_num_seqs=1) as rig:
        streams = [rig.engine.generate([i], SamplingParams(max_tokens=100), request_id=str(i)) for i in range(20)]
        tasks = [asyncio.create_task(anext(stream)) for stream in streams]
        await tasks[0]
        for index in range(20):
            rig.engine.abort(str(index))
        outputs = await asyncio.gather(*tasks)
        assert [output.finish_reason for output in outputs[1:]] == ["abort"] * 19
        assert rig.engine.stats().num_waiting_reqs == rig.engine.stats().num_running_reqs == 0
        await rig.settle()
