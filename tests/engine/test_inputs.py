"""Whatever is wrong with a request is said at the door, with the numbers, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from aioengine.engine.inputs.input_processor import InputProcessor
from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, make_model_info

BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "the prompt is empty"),
    ([], {}, "the prompt is empty"),
    ([1] * 64, {}, r"64 tokens, but at most 63 fit: max_model_len is 64"),
    ("x" * 64, {}, r"65 tokens, but at most 63 fit"),
    ([1, 2, 261], {}, r"token id 261 at position 2 is not in the vocabulary of 261"),
    ([1, -1], {}, r"token id -1 at position 1"),
    ([1, 2.0], {}, "item 1 is float"),
    ([True], {}, "item 0 is bool"),
    ([1, "a"], {}, "item 1 is str"),
    (b"bytes", {}, "got bytes"),
    (None, {}, "got NoneType"),
    (7, {}, "got int"),
    ("half \ud800", {}, r"not valid Unicode: '\\ud800' at position 5"),
    ({"role": "user", "content": "x"}, {}, "put the message into a list"),
    ([{"role": "user"}], {}, "chat message 0 has no 'content'"),
    ([{"role": "user", "content": "x"}, {"content": "x"}], {}, "chat message 1 has no 'role'"),
    ([{"role": "user", "content": 5}], {}, "'content' of chat message 0 must be text, got int"),
    ([{"role": "", "content": "x"}], {}, "'role' of chat message 0 is empty"),
    ([{"role": "user", "content": "x"}, 5], {}, "chat message 1 must be a mapping"),
    ([{"role": "wizard", "content": "x"}], {}, "template refused the messages: unknown role 'wizard'"),
    ([1], {"sampling_params": {"max_tokens": 5}}, "must be SamplingParams or None, got dict"),
    ([1], {"sampling_params": SamplingParams(stop_token_ids=(5, 999))}, "stop_token_ids: token id 999 .* 261"),
    ([1], {"sampling_params": SamplingParams(logit_bias={5: 1.0, 261: 1.0})}, "logit_bias: token id 261 .* 261"),
    ([1], {"sampling_params": SamplingParams(allowed_token_ids=[0, 300])}, "allowed_token_ids: token id 300 .* 261"),
    ([1], {"sampling_params": SamplingParams(bad_words_token_ids=((1, 400),))}, "bad_words_token_ids: token id 400 .* 261"),
    ([1], {"sampling_params": SamplingParams(truncate_prompt_tokens=64)}, "truncate_prompt_tokens is 64, .* at most 63 tokens"),
    ([1] * 60, {"sampling_params": SamplingParams(max_tokens=10, min_tokens=9)}, "min_tokens is 9, but after 60 .* room for 4"),
    ([1], {"request_id": ""}, "request_id must be a non-empty string"),
    ([1], {"request_id": 5}, "request_id must be a non-empty string"),
    ([1], {"request_id": "\udc00"}, "request_id is not valid Unicode"),
    ([1], {"priority": "high"}, "priority must be an integer"),
    ([1], {"cache_salt": 5}, "cache_salt must be a non-empty string or None, got 5"),
    ([1], {"cache_salt": "\udc00"}, "cache_salt is not valid Unicode"),
    ([1], {"cache_salt": ""}, "cache_salt must be a non-empty string or None, got ''"),
    ([1], {"cache_salt": "s" * 20000}, "cache_salt must have at most 16384 characters, got 20000"),
    ([1], {"request_id": "r" * 2000}, "request_id must have at most 1024 characters, got 2000"),
    ([1], {"priority": 2**70}, r"priority must be an integer in \[-2\*\*63, 2\*\*63 - 1\], got 1180591620717411303424"),
    ([1], {"priority": 10**5000}, "priority .* got an integer of 16610 bits"),
    ([1, 10**5000], {}, "token id an integer of 16610 bits at position 1 is not in the vocabulary of 261"),
    ([1], {"timeout": 10**400}, "timeout must be .* got an integer of 1329 bits"),
    ((token_id for token_id in [1]), {}, "got generator"),
    ({1, 2}, {}, "got set"),
    (np.array([1.0, 2.0]), {}, "item 0 is float"),
    (np.array(5), {}, "the prompt, a ndarray, cannot be read: TypeError"),
    (np.array([[1, 2]]), {}, "item 0 is list"),
    (memoryview(b"abc"), {}, "got memoryview"),
    (range(10**9), {}, "the prompt has 1000000000 tokens, but at most 63 fit"),
    ([1], {"sampling_params": SamplingParams(bad_words_token_ids=tuple((i,) for i in range(261)))}, "forbid every token of the vocabulary"),
    ([1], {"sampling_params": SamplingParams(allowed_token_ids=[256], min_tokens=1)}, "no token is left to sample: every token of"),
    ([1], {"sampling_params": SamplingParams(bad_words=["a"], allowed_token_ids=[97])}, "no token is left to sample"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), BAD)
async def test_a_bad_request_is_refused_and_others_run_on(start_rig: Any, prompt: Any, options: dict[str, Any], message: str) -> None:
    async with start_rig(max_model_len=64) as rig:
        other = rig.engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=20))
        await anext(other)
        with pytest.raises(InvalidRequestError, match=message):
            await anext(rig.engine.generate(prompt, **options))
        assert len([output async for output in other][-1].token_ids) == 20
        await rig.settle()


async def test_a_request_that_can_never_fit_the_kv_cache_is_refused(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=9, block_size=4), max_num_seqs=4, max_model_len=64) as rig:  # 8 blocks, 32 tokens
        with pytest.raises(InvalidRequestError, match="KV blocks"):
            await anext(rig.engine.generate([1] * 20, SamplingParams(max_tokens=14)))
        (exact,) = await rig.engine.generate_batch([[1] * 20], SamplingParams(temperature=0, max_tokens=13))
        assert len(exact.token_ids) == 13
        (limited,) = await rig.engine.generate_batch([[1] * 20], SamplingParams(temperature=0, max_tokens=None))
        assert len(limited.token_ids) == 13, "max_tokens=None takes what there is"
        with pytest.raises(InvalidRequestError, match="KV blocks"):
            await anext(rig.engine.generate([1] * 40, SamplingParams(max_tokens=None)))
        await rig.settle()


@pytest.mark.parametrize("kind", ["token ids", "text"])
async def test_a_prompt_of_every_length_around_the_limit(start_rig: Any, kind: str) -> None:
    """One token is always generated, so the last one is taken up to max_model_len - 1; nothing above disturbs anybody."""
    max_model_len = 32

    def prompt(length: int) -> Any:
        return [1] * length if kind == "token ids" else "x" * (length - 1)  # and <bos>

    async with start_rig(max_model_len=max_model_len) as rig:
        for length in (1, 2, 30, 31):
            if kind == "text" and length == 1:
                continue
            for max_tokens in (1, 5, None):
                params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                (output,) = await rig.engine.generate_batch([prompt(length)], params)
                room = max_model_len - length
                assert len(output.prompt_token_ids) == length
                assert (output.finish_reason, len(output.token_ids)) == ("length", min(room, max_tokens or room))
        for length in (32, 33, 64):
            with pytest.raises(InvalidRequestError, match=f"{length} tokens, but at most 31 fit: max_model_len is 32"):
                await rig.engine.generate_batch([prompt(length)])
        empties: tuple[Any, ...] = ("", [], ())
        for empty in empties:
            with pytest.raises(InvalidRequestError, match="the prompt is empty"):
                await rig.engine.generate_batch([empty])
        rig.engine.check_health()
        await rig.settle()


async def test_arrays_are_token_ids(rig: Any) -> None:
    (from_array,) = await rig.engine.generate_batch([np.array([1, 2, 3])], SamplingParams(temperature=0))
    (from_list,) = await rig.engine.generate_batch([(1, 2, 3)], SamplingParams(temperature=0))
    assert from_array.token_ids == from_list.token_ids
    (from_items,) = await rig.engine.generate_batch([[1, np.int64(2), np.uint8(3)]], SamplingParams(temperature=0))
    assert from_items.prompt_token_ids == [1, 2, 3]
    assert set(map(type, from_items.prompt_token_ids)) == {int}
    assert from_items.token_ids == from_list.token_ids


async def test_chat_without_a_template(start_rig: Any) -> None:
    class Plain(FakeTokenizer):
        has_chat_template = False

    async with start_rig(tokenizer=Plain()) as rig:
        with pytest.raises(InvalidRequestError, match="fake has no chat template"):
            await anext(rig.engine.generate([{"role": "user", "content": "x"}]))


async def test_stop_strings_need_a_tokenizer(start_rig: Any) -> None:
    async with start_rig(tokenizer=None) as rig:
        with pytest.raises(InvalidRequestError, match="the stop string 'END' needs a tokenizer"):
            await anext(rig.engine.generate([1], SamplingParams(stop=("END",))))
        with pytest.raises(InvalidRequestError, match="the bad word 'no' needs a tokenizer"):
            await anext(rig.engine.generate([1], SamplingParams(bad_words=("no",))))


def make_processor(tokenizer: FakeTokenizer, *, max_model_len: int = 100) -> InputProcessor:
    info = make_model_info(max_position_embeddings=max_model_len)
    return InputProcessor(info, tokenizer, max_model_len=max_model_len, max_tokens_limit=lambda n: max_model_len - n - 7, seed=3)


async def test_max_tokens_and_seed_are_filled_in() -> None:
    processor = make_processor(FakeTokenizer())
    given = SamplingParams(max_tokens=1000, seed=9)
    assert (await processor.process([1] * 10, given)).sampling_params == SamplingParams(max_tokens=90, seed=9)
    filled = (await processor.process([1] * 10, SamplingParams(max_tokens=None))).sampling_params
    assert filled.max_tokens == 83
    again = (await make_processor(FakeTokenizer()).process([1], None)).sampling_params
    assert again.seed == filled.seed is not None


class RealTokenizer(FakeTokenizer):
    """One of the `tokenizers` package: what it does with the GIL is the point here."""

    def __init__(self) -> None:
        self.backend = Tokenizer(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"], show_progress=False
        )
        self.backend.train_from_iterator(["some words that come again and again"] * 3, trainer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)


@pytest.mark.parametrize("chat", [False, True])
async def test_long_text_is_tokenised_beside_the_loop(chat: bool) -> None:
    tokenizer = RealTokenizer()
    info = make_model_info(vocab_size=300)
    processor = InputProcessor(info, tokenizer, max_model_len=1_000_000, max_tokens_limit=lambda n: 9, seed=3)
    rng = random.Random(0)
    text = " ".join(rng.choice(["some", "words", "agonise", "thatcher", "comedy"]) for _ in range(100_000))
    # Not the clock: others use the machine too.
    start = time.process_time()
    token_ids = tokenizer.encode(text)
    blocking = time.process_time() - start

    stalls = []
    for _ in range(3):
        task = asyncio.create_task(processor.process([{"role": "user", "content": text}] if chat else text, None))
        worst = 0.0
        while not task.done():
            start, start_of_work = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            worst = max(worst, min(time.perf_counter() - start, time.process_time() - start_of_work))
        stalls.append(worst)
        assert (await task).prompt_token_ids[-len(token_ids) :] == token_ids or chat
    assert min(stalls) < blocking / 3, f"the loop stood still for {min(stalls):.3f} s; tokenising takes {blocking:.3f} s"


async def test_short_text_is_tokenised_at_once() -> None:
    """A hop through a thread would cost more than the work."""
    processor = make_processor(FakeTokenizer())
    with pytest.raises(StopIteration):
        processor.process("short", None).send(None)


async def test_a_template_is_encoded_without_further_special_tokens() -> None:
    seen: list[bool] = []

    class Spy(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            seen.append(add_special_tokens)
            return super().encode(text, add_special_tokens=add_special_tokens)

    processor = make_processor(Spy())
    messages: Sequence[dict[str, str]] = [{"role": "user", "content": "x"}]
    await processor.process("text", None)
    await processor.process(messages, None)
    assert seen == [True, False]


async def test_a_prompt_with_a_template_begins_once(rig: Any) -> None:
    """The template writes the beginning of text itself, and text of the user that spells it is text."""
    (output,) = await rig.engine.generate_batch([[{"role": "user", "content": "x"}]], SamplingParams(temperature=0, max_tokens=1))
    assert output.prompt_token_ids[:2] == [257, 258]
    assert output.prompt_token_ids.count(257) == 1
    (output,) = await rig.engine.generate_batch(["x"], SamplingParams(temperature=0, max_tokens=1))
    assert output.prompt_token_ids == [257, ord("x")]


@pytest.mark.parametrize(
    ("truncate", "kept"), [(None, [257, *b"abcdef"]), (3, [*b"def"]), (1, [*b"f"]), (7, [257, *b"abcdef"]), (20, [257, *b"abcdef"])]
)
async def test_truncation_keeps_the_last_tokens(truncate: int | None, kept: list[int]) -> None:
    processor = make_processor(FakeTokenizer())
    processed = await processor.process("abcdef", SamplingParams(truncate_prompt_tokens=truncate, max_tokens=1000))
    assert processed.prompt_token_ids == kept
    assert processed.prompt == "abcdef"
    assert processed.sampling_params.max_tokens == 100 - len(kept), "the room is that of the truncated prompt"


async def test_truncation_to_what_the_model_takes(start_rig: Any) -> None:
    async with start_rig(max_model_len=32) as rig:
        prompt = list(range(100))
        (output,) = await rig.engine.generate_batch([prompt], SamplingParams(temperature=0, truncate_prompt_tokens=-1))
        assert output.prompt_token_ids == prompt[-31:]
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        assert prompt == list(range(100)), "the caller's list is left alone"


# ---------------------------------------------------------------------------------------------------- bad words
class WordTokenizer(FakeTokenizer):
    """Whole words, with and without a leading space, where it has them; else letters."""

    words = ("the", " the", " word", "wo", "rd", " two", "two")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        token_ids = [1] if add_special_tokens else []
        while text:
            piece = max((word for word in self.words if text.startswith(word)), key=len, default=text[0])
            token_ids.append(100 + self.words.index(piece) if piece in self.words else ord(piece))
            text = text[len(piece) :]
        return token_ids


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("the", [[100], [101]]),  # as many tokens, another first one: vLLM's rule
        (" the", [[100], [101]]),  # a space in front says the same
        ("word", [[103, 104], [102]]),  # two tokens, or one after a space: both are the word
        ("xy", [[*b"xy"]]),  # after a space it ends in the same tokens, which are blocked
        ("  ", [[*b"  "]]),
    ],
)
async def test_a_bad_word_is_blocked_at_the_beginning_and_after_a_space(word: str, expected: list[list[int]]) -> None:
    processor = make_processor(WordTokenizer())
    params = (await processor.process([1], SamplingParams(bad_words=(word,)))).sampling_params
    assert [list(token_ids) for token_ids in params.bad_words_token_ids] == expected
    assert params.bad_words == (word,)


async def test_bad_words_add_to_given_token_ids_and_come_once() -> None:
    processor = make_processor(WordTokenizer())
    given = SamplingParams(bad_words=("the", "two", " the"), bad_words_token_ids=((7, 8),), n=2)
    params = (await processor.process([1], given)).sampling_params
    assert params.bad_words_token_ids == ((7, 8), (100,), (101,), (106,), (105,))
    assert params.n == 2
    assert given.bad_words_token_ids == ((7, 8),)


async def test_a_bad_word_without_tokens_is_refused() -> None:
    class Deaf(FakeTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(InvalidRequestError, match="bad_words: 'no' has no tokens"):
        await make_processor(Deaf()).process([1], SamplingParams(bad_words=("no",)))
