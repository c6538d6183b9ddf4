"""`generate(timeout=...)`: in the queue or running, read or not, the request is over then and its blocks are free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioengine import AioEngineError, InvalidRequestError, RequestTimeoutError, SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, in_virtual_time

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def read(stream: Any, outputs: list[Any]) -> None:
    while True:
        outputs.append(await anext(stream))


@in_virtual_time
async def test_a_running_request_times_out(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.002, in_loop=True)) as rig:
        start = asyncio.get_running_loop().time()
        outputs: list[Any] = []
        with pytest.raises(RequestTimeoutError, match=r"timed out after 0.2 s, with \d+ output tokens") as info:
            await read(rig.engine.generate([1, 2], ENDLESS, timeout=0.2), outputs)
        num_tokens = len(outputs[-1].token_ids)
        assert asyncio.get_running_loop().time() - start == pytest.approx(0.2)
        assert num_tokens > 0
        assert int(str(info.value).rsplit("with ", 1)[1].split()[0]) >= num_tokens
        assert isinstance(info.value, TimeoutError)
        assert isinstance(info.value, AioEngineError)
        await rig.settle()
        assert rig.engine.stats().num_aborted_reqs == 1
        outputs = await rig.engine.generate_batch([[1]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(outputs[0].token_ids) == 3, "others are served"


async def test_a_waiting_request_times_out(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=1)
    executor.hang_at(1)
    async with start_rig(executor, max_num_seqs=1) as rig:
        first = asyncio.create_task(anext(rig.engine.generate([1], SamplingParams(max_tokens=1))))
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 1)
        with pytest.raises(RequestTimeoutError, match="with 0 output tokens"):
            await anext(rig.engine.generate([1, 2], ENDLESS, timeout=0.03))
        assert rig.engine.stats().num_waiting_reqs == 0
        executor.release()
        await first
        await rig.settle()


@in_virtual_time
async def test_a_request_that_nobody_reads_times_out(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.002, in_loop=True)) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS, timeout=0.04)
        await anext(stream)
        await asyncio.sleep(0.08)
        await rig.settle()
        with pytest.raises(RequestTimeoutError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@in_virtual_time
async def test_all_continuations_time_out_together(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.002, in_loop=True)) as rig:
        params = SamplingParams(n=3, max_tokens=400, ignore_eos=True)
        with pytest.raises(RequestTimeoutError):
            async for _ in rig.engine.generate([1, 2], params, timeout=0.03):
                pass
        await rig.settle()


async def test_tokenising_counts(start_rig: Any) -> None:
    may_go_on = threading.Event()

    class Slow(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert may_go_on.wait(30), "the time-out did not come meanwhile"
            return super().encode(text, add_special_tokens=add_special_tokens)

    async with start_rig(FakeExecutor(num_blocks=2000, block_size=4), tokenizer=Slow()) as rig:
        with pytest.raises(RequestTimeoutError, match="with 0 output tokens"):
            await anext(rig.engine.generate("x" * 5000, timeout=0.03))
        may_go_on.set()
        await rig.settle()


@in_virtual_time
async def test_a_request_that_ends_in_time_is_left_alone(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4, in_loop=True)) as rig:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        outputs = [output async for output in rig.engine.generate([1], params, timeout=30)]
        assert outputs[-1].finish_reason == "length"
        # It ended before the time was over, and is read after that.
        stream = rig.engine.generate([1], params, timeout=0.03)
        await anext(stream)
        await rig.settle()
        await asyncio.sleep(0.05)
        assert [output.finish_reason async for output in stream][-1] == "length"
        assert rig.engine.stats().num_aborted_reqs == 0


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", True])
async def test_a_timeout_that_makes_no_sense(rig: Any, seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout must be"):
        await anext(rig.engine.generate([1], timeout=seconds))
