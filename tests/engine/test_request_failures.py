"""What goes wrong with one request ends that one, with the cause; the others get what they would have got without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aioengine import InvalidRequestError, SamplingParams
from aioengine.engine.outputs.detokenizer import Detokenizer
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.testing import FakeExecutor, FakeTokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


async def last_output(engine: Any, prompt: Any, request_id: str, params: SamplingParams = PARAMS) -> Any:
    return [output async for output in engine.generate(prompt, params, request_id=request_id)][-1]


# ---------------------------------------------------------------------------------------------------- NaN logits
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_output_tokens", [0, 1, 5])
async def test_logits_that_are_nan_end_that_request_and_no_other(start_rig: Any, overlap: bool, num_output_tokens: int) -> None:
    prompts = {f"r{index}": [index] * (3 + 5 * index) for index in range(4)}
    results = []
    for fails in (False, True):
        executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8)
        if fails:
            executor.fail_request("r2", num_output_tokens=num_output_tokens, cause="its logits are NaN at index 7")
        async with start_rig(executor, async_scheduling=overlap) as rig:
            with rig.engine.events(maxlen=1000) as events:
                results.append(await asyncio.gather(*(last_output(rig.engine, prompt, name) for name, prompt in prompts.items())))
                await rig.settle()
                told = [info for event in events.drain() if isinstance(event, StepEvent | StepResultEvent) for info in event.finished]
            rig.engine.check_health()
    expected, outputs = results
    failed = outputs[2]
    assert failed.finish_reason == "error"
    assert "its logits are NaN at index 7" in str(failed.outputs[0].stop_reason)
    assert failed.token_ids == expected[2].token_ids[:num_output_tokens], "what was good before stays"
    for index in (0, 1, 3):
        assert outputs[index].token_ids == expected[index].token_ids
        assert outputs[index].finish_reason == "length"
    assert [(info.request_id, info.finish_reason) for info in told if info.finish_reason != "length"] == [("r2", "error")]


async def test_all_requests_of_a_step_may_fail(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8)
    for index in range(3):
        executor.fail_request(f"r{index}", num_output_tokens=1)
    async with start_rig(executor) as rig:
        outputs = await asyncio.gather(*(last_output(rig.engine, [index], f"r{index}") for index in range(3)))
        assert [output.finish_reason for output in outputs] == ["error"] * 3
        await rig.settle()


async def test_nobody_finds_the_blocks_of_a_failed_request(start_rig: Any) -> None:
    """Its keys and values are suspect: whoever asks the same computes them anew, and the cache serves that."""
    executor = FakeExecutor(num_blocks=129, block_size=4, max_num_seqs=8)
    executor.fail_request("bad", num_output_tokens=2)
    prompt = list(range(40))
    async with start_rig(executor) as rig:
        assert (await last_output(rig.engine, prompt, "before")).num_cached_tokens == 0
        bad = await last_output(rig.engine, prompt, "bad")
        assert (bad.finish_reason, bad.num_cached_tokens) == ("error", 36)
        assert (await last_output(rig.engine, prompt, "after")).num_cached_tokens == 0
        assert (await last_output(rig.engine, prompt, "then")).num_cached_tokens == 36
        await rig.settle()


async def test_failures_preemptions_and_aborts_together(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=24, block_size=4, max_num_seqs=8)
    for index in range(0, 40, 3):
        executor.fail_request(f"r{index}", num_output_tokens=index % 9)
    async with start_rig(executor, max_num_batched_tokens=24) as rig:
        tasks = [asyncio.create_task(last_output(rig.engine, [index] * 13, f"r{index}")) for index in range(40)]
        await asyncio.sleep(0.005)
        for index in range(1, 40, 5):
            rig.engine.abort(f"r{index}")
        outputs = await asyncio.gather(*tasks)
        await rig.settle()
        reasons = {index: output.finish_reason for index, output in enumerate(outputs)}
        assert all(reason in ("error", "abort") for index, reason in reasons.items() if index % 3 == 0)
        assert all(reason in ("length", "abort") for index, reason in reasons.items() if index % 3)
        assert rig.engine.stats().num_preemptions > 0
        assert rig.engine.stats().num_aborted_reqs == sum(reason == "abort" for reason in reasons.values())


# ---------------------------------------------------------------------------------------------------- tokenizers
class PickyTokenizer(FakeTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "bad" in text:
            raise KeyError("no such merge")
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if 0 in token_ids:
            raise ValueError("cannot decode this")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("prompt", ["bad", "bad " * 2000, [{"role": "user", "content": "bad"}]])
async def test_a_prompt_that_the_tokenizer_cannot_take(start_rig: Any, prompt: Any) -> None:
    async with start_rig(tokenizer=PickyTokenizer()) as rig:
        other = asyncio.create_task(last_output(rig.engine, "fine", "other"))
        with pytest.raises(
            InvalidRequestError, match=r"the tokenizer failed on a text of \d+ characters: KeyError: 'no such merge'"
        ) as info:
            await anext(rig.engine.generate(prompt))
        assert isinstance(info.value.__cause__, KeyError)
        assert (await other).finish_reason == "length"
        await rig.settle()


async def test_output_that_the_tokenizer_cannot_decode(start_rig: Any) -> None:
    executor = FakeExecutor(
        num_blocks=129, block_size=4, next_token=lambda known, n, params: 0 if known[0] == 5 and len(known) - n == 3 else 97
    )
    async with start_rig(executor, tokenizer=PickyTokenizer()) as rig:
        bad, good = await asyncio.gather(last_output(rig.engine, [5], "bad"), last_output(rig.engine, [6], "good"))
        assert bad.finish_reason == "error"
        assert "ValueError: cannot decode this" in str(bad.outputs[0].stop_reason)
        assert (good.finish_reason, good.text) == ("length", "a" * 12)
        await rig.settle()


class Panic(BaseException):
    """As pyo3's PanicException, which is no Exception."""


ERRORS = [ValueError, MemoryError, RecursionError, OverflowError, Panic]

# Everything that is called for one request's output, by what it belongs to.
STEPS: dict[str, tuple[type, str]] = {
    "its token is decoded": (Detokenizer, "push"),
    "its text is taken": (Detokenizer, "take"),
    "its text is ended": (Detokenizer, "finish"),
    "its output is collected": (OutputCollector, "push"),
    "its first token is noted": (OutputCollector, "note_first_token"),
    "its cached tokens are noted": (OutputCollector, "note_cached_tokens"),
    "its prompt's logprobs are collected": (OutputCollector, "push_prompt_logprobs"),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("step", STEPS)
async def test_whatever_fails_while_an_output_is_processed_ends_that_request_alone(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException], n: int
) -> None:
    cls, name = STEPS[step]
    original = getattr(cls, name)
    fails: set[int] = set()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if id(self) in fails:
            raise error("no")
        return original(self, *args, **options)

    async with start_rig() as rig:
        expected = await last_output(rig.engine, [6, 6], "good")
        monkeypatch.setattr(cls, name, call)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=n, prompt_logprobs=1, logprobs=1, stop=("zz",))
        good = asyncio.create_task(last_output(rig.engine, [6, 6], "good"))
        bad = asyncio.create_task(last_output(rig.engine, [5, 5], "bad", params))
        await asyncio.sleep(0)
        output = rig.engine._life.started().output
        (stream,) = (stream for stream in output._streams.values() if stream.user_id == "bad")
        fails.update((id(stream.collector), id(output._live[next(iter(stream.live_ids))].detokenizer)))
        bad_output = await bad
        if step != "its text is ended" or n == 1:  # the other continuation may have ended before
            assert [completion.finish_reason for completion in bad_output.outputs] == ["error"] * n
        assert f"{error.__name__}: no" in bad_output.outputs[0].error
        assert (await good).token_ids == expected.token_ids
        fails.clear()
        assert (await last_output(rig.engine, [5, 5], "bad")).finish_reason == "length"
        rig.engine.check_health()
        await rig.settle()


@pytest.mark.parametrize("error", ERRORS)
async def test_a_prompt_that_cannot_be_decoded_is_refused_and_leaves_nothing(start_rig: Any, error: type[BaseException]) -> None:
    class Fails(FakeTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            if 5 in token_ids:
                raise error("no")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    async with start_rig(tokenizer=Fails()) as rig:
        for _ in range(2):  # the name stays free
            with pytest.raises(InvalidRequestError, match=f"cannot decode the end of the prompt: {error.__name__}: no"):
                await last_output(rig.engine, [5], "a")
        with pytest.raises(InvalidRequestError, match="prompt 1: the tokenizer cannot decode"):
            await rig.engine.generate_batch([[6], [5]])
        await rig.settle()
        assert (await last_output(rig.engine, [6], "a")).finish_reason == "length"


@pytest.mark.parametrize("error", ERRORS)
async def test_an_abort_ends_a_request_also_if_its_text_cannot_be_ended(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(self: Any) -> None:
        raise error("no")

    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.001)) as rig:
        stream = rig.engine.generate([5], SamplingParams(max_tokens=300, ignore_eos=True), request_id="a")
        await anext(stream)
        monkeypatch.setattr(Detokenizer, "finish", fail)
        assert rig.engine.abort("a")
        assert (await anext(stream)).finish_reason == "abort"
        rig.engine.check_health()
        await rig.settle()
