"""Cumulative, delta or final only: the same output, whatever the steps, the consumer's speed and the token borders."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.output_processor import OutputProcessor
from aioengine.engine.processed_input import ProcessedInput
from aioengine.outputs import CompletionOutput, EngineCoreOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.testing import EOS_TOKEN_ID, FakeExecutor, FakeTokenizer, make_model_info, scripted

DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
TOKENIZER = FakeTokenizer()
Snapshot = tuple[str, list[int], list[TokenLogprobs] | None]


def logprobs_of(token_ids: Sequence[int], *, start: int) -> list[TokenLogprobs]:
    """They tell the position as well as the token."""
    return [{token_id: Logprob(-float(start + index), 1)} for index, token_id in enumerate(token_ids)]


@dataclass(frozen=True)
class Script:
    """What the scheduler gives one request: tokens by step, and how it ends."""

    steps: list[list[int]]
    reason: FinishReason

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        outputs, position = [], 0
        for index, token_ids in enumerate(self.steps):
            reason = self.reason if index == len(self.steps) - 1 else None
            outputs.append(EngineCoreOutput(request_id, token_ids, reason, None, logprobs_of(token_ids, start=position)))
            position += len(token_ids)
        return outputs


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Bytes of text, of text cut inside a character, or of anything."""
    text = draw(st.one_of(st.text(alphabet="abE€🚀é", max_size=24), st.text(max_size=10)))
    token_ids = list(draw(st.one_of(st.just(text.encode(errors="replace")), st.binary(max_size=24))))
    steps = []
    while token_ids:
        size = draw(st.integers(1, 4))
        steps.append(token_ids[:size])
        token_ids = token_ids[size:]
    reason: FinishReason = draw(st.sampled_from(["stop", "length"]))
    if reason == "stop" or not steps:
        steps.append([EOS_TOKEN_ID])
        reason = "stop"
    return Script(steps, reason)


PARAMS: Any = st.fixed_dictionaries(
    {
        "stop": st.lists(st.sampled_from(["b", "ab", "abE", "EE", "€", "é🚀", "bb"]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "logprobs": st.sampled_from([None, 0]),
    }
)


async def play(script: Script, reads: Sequence[bool], **params: Any) -> list[RequestOutput]:
    """Feed a script to the processor; after step i the consumer reads if `reads[i]`, and it reads the end."""
    processor = OutputProcessor(TOKENIZER)
    processed = ProcessedInput([1, 2], SamplingParams(max_tokens=None, **params), None)
    collector = processor.add_request("r", "r", processed, now=0.0, final_only=False)
    received = []
    for output, read in zip(script.outputs("r"), reads, strict=True):
        processor.process_outputs([output])
        if collector.finished:
            break
        if read and collector.is_ready:
            received.append(await collector.take())
    received.append(await collector.take())
    assert received[-1].finished
    assert processor.num_live == 0
    return received


def snapshot(output: RequestOutput) -> Snapshot:
    (completion,) = output.outputs
    return completion.text, completion.token_ids, completion.logprobs


@settings(max_examples=250, deadline=None)
@given(script=scripts(), params=PARAMS, data=st.data())
def test_deltas_add_up_to_the_final_output_exactly(script: Script, params: dict[str, Any], data: st.DataObject) -> None:
    num_steps = len(script.steps)
    reads = st.lists(st.booleans(), min_size=num_steps, max_size=num_steps)
    (final,) = asyncio.run(play(script, [True] * num_steps, output_kind=FINAL_ONLY, **params))
    deltas = asyncio.run(play(script, data.draw(reads), output_kind=DELTA, **params))
    cumulative = asyncio.run(play(script, data.draw(reads), output_kind=CUMULATIVE, **params))

    expected = snapshot(final)
    assert snapshot(cumulative[-1]) == expected
    text, token_ids, logprobs = expected
    assert "".join(output.text for output in deltas) == text
    assert [token_id for output in deltas for token_id in output.token_ids] == token_ids
    pieces = [output.outputs[0].logprobs for output in deltas]
    assert (None if pieces[0] is None else [entry for piece in pieces for entry in piece or ()]) == logprobs
    ends = {(o[-1].finish_reason, o[-1].outputs[0].stop_reason) for o in (deltas, cumulative, [final])}
    assert len(ends) == 1

    for output in deltas:
        assert output.text_delta == output.text
        if (piece := output.outputs[0].logprobs) is not None:
            assert [next(iter(entry)) for entry in piece] == output.token_ids
    assert "".join(output.text_delta for output in cumulative) == text
    for output in cumulative:
        assert text.startswith(output.text)
        assert token_ids[: len(output.token_ids)] == output.token_ids
        assert (output.outputs[0].logprobs or []) == (logprobs or [])[: len(output.token_ids) if logprobs else 0]


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abE€🚀é", max_size=30), sizes=st.lists(st.integers(1, 4), min_size=1), stop=st.sampled_from([(), ("€", "abE")])
)
def test_a_token_comes_with_the_last_character_of_its_text(text: str, sizes: list[int], stop: tuple[str, ...]) -> None:
    token_ids, steps = list(text.encode()), list[list[int]]()
    while token_ids:
        size = sizes[len(steps) % len(sizes)]
        steps.append(token_ids[:size])
        token_ids = token_ids[size:]
    script = Script([*steps, [EOS_TOKEN_ID]], "stop")
    outputs = asyncio.run(play(script, [True] * len(script.steps), stop=stop))
    for output in outputs[:-1]:  # a token is a byte here: ids that are there make whole characters
        assert TOKENIZER.decode(output.token_ids) == output.text
    assert script.steps[0][0] == outputs[-1].token_ids[0], "the end brings whatever was kept back"


async def test_what_is_kept_back_comes_with_the_text(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("aENd€"))) as rig:
        params = SamplingParams(temperature=0, max_tokens=20, stop=("END",), logprobs=0, output_kind=DELTA)
        chunks = [(o.text, bytes(t for t in o.token_ids if t < 256)) async for o in rig.engine.generate("x", params)]
        assert [chunk for chunk in chunks if chunk[0] or chunk[1]] == [("a", b"a"), ("ENd", b"ENd"), ("€", "€".encode())]
        await rig.settle()


async def test_final_only_yields_one_output_with_everything(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("hello"))) as rig:
        outputs = [o async for o in rig.engine.generate("x", SamplingParams(temperature=0, output_kind=FINAL_ONLY, logprobs=0))]
        (final,) = outputs
        assert (final.text, final.text_delta, final.finish_reason) == ("hello", "hello", "stop")
        assert final.token_ids == [*b"hello", EOS_TOKEN_ID]
        await rig.settle()


async def test_a_batch_returns_whole_outputs_whatever_the_kind(rig: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = await rig.engine.generate_batch([[1], [2]], params)
    got = await rig.engine.generate_batch([[1], [2]], dataclasses.replace(params, output_kind=DELTA))
    assert [o.token_ids for o in got] == [o.token_ids for o in expected]
    assert [len(o.text) for o in got] == [6, 6]


async def test_a_second_batch_on_the_same_engine_gives_the_same(rig: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=1, n=2)
    batches = [await rig.engine.generate_batch([[1, 2], [3], [1, 2]], params) for _ in range(3)]
    contents = [[[(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in o.outputs] for o in batch] for batch in batches]
    assert contents[0] == contents[1] == contents[2]
    assert contents[0][0] == contents[0][2]


async def test_detokenize_off_gives_ids_and_no_text(start_rig: Any) -> None:
    class Silent(FakeTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            raise AssertionError("nothing is to be decoded")

    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("hello")), tokenizer=Silent()) as rig:
        params = SamplingParams(temperature=0, detokenize=False, stop_token_ids=(ord("o"),), output_kind=DELTA)
        outputs = [o async for o in rig.engine.generate("x", params)]
        assert [token_id for o in outputs for token_id in o.token_ids] == [*b"hello"]
        assert {o.text for o in outputs} == {""}
        assert (outputs[-1].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", ord("o"))
        await rig.settle()


# ---------------------------------------------------------------------------------------------------- why it ended
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_tokens": 3}, ("length", None, "one")),
        ({}, ("stop", None, "one END two")),
        ({"ignore_eos": True, "max_tokens": 12}, ("length", None, "one END two")),
        ({"stop": ("END", "two")}, ("stop", "END", "one ")),
        ({"stop": ("two", "E")}, ("stop", "E", "one ")),
        ({"stop_token_ids": (ord("D"),), "stop": ("ND",)}, ("stop", ord("D"), "one EN")),
        ({"stop_token_ids": (EOS_TOKEN_ID,), "ignore_eos": True}, ("stop", EOS_TOKEN_ID, "one END two")),
        ({"stop": ("END",), "max_tokens": 7}, ("stop", "END", "one ")),
        ({"stop": ("END",), "max_tokens": 6}, ("length", None, "one EN")),
    ],
)
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
async def test_finish_reason_and_stop_reason_say_which_end_it_was(
    start_rig: Any, params: dict[str, Any], expected: tuple[str, int | str | None, str], kind: RequestOutputKind
) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted("one END two"))) as rig:
        sampling_params = SamplingParams(**{"temperature": 0, "max_tokens": 40, "output_kind": kind, **params})
        outputs = [o async for o in rig.engine.generate("x", sampling_params)]
        completion = outputs[-1].outputs[0]
        text = completion.text if kind is CUMULATIVE else "".join(o.text for o in outputs)
        assert (completion.finish_reason, completion.stop_reason, text) == expected
        assert completion.error is None
        assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
        await rig.settle()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize(
    ("params", "shown", "with_stop", "num_tokens"),
    [
        ({}, "ab", "ab", 4),  # the model's own end
        ({"stop_token_ids": (258,), "ignore_eos": True}, "ab", "ab", 3),
        ({"stop": ("b",)}, "a", "ab", 2),
    ],
)
async def test_what_ends_an_output_is_always_in_its_ids_and_in_its_text_only_as_a_string_that_was_asked_for(
    start_rig: Any, params: dict[str, Any], shown: str, with_stop: str, num_tokens: int, kind: RequestOutputKind, include: bool, skip: bool
) -> None:
    """The end by a token id or a string, with and without include_stop_str_in_output and skip_special_tokens."""
    script = [ord("a"), ord("b"), 258, EOS_TOKEN_ID]
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted(script))) as rig:
        options = SamplingParams(
            temperature=0, max_tokens=9, include_stop_str_in_output=include, skip_special_tokens=skip, output_kind=kind, **params
        )
        outputs = [output async for output in rig.engine.generate("x", options)]
        text, token_ids = "".join(o.text_delta for o in outputs), outputs[-1].token_ids
        if kind is DELTA:
            token_ids = [token_id for output in outputs for token_id in output.token_ids]
        expected = with_stop if include else shown
        if not skip and num_tokens == 4:
            expected += "<|user|>"  # a special token that ends nothing
        assert (text, token_ids, outputs[-1].finish_reason) == (expected, script[:num_tokens], "stop")


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 5])
@pytest.mark.parametrize("end", [EOS_TOKEN_ID, 200])
async def test_each_of_several_end_tokens_is_ignored_or_masked_or_ends(start_rig: Any, end: int, min_tokens: int) -> None:
    info = dataclasses.replace(make_model_info(), eos_token_ids=frozenset({EOS_TOKEN_ID, 200}))
    executor = FakeExecutor(block_size=4, next_token=lambda known, num_prompt_tokens, params: end, model_info=info)
    async with start_rig(executor, model_info=info) as rig:
        (output,) = await rig.engine.generate_batch([[1]], SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens))
        assert (output.finish_reason, len(output.token_ids), output.token_ids[-1]) == ("stop", min_tokens + 1, end)
        assert not {EOS_TOKEN_ID, 200} & set(output.token_ids[:-1])
        (output,) = await rig.engine.generate_batch([[1]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        assert (output.finish_reason, output.token_ids) == ("length", [end] * 9)
        # A stop string counts from the token behind min_tokens on.
        executor = rig.executor
        executor._next_token = scripted("ababababab")
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens, stop=("b",))
        (output,) = await rig.engine.generate_batch([[1]], params)
        assert (output.finish_reason, len(output.token_ids)) == ("stop", (min_tokens // 2 + 1) * 2)


async def test_an_abort_is_told_as_such_with_everything_that_was_kept_back(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(block_size=4, next_token=scripted(b"ab\xe2\x82", then=0x82)), max_num_seqs=1) as rig:
        params = SamplingParams(temperature=0, max_tokens=4, stop=("b\ufffdz",), output_kind=DELTA)
        rig.engine.pause()
        stream = rig.engine.generate("x", params, request_id="a")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for _ in range(3):
            await rig.engine.step()
        assert rig.engine.abort("a")
        outputs = [await first, *[o async for o in stream]]
        assert "".join(o.text for o in outputs) == "ab\ufffd"
        assert [t for o in outputs for t in o.token_ids] == [*b"ab\xe2"]
        assert (outputs[-1].finish_reason, outputs[-1].outputs[0].stop_reason) == ("abort", None)
        rig.engine.resume()
        await rig.settle()


async def test_an_error_ends_the_stream_with_its_cause() -> None:
    processor = OutputProcessor(TOKENIZER)
    processed = ProcessedInput([1], SamplingParams(logprobs=0), None)
    collector = processor.add_request("r", "r", processed, now=0.0, final_only=False)
    processor.process_outputs([EngineCoreOutput("r", [97, 0xE2], None, None, logprobs_of([97, 0xE2], start=0))])
    ends = processor.process_outputs([EngineCoreOutput("r", [], "error", error="its logits are NaN")])
    assert ends == []
    output = await collector.take()
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.error, completion.text) == ("error", "its logits are NaN", "a\ufffd")
    assert completion.token_ids == [97, 0xE2]
    assert completion.logprobs == logprobs_of([97, 0xE2], start=0)
    assert output.finished
    assert processor.num_live == 0


# ---------------------------------------------------------------------------------------------------- outputs as objects
async def test_an_output_never_changes(rig: Any) -> None:
    """It is made when it is read, and what is read late is what was there."""
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=1)
    outputs, seen = [], []
    async for output in rig.engine.generate("x", params):
        outputs.append(output)
        seen.append((len(output.token_ids), output.text) if len(outputs) % 2 else None)
    final = outputs[-1]
    for count, (output, earlier) in enumerate(zip(outputs, seen, strict=True), 1):
        assert (output.token_ids, output.text) == (final.token_ids[:count], final.text[:count])
        assert earlier in (None, (count, final.text[:count]))
        assert output.outputs[0].logprobs == (final.outputs[0].logprobs or [])[:count]
        assert output.token_ids is output.token_ids
    outputs[3].token_ids.append(5)
    assert outputs[4].token_ids == final.token_ids[:5]


async def test_an_output_behaves_as_the_dataclass_that_it_is(rig: Any) -> None:
    outputs = [o async for o in rig.engine.generate("x", SamplingParams(temperature=0, max_tokens=4))]
    completion = outputs[1].outputs[0]
    text, token_ids = outputs[-1].text[:2], outputs[-1].token_ids[:2]
    plain = CompletionOutput(0, text, token_ids, text_delta=text[1])
    for same in (completion, copy.copy(completion), copy.deepcopy(completion), pickle.loads(pickle.dumps(completion))):
        assert same == plain
        assert repr(same) == repr(plain)
    assert dataclasses.asdict(completion) == dataclasses.asdict(plain)
    assert dataclasses.replace(completion, text="y").token_ids == token_ids
    with pytest.raises(AttributeError, match="no attribute 'txt'"):
        _ = completion.txt
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.text = "y"


def cost_of_outputs(kind: RequestOutputKind, *, history: int) -> float:
    """Seconds of CPU to put and take one more token, at best, behind so many."""

    async def run() -> float:
        collector = OutputCollector("r", [1], prompt=None, queued_time=0.0, with_logprobs=True, output_kind=kind)
        collector.push(0, "x" * history, list(range(history)), logprobs=[{0: Logprob(0.0, 1)}] * history)
        await collector.take()
        best = float("inf")
        for _ in range(100):
            start = time.thread_time()
            collector.push(0, "y", [1], logprobs=[{1: Logprob(0.0, 1)}])
            output = await collector.take()
            assert output.text_delta == "y"
            best = min(best, time.thread_time() - start)
        return best

    return asyncio.run(run())


@pytest.mark.skipif(sys.gettrace() is not None, reason="tracing distorts the times")
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_token_costs_the_same_after_a_hundred_thousand_others(kind: RequestOutputKind) -> None:
    """Copying what there is would take half a millisecond."""
    assert cost_of_outputs(kind, history=100_000) < 3 * cost_of_outputs(kind, history=10) + 20e-6


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 2])
async def test_what_is_taken_after_the_end_is_the_end_again(kind: RequestOutputKind, n: int) -> None:
    """It does not wait for an output that cannot come."""
    collector = OutputCollector("r", [1], prompt=None, queued_time=0.0, with_logprobs=False, output_kind=kind, num_completions=n)
    for index in range(n):
        collector.push(index, "a", [7])
        collector.finish(index, "length", now=1.0)
    first = await asyncio.wait_for(collector.take(), 5)
    assert (first.text, first.finished) == ("a", True)
    for _ in range(3):
        again = await asyncio.wait_for(collector.take(), 5)
        assert again.finished
        assert [completion.finish_reason for completion in again.outputs] == ["length"] * n
        is_delta = kind is RequestOutputKind.DELTA
        assert (again.text, again.token_ids, again.text_delta) == (("", [], "") if is_delta else ("a", [7], ""))
