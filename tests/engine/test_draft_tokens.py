"""Draft tokens seen from outside the engine: the same stream in fewer steps, and events that say how many were right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted

REFRAIN = "row row row your boat, " * 6
PARAMS = SamplingParams(temperature=0, max_tokens=len(REFRAIN))


async def sing(params: SamplingParams = PARAMS, *, answer: str = REFRAIN, **options: Any) -> tuple[RequestOutput, int, list[Any]]:
    """The final output, the number of steps, and the events."""
    executor = FakeExecutor(next_token=scripted(answer))
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), check_invariants=True, **options) as engine:
        subscription = engine.events(maxlen=10_000)
        (output,) = await engine.generate_batch(["sing"], params, progress=False)
        return output, len([out for out in executor.outputs if not out.is_cleanup_only]), list(subscription.drain())


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 16])
async def test_the_same_text_in_fewer_steps(num_draft_tokens: int) -> None:
    plain, num_plain_steps, _ = await sing()
    output, num_steps, _ = await sing(num_speculative_tokens=num_draft_tokens)
    assert output.text == plain.text == REFRAIN
    assert output.token_ids == plain.token_ids
    assert num_plain_steps == len(REFRAIN)
    assert num_steps < num_plain_steps * (0.4 if num_draft_tokens >= 4 else 0.7)


async def test_a_stop_string_in_the_middle_of_a_run_cuts_it_there() -> None:
    params = SamplingParams(temperature=0, max_tokens=200, stop=["boat, row row row y"], include_stop_str_in_output=False)
    plain, _, _ = await sing(params)
    output, _, _ = await sing(params, num_speculative_tokens=8)
    assert output.text == plain.text
    assert output.token_ids == plain.token_ids
    assert output.finish_reason == plain.finish_reason == "stop"


async def test_logprobs_come_one_for_each_token() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=2)
    output, _, _ = await sing(params, num_speculative_tokens=8)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [next(iter(entry)) for entry in logprobs] == output.token_ids


async def test_events_tell_how_many_draft_tokens_were_right() -> None:
    _, num_steps, events = await sing(num_speculative_tokens=4)
    results = [event for event in events if isinstance(event, StepResultEvent)]
    drafted = [len(ids) for e in events if isinstance(e, StepEvent) for ids in e.output.scheduled_spec_decode_tokens.values()]
    assert sum(result.num_draft_tokens for result in results) == sum(drafted) == results[-1].stats.num_draft_tokens > 0
    assert sum(result.num_accepted_tokens for result in results) == results[-1].stats.num_accepted_tokens
    assert results[-1].stats.num_accepted_tokens == len(REFRAIN) - num_steps
    assert 0 < (results[-1].stats.acceptance_rate or 0) < 1


async def test_the_metrics_of_a_request_tell_how_many_of_its_draft_tokens_were_right() -> None:
    output, num_steps, events = await sing(num_speculative_tokens=4)
    stats = events[-1].stats
    metrics = output.metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (stats.num_draft_tokens, stats.num_accepted_tokens)
    assert metrics.num_accepted_tokens == len(REFRAIN) - num_steps
    assert metrics.acceptance_rate == stats.acceptance_rate
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    plain, _, _ = await sing()
    assert (plain.metrics.num_draft_tokens, plain.metrics.num_accepted_tokens, plain.metrics.acceptance_rate) == (0, 0, None)


async def test_the_draft_tokens_of_several_requests_add_up_to_those_of_the_engine() -> None:
    executor = FakeExecutor(next_token=scripted(REFRAIN), num_blocks=24)
    options: dict[str, Any] = {"check_invariants": True, "num_speculative_tokens": 4, "max_model_len": 200}
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), **options) as engine:
        params = [SamplingParams(temperature=0, max_tokens=n, n=1 + n % 3) for n in (30, 60, 100)]
        outputs = await engine.generate_batch(["sing", "row", "row row row"], params, progress=False)
        stats = engine.stats()
    assert sum(output.metrics.num_draft_tokens for output in outputs) == stats.num_draft_tokens > 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) == stats.num_accepted_tokens > 0


async def test_a_request_that_fails_among_its_draft_tokens_ends_alone() -> None:
    executor = FakeExecutor(next_token=scripted(REFRAIN))
    executor.fail_request("bad", num_output_tokens=60)
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), check_invariants=True, num_speculative_tokens=8) as engine:

        async def last(request_id: str) -> RequestOutput:
            return [output async for output in engine.generate("sing", PARAMS, request_id=request_id)][-1]

        bad, good = await asyncio.gather(last("bad"), last("good"), return_exceptions=True)
        assert isinstance(good, RequestOutput)
        assert good.text == REFRAIN
        assert isinstance(bad, BaseException) or bad.finish_reason == "error"
        assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
