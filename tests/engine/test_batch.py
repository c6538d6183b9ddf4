"""`generate_batch`: all or nothing at the door, results in order, a bar for terminals only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import SamplingParams


async def test_results_come_in_the_order_of_the_prompts(rig: Any, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[index, 1, 2] for index in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (7 * index) % 20) for index in range(40)]
    outputs = await rig.engine.generate_batch(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [p.max_tokens for p in params]
    alone = [(await rig.engine.generate_batch([prompt], p))[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in outputs] == alone
    assert all(output.text_delta == output.text for output in outputs)
    captured = capsys.readouterr()
    assert captured.out + captured.err == "", "no bar where there is no terminal"


async def test_nothing_starts_if_one_prompt_is_bad(rig: Any) -> None:
    with rig.engine.events() as subscription:
        with pytest.raises(InvalidRequestError, match=r"prompt 2: token id 9999 at position 0"):
            await rig.engine.generate_batch([[1], [2], [9999], [3]])
        with pytest.raises(InvalidRequestError, match=r"prompt 1: the prompt has 600 tokens, but at most 511 fit"):
            await rig.engine.generate_batch([[1], [2] * 600], SamplingParams(max_tokens=10))
        await rig.settle()
        assert all(not getattr(event, "output", None) for event in subscription.drain())


async def test_wrong_arguments(rig: Any) -> None:
    with pytest.raises(InvalidRequestError, match="takes a list of prompts, got one text"):
        await rig.engine.generate_batch("text")
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 sampling_params"):
        await rig.engine.generate_batch([[1], [2]], [SamplingParams()])
    assert await rig.engine.generate_batch([]) == []


async def test_cancelling_a_batch_aborts_all_of_it(rig: Any, wait_for: Callable[..., Awaitable[None]]) -> None:
    task = asyncio.create_task(rig.engine.generate_batch([[1], [2], [3]], SamplingParams(max_tokens=400)))
    await wait_for(lambda: rig.engine.stats().num_running_reqs == 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.engine.stats().num_running_reqs == 0


async def test_one_can_be_aborted_by_its_name(rig: Any, wait_for: Callable[..., Awaitable[None]]) -> None:
    task = asyncio.create_task(rig.engine.generate_batch([[1], [2]], SamplingParams(temperature=0, max_tokens=300)))
    await wait_for(lambda: rig.engine.stats().num_running_reqs == 2)
    (first, _) = rig.engine.snapshot().requests
    assert rig.engine.abort(first.request_id)
    outputs = await task
    assert [output.finish_reason for output in outputs] == ["abort", "length"]
