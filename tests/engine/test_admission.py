"""Limits on what may wait: the one too many is told so at once, with the numbers, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from aioengine import EngineOverloadedError, InvalidRequestError, SamplingParams
from aioengine.testing import FakeExecutor

ENDLESS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@contextlib.asynccontextmanager
async def busy(start_rig: Any, wait_for: Callable[..., Any], *, num_waiting: int, **options: Any) -> Any:
    """One request runs, for as long as the block, and `num_waiting` of five tokens wait."""
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=1)
    executor.hang_at(3)
    async with start_rig(executor, max_num_seqs=1, **options) as rig:
        tasks = [asyncio.create_task(anext(rig.engine.generate([1], ENDLESS, request_id="runs")))]
        await wait_for(lambda: rig.engine.stats().num_running_reqs == 1)
        names = [f"waits {index}" for index in range(num_waiting)]
        tasks += [asyncio.create_task(anext(rig.engine.generate([1] * 5, ENDLESS, request_id=name))) for name in names]
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == num_waiting)
        yield rig
        executor.release()
        for request_id in ("runs", *names):
            rig.engine.abort(request_id)
        await asyncio.gather(*tasks)
        await rig.settle()


async def test_requests_beyond_the_limit_are_refused_and_counted(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    async with busy(start_rig, wait_for, num_waiting=2, max_num_queued_reqs=3) as rig:
        with pytest.raises(EngineOverloadedError, match=r"2 requests wait, 2 more would exceed max_num_queued_reqs=3"):
            await rig.engine.generate_batch([[1], [2]])
        with pytest.raises(EngineOverloadedError, match=r"2 requests wait, 2 more would exceed"):
            await anext(rig.engine.generate([1], SamplingParams(n=2)))
        assert rig.engine.stats().num_waiting_reqs == 2, "all of a batch or nothing"
        third = asyncio.create_task(anext(rig.engine.generate([1], ENDLESS, request_id="third")))
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 3)
        with pytest.raises(EngineOverloadedError, match=r"3 requests wait, 1 more would exceed max_num_queued_reqs=3"):
            await anext(rig.engine.generate([1]))
        with pytest.raises(EngineOverloadedError):
            await rig.engine.submit_unattended([1])
        assert rig.engine.stats().num_rejected_reqs == 6
        # One that leaves makes room again.
        rig.engine.abort("third")
        await third
        fourth = asyncio.create_task(anext(rig.engine.generate([1], ENDLESS, request_id="fourth")))
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 3)
        rig.engine.abort("fourth")
        await fourth


async def test_prompt_tokens_beyond_the_limit_are_refused(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    async with busy(start_rig, wait_for, num_waiting=2, max_num_queued_tokens=20) as rig:
        with pytest.raises(EngineOverloadedError, match=r"10 prompt tokens wait, 11 more would exceed max_num_queued_tokens=20"):
            await anext(rig.engine.generate([1] * 11))
        with pytest.raises(EngineOverloadedError, match=r"10 prompt tokens wait, 12 more would exceed"):
            await anext(rig.engine.generate([1] * 4, SamplingParams(n=3)))
        fits = asyncio.create_task(anext(rig.engine.generate([1] * 10, ENDLESS, request_id="fits")))
        await wait_for(lambda: rig.engine.stats().num_waiting_reqs == 3)
        assert rig.engine._life.started().core.scheduler.waiting.num_prompt_tokens == 20
        rig.engine.abort("fits")
        await fits
        assert rig.engine._life.started().core.scheduler.waiting.num_prompt_tokens == 10


async def test_a_full_queue_is_noticed_before_the_prompt_is_tokenised(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    class Unused:
        has_chat_template = False
        special_token_ids: frozenset[int] = frozenset()

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("tokenised for nothing")

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "x" * len(token_ids)

    async with busy(start_rig, wait_for, num_waiting=1, max_num_queued_reqs=1, tokenizer=Unused()) as rig:
        with pytest.raises(EngineOverloadedError):
            await anext(rig.engine.generate("a text"))


async def test_a_bad_request_is_no_overload(start_rig: Any) -> None:
    async with start_rig(max_num_queued_reqs=1) as rig:
        with pytest.raises(InvalidRequestError):
            await anext(rig.engine.generate([]))
        assert rig.engine.stats().num_rejected_reqs == 0


async def test_what_runs_does_not_count(start_rig: Any) -> None:
    """Eight run at once although only one may wait: each is admitted before the next one comes."""
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.001), max_num_queued_reqs=1) as rig:
        streams = [rig.engine.generate([1], SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        assert rig.engine.stats().num_running_reqs == 8
        for stream in streams:
            await stream.aclose()
        await rig.settle()
        assert rig.engine.stats().num_aborted_reqs == 8


async def test_what_can_never_wait_is_told_so(start_rig: Any) -> None:
    async with start_rig(max_num_queued_reqs=3) as rig:
        with pytest.raises(
            EngineOverloadedError, match=r"0 requests wait, 4 more .* max_num_queued_reqs=3: that many may never wait together"
        ):
            await anext(rig.engine.generate([1], SamplingParams(n=4)))
