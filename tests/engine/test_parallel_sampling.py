"""n > 1: continuations that are requests of their own to the scheduler and one request to the user."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.inputs.parallel_sampling import child_params, child_seed
from aioengine.errors import EngineOverloadedError, InvalidRequestError
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.testing import FakeExecutor, scripted

PROMPT = list(range(40, 59))  # 19 tokens: four whole blocks of 4
RANDOM = SamplingParams(max_tokens=10, seed=7, n=3, logprobs=1)
ENDLESS = SamplingParams(temperature=0, max_tokens=300, n=3)


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


def contents(output: RequestOutput) -> list[Any]:
    return [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]


# ---------------------------------------------------------------------------------------------------- seeds and parameters
@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(2, 40))
def test_seeds_of_continuations_differ_and_do_not_depend_on_n(seed: int, n: int) -> None:
    seeds = [params.seed for params in child_params(SamplingParams(seed=seed, n=n))]
    assert seeds[0] == seed
    assert len(set(seeds)) == n
    assert seeds == [child_seed(seed, index) for index in range(n)]
    assert seeds[:2] == [params.seed for params in child_params(SamplingParams(seed=seed, n=2))]


def test_the_seeds_of_neighbouring_requests_do_not_meet() -> None:
    """Counting up from the seed, the second continuation of request 1 would be the first of request 2."""
    seeds = [child_seed(seed, index) for seed in range(50) for index in range(4)]
    assert len(set(seeds)) == len(seeds)


async def test_every_continuation_keeps_the_parameters(rig: Any) -> None:
    params = SamplingParams(
        max_tokens=3,
        n=3,
        bad_words=("no", "way"),
        logit_bias={5: 1.5},
        allowed_token_ids=range(30, 130),
        presence_penalty=0.5,
        stop=("zz",),
        stop_token_ids=(9,),
        logprobs=2,
        prompt_logprobs=1,
        min_tokens=2,
        extra_args={"k": 1},
    )
    await collect(rig.engine, "Hi", params)
    children = [new.sampling_params for out in rig.executor.outputs for new in out.scheduled_new_reqs]
    assert len(children) == 3
    assert children[0].bad_words_token_ids == (tuple(b"no"), tuple(b"way"))
    plain = dataclasses.replace(children[0], seed=0, prompt_logprobs=None)
    assert [dataclasses.replace(child, seed=0, prompt_logprobs=None) for child in children] == [plain] * 3
    assert plain == dataclasses.replace(params, n=1, seed=0, prompt_logprobs=None, bad_words_token_ids=plain.bad_words_token_ids)


# ---------------------------------------------------------------------------------------------------- what comes out
async def test_there_are_n_outputs_by_index_and_the_first_is_that_of_n_1(rig: Any) -> None:
    outputs = await collect(rig.engine, PROMPT, RANDOM)
    final = outputs[-1]
    assert all([c.index for c in output.outputs] == [0, 1, 2] for output in outputs)
    assert [c.finish_reason for c in final.outputs] == ["length"] * 3
    assert len({tuple(c.token_ids) for c in final.outputs}) == 3
    alone = (await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, n=1)))[-1]
    assert contents(alone) == contents(final)[:1]
    more = (await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, n=5)))[-1]
    assert contents(more)[:3] == contents(final), "a larger n only adds"
    (batch,) = await rig.engine.generate_batch([PROMPT], RANDOM)
    assert contents(batch) == contents(final)


async def test_greedy_continuations_are_all_the_same(rig: Any) -> None:
    final = (await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, temperature=0)))[-1]
    assert len({(c.text, tuple(c.token_ids)) for c in final.outputs}) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"long_prefill_token_threshold": 3},
        {"max_num_seqs": 1},
        {"num_kv_cache_blocks": 16},
        {"num_kv_cache_blocks": 16, "enable_prefix_caching": False, "max_num_batched_tokens": 8},
    ],
)
async def test_each_is_what_its_seed_gives_alone_whatever_happens_around_it(start_rig: Any, options: dict[str, Any]) -> None:
    """The fake worker checks every block of every request: sharing that came too early or was undone would fail the step."""
    params = dataclasses.replace(RANDOM, n=5, max_tokens=14)
    async with start_rig() as rig:
        alone = [
            (await collect(rig.engine, PROMPT, dataclasses.replace(child, n=1, prompt_logprobs=None)))[-1].outputs[0]
            for child in child_params(params)
        ]
    async with start_rig(**options) as rig:
        first, second = await rig.engine.generate_batch([PROMPT, PROMPT], params)
        for output in (first, second):
            assert [(c.text, c.token_ids, c.logprobs) for c in output.outputs] == [(c.text, c.token_ids, c.logprobs) for c in alone]
        if "num_kv_cache_blocks" in options:
            assert rig.engine.stats().num_preemptions > 0
        await rig.settle()


async def test_the_prompts_blocks_are_shared_from_the_first_step_on(rig: Any) -> None:
    await collect(rig.engine, PROMPT, RANDOM)
    new = [new for out in rig.executor.outputs for new in out.scheduled_new_reqs]
    assert [n.num_computed_tokens for n in new] == [0, 16, 16]
    assert new[0].block_ids[0][:4] == new[1].block_ids[0][:4] == new[2].block_ids[0][:4]
    assert len({n.block_ids[0][4] for n in new}) == 3, "the last block, which they write to, is their own"
    assert rig.executor.outputs[0].total_num_scheduled_tokens == 19 + 3 + 3


async def test_deltas_add_up_for_each_index_and_each_ends_in_its_own_way(start_rig: Any) -> None:
    def next_token(known: Any, num_prompt: int, params: SamplingParams) -> int:
        return int(b"abcdEND!"[(len(known) - num_prompt + (params.seed or 0) % 5) % 8])

    async with start_rig(FakeExecutor(block_size=4, num_blocks=129, next_token=next_token)) as rig:
        params = SamplingParams(seed=3, n=6, max_tokens=6, stop=("END",), output_kind=RequestOutputKind.DELTA, logprobs=0)
        deltas = await collect(rig.engine, PROMPT, params)
        final = (await collect(rig.engine, PROMPT, dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)))[-1]
        for index, expected in enumerate(final.outputs):
            pieces = [output.outputs[index] for output in deltas]
            assert "".join(piece.text for piece in pieces) == expected.text
            assert [t for piece in pieces for t in piece.token_ids] == expected.token_ids
            assert [entry for piece in pieces for entry in piece.logprobs or ()] == expected.logprobs
            assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert {c.finish_reason for c in final.outputs} == {"length", "stop"}
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
        await rig.settle()


async def test_more_continuations_than_can_run_at_once(start_rig: Any) -> None:
    async with start_rig(max_num_seqs=2) as rig:
        final = (await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, n=9)))[-1]
        assert len({tuple(c.token_ids) for c in final.outputs}) == 9
        await rig.settle()


async def test_metrics_are_those_of_the_whole_request(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, forward_s=0.002), max_num_seqs=1) as rig:
        outputs = await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, n=2))
        metrics = outputs[-1].metrics
        assert outputs[0].metrics.first_token_time == metrics.first_token_time, "the first of any"
        assert all(output.metrics.finished_time is None for output in outputs[:-1])
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.finished_time - metrics.first_token_time > 19 * 0.002, "the last of all: one ran after the other"
        assert outputs[-1].num_cached_tokens == 0, "what a sibling computed was not cached before"
        assert (await collect(rig.engine, PROMPT, RANDOM))[-1].num_cached_tokens == 16


async def test_prompt_logprobs_come_once_and_complete(rig: Any) -> None:
    params = dataclasses.replace(RANDOM, prompt_logprobs=2)
    final = (await collect(rig.engine, PROMPT, params))[-1]
    assert final.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in final.prompt_logprobs[1:] if entry] == PROMPT[1:]
    assert contents(final) == contents((await collect(rig.engine, PROMPT, RANDOM))[-1])


# ---------------------------------------------------------------------------------------------------- names
async def test_a_live_request_id_is_refused_to_the_newcomer_only(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, ENDLESS, request_id="a")
    await anext(stream)
    for n in (1, 3):
        with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
            await collect(rig.engine, [1], dataclasses.replace(ENDLESS, n=n), request_id="a")
    rest = [output async for output in stream]
    assert [len(c.token_ids) for c in rest[-1].outputs] == [300] * 3


async def test_the_names_of_continuations_are_in_nobodys_way(rig: Any) -> None:
    """Users may call a request what the scheduler calls a continuation of another one, before it and after it."""
    expected = (await collect(rig.engine, [1, 2], dataclasses.replace(ENDLESS, n=1, max_tokens=40)))[-1].token_ids
    early = asyncio.create_task(collect(rig.engine, [1, 2], dataclasses.replace(ENDLESS, n=1, max_tokens=40), request_id="a-1"))
    await asyncio.sleep(0.001)
    stream = rig.engine.generate(PROMPT, ENDLESS, request_id="a")
    await anext(stream)
    late = asyncio.create_task(collect(rig.engine, [1, 2], dataclasses.replace(ENDLESS, n=1, max_tokens=40), request_id="a-2"))
    await asyncio.sleep(0.001)
    assert rig.engine.abort("a")
    outputs = [output async for output in stream]
    assert [c.finish_reason for c in outputs[-1].outputs] == ["abort"] * 3
    assert [(await early)[-1].token_ids, (await late)[-1].token_ids] == [expected, expected]


async def test_an_id_can_be_reused_at_once(rig: Any) -> None:
    expected = contents((await collect(rig.engine, PROMPT, RANDOM, request_id="a"))[-1])
    for _ in range(5):
        assert contents((await collect(rig.engine, PROMPT, RANDOM, request_id="a"))[-1]) == expected


# ---------------------------------------------------------------------------------------------------- the end from outside
async def test_abort_reaches_all_continuations(rig: Any, wait_for: Callable[..., Awaitable[None]]) -> None:
    stream = rig.engine.generate(PROMPT, ENDLESS, request_id="a")
    await anext(stream)
    assert {request.request_id for request in rig.engine.snapshot().requests} == {"a-0", "a-1", "a-2"}
    assert rig.engine.abort("a")
    assert not rig.engine.abort("a")
    assert rig.engine.stats().num_running_reqs == 0
    outputs = [output async for output in stream]
    assert len(outputs) == 1
    assert [c.finish_reason for c in outputs[0].outputs] == ["abort"] * 3


async def test_one_continuation_can_be_aborted_by_the_name_that_events_show(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, ENDLESS, request_id="a")
    await anext(stream)
    assert rig.engine.abort_scheduled("a-1")
    final = [output async for output in stream][-1]
    assert [c.finish_reason for c in final.outputs] == ["length", "abort", "length"]
    assert not rig.engine.abort_scheduled("a-1")


@pytest.mark.parametrize("overlap", [True, False])
async def test_leaving_at_any_moment_leaves_nothing_behind(start_rig: Any, overlap: bool) -> None:
    rng = random.Random(int(overlap))
    async with start_rig() as rig:
        prompts = [PROMPT[:length] for length in range(1, 20)]
        expected = [
            output.token_ids for output in await rig.engine.generate_batch(prompts, dataclasses.replace(ENDLESS, n=1, max_tokens=60))
        ]
    async with start_rig(async_scheduling=overlap, num_kv_cache_blocks=40) as rig:

        async def one(number: int) -> None:
            kind = rng.choice([RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
            params = dataclasses.replace(ENDLESS, n=rng.randint(1, 5), max_tokens=60, output_kind=kind, logprobs=1)
            prompt = prompts[rng.randint(0, 18)]
            task = asyncio.create_task(collect(rig.engine, prompt, params, request_id=f"r{number}"))
            for _ in range(rng.randint(0, 30)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                task.cancel()
            else:
                rig.engine.abort(f"r{number}")
            results = await asyncio.gather(task, return_exceptions=True)
            for output in results[0][-1:] if isinstance(results[0], list) else ():
                for completion in output.outputs:
                    count = len(completion.token_ids)
                    assert completion.token_ids == expected[len(prompt) - 1][:count], "tokens of another prompt"
                    for token_id, logprobs in zip(completion.token_ids, completion.logprobs or (), strict=True):
                        assert next(iter(logprobs)) == token_id, "logprobs of another token"

        await asyncio.gather(*(one(number) for number in range(40)))
        await rig.settle()


async def test_an_error_of_one_ends_all_with_its_cause(rig: Any) -> None:
    rig.executor.fail_request("a-1", num_output_tokens=2, cause="its logits are NaN")
    other = asyncio.create_task(collect(rig.engine, [1], dataclasses.replace(ENDLESS, n=1)))
    final = (await collect(rig.engine, PROMPT, ENDLESS, request_id="a"))[-1]
    assert [(c.finish_reason, c.error) for c in final.outputs] == [("error", "its logits are NaN")] * 3
    assert len(final.outputs[1].token_ids) == 2
    assert (await other)[-1].finish_reason == "length"


# ---------------------------------------------------------------------------------------------------- admission
async def test_all_are_admitted_or_none(start_rig: Any) -> None:
    async with start_rig(max_num_queued_reqs=2) as rig:
        with pytest.raises(EngineOverloadedError, match="max_num_queued_reqs=2"):
            await collect(rig.engine, PROMPT, RANDOM, request_id="a")
        assert rig.engine.stats().num_waiting_reqs == 0
        assert len((await collect(rig.engine, PROMPT, dataclasses.replace(RANDOM, n=2), request_id="a"))[-1].outputs) == 2
        await rig.settle()


async def test_a_refusal_halfway_takes_back_what_was_added(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = rig.engine._life.started().core.scheduler
    add_request = scheduler.add_request

    def refuse_the_third(request: Any) -> None:
        if request.request_id == "a-2":
            raise InvalidRequestError("no room")
        add_request(request)

    monkeypatch.setattr(scheduler, "add_request", refuse_the_third)
    with pytest.raises(InvalidRequestError, match="no room"):
        await collect(rig.engine, PROMPT, RANDOM, request_id="a")
    await rig.settle()
    assert rig.executor.outputs == [], "none of them was scheduled"
    monkeypatch.undo()
    assert len((await collect(rig.engine, PROMPT, RANDOM, request_id="a"))[-1].outputs) == 3


async def test_text_is_published_under_the_names_that_events_show(start_rig: Any) -> None:
    executor = FakeExecutor(block_size=4, num_blocks=129, next_token=scripted("hello"))
    async with start_rig(executor, publish_text=True) as rig:
        published: dict[str, str] = {}
        with rig.engine.events() as subscription:
            params = SamplingParams(temperature=0, n=2, output_kind=RequestOutputKind.DELTA)
            await collect(rig.engine, "Hi", params, request_id="a")
            for event in subscription.drain():
                for name, text in getattr(event, "new_text", {}).items():
                    published[name] = published.get(name, "") + text
        assert published == {"a-0": "hello", "a-1": "hello"}
