"""From what users pass to what the scheduler takes; everything that is wrong with a request is found here."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aioengine.checks.fields as fields
from aioengine.checks.fields import check_unicode
from aioengine.checks.values import shorten, whole
from aioengine.engine.inputs.long_prompts import find_outside_vocabulary, plain_token_ids
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.engine.processed_input import ProcessedInput
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.resolved_config import ModelInfo
from aioengine.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import CompiledGrammar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text that says whether the tokenizer puts BOS and the like around it: a rendered chat has its own."""

    text: str
    add_special_tokens: bool = True


Prompt = str | TextPrompt | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""

# Tokenising this many characters takes about a millisecond. Longer text goes to a thread: the loop has steps to schedule.
_MAX_INLINE_CHARS = 4096
_MAX_INLINE_MESSAGES = 512
_CHARS_PER_CALL = 64

MAX_REQUEST_ID_CHARS = 1024
"""It is in every event of the request."""

MAX_CACHE_SALT_CHARS = 1 << 14


class InputProcessor:
    """Checks and completes requests. Raises InvalidRequestError naming the value and the limit.

    max_tokens_limit: the most tokens that a prompt of so many tokens can be continued by (`Scheduler.max_tokens_limit`).
    seed: of the generator that gives a seed to requests without one; None: the operating system's entropy.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: TextTokenizer | None,
        *,
        max_model_len: int,
        max_tokens_limit: Callable[[int], int],
        seed: int | None,
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        self._vocab_size = model_info.vocab_size
        self._eos_token_ids = model_info.eos_token_ids
        self._model_name = model_info.name
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_tokens_limit = max_tokens_limit
        self._rng = random.Random(seed)
        self._structured_output = structured_output

    async def process(self, prompt: Prompt, sampling_params: SamplingParams | None) -> ProcessedInput:
        """Check and complete one request; long text is tokenised, and a grammar compiled, in a thread."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams or None, got {type(params).__name__}")
        if params.seed is None:
            # Drawn before anything is awaited, so that a seeded engine gives seeds in the order of the calls.
            params = params.with_values(seed=self._rng.getrandbits(63))
        await self._check_params(params)
        if params.bad_words:
            params = await self._with_bad_words(params)
        params.check_any_token_is_left(eos_token_ids=self._eos_token_ids, vocab_size=self._vocab_size)
        text, token_ids = await self._tokenize(prompt, num_kept=params.truncate_prompt_tokens)
        await self._check_token_ids(token_ids)
        params = self._complete_params(params, len(token_ids))
        grammar = None if params.structured_outputs is None else await self._compile(params)
        return ProcessedInput(token_ids, params, text, grammar)

    async def _compile(self, params: SamplingParams) -> CompiledGrammar:
        assert self._structured_output is not None, "an engine that takes requests has a StructuredOutputManager"
        assert params.structured_outputs is not None
        try:
            grammar = await self._structured_output.compile(params.structured_outputs)
            if not _allows_a_token(grammar, params, self._eos_token_ids):
                raise InvalidRequestError(
                    "no token is left to sample: structured_outputs, allowed_token_ids and bad_words forbid every first one: "
                    f"{shorten(params.structured_outputs)} and allowed_token_ids {shorten(params.allowed_token_ids)}"
                )
            return grammar
        except AioEngineError:
            raise
        except Exception as exc:  # the grammar's library refuses what it cannot take with errors of its own
            raise InvalidRequestError(
                f"structured_outputs cannot be used: {shorten(params.structured_outputs)}: {type(exc).__name__}: {exc}"
            ) from exc

    # ------------------------------------------------------------------ prompt -> token ids
    async def _tokenize(self, prompt: Prompt, *, num_kept: int | None) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidRequestError("the prompt is empty")
            tokenizer = self._need_tokenizer("a text prompt")
            text, token_ids = await _run(len(prompt.text), _encode_text, tokenizer, prompt)
            return text, self._truncate(token_ids, num_kept)
        items = _read_items(prompt, num_kept=None if num_kept is None else self._num_kept(num_kept), most=self._max_model_len - 1)
        if (plain := await plain_token_ids(items)) is not None:
            return None, self._truncate(plain, num_kept)
        if not any(isinstance(item, Mapping) for item in items):
            raise _wrong_item(items)
        few = len(items) <= _MAX_INLINE_MESSAGES
        num_chars = _check_messages(items) if few else await asyncio.to_thread(_check_messages, items)
        tokenizer = self._need_tokenizer("chat messages")
        if not tokenizer.has_chat_template:
            raise InvalidRequestError(f"{self._model_name} has no chat template: pass text or token ids instead of messages")
        text, token_ids = await _run(num_chars if few else _MAX_INLINE_CHARS + 1, _encode_chat, tokenizer, items)
        return text, self._truncate(token_ids, num_kept)

    def _need_tokenizer(self, what: str) -> TextTokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(f"{what} needs a tokenizer and this engine has none: pass token ids")
        return self._tokenizer

    def _num_kept(self, num_tokens: int) -> int:
        return self._max_model_len - 1 if num_tokens == -1 else num_tokens

    def _truncate(self, token_ids: list[int], num_tokens: int | None) -> list[int]:
        """The last `num_tokens`, -1: as many as leave room for one more. What was cut off is not checked further."""
        return token_ids if num_tokens is None else token_ids[-self._num_kept(num_tokens) :]

    async def _check_token_ids(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequestError("the prompt has no tokens")
        most = self._max_model_len - 1
        if len(token_ids) > most:
            raise _too_long(len(token_ids), most)
        index = await find_outside_vocabulary(token_ids, self._vocab_size)
        if index is not None:
            raise InvalidRequestError(
                f"token id {shorten(token_ids[index])} at position {index} is not in the vocabulary of {self._vocab_size} ids"
            )

    # ------------------------------------------------------------------ sampling parameters
    async def _check_params(self, params: SamplingParams) -> None:
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", list(params.logit_bias)),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words_token_ids", [token_id for word in params.bad_words_token_ids for token_id in word]),
        ):
            index = await find_outside_vocabulary(token_ids, self._vocab_size)
            if index is not None:
                raise InvalidRequestError(
                    f"{name}: token id {shorten(token_ids[index])} is not in the vocabulary of {self._vocab_size} ids"
                )
        if params.stop_strings:
            self._need_tokenizer(f"the stop string {shorten(params.stop_strings[0])}")
        most = self._max_model_len - 1
        if params.truncate_prompt_tokens is not None and params.truncate_prompt_tokens > most:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, but a prompt may have at most {most} tokens: "
                f"max_model_len is {self._max_model_len} and at least one token is generated"
            )

    async def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Add the token ids of `bad_words` to those that were given as such."""
        tokenizer = self._need_tokenizer(f"the bad word {shorten(params.bad_words[0])}")
        # Each of them is encoded twice, which takes some time however short it is.
        num_chars = sum(map(len, params.bad_words)) + _CHARS_PER_CALL * len(params.bad_words)
        words = await _run(num_chars, encode_bad_words, tokenizer, params.bad_words)
        if (longest := max(words, key=len, default=())) and len(longest) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"bad_words: a word has {len(longest)} tokens, at most {MAX_BAD_WORD_TOKENS} are taken")
        return params.with_values(bad_words_token_ids=(*params.bad_words_token_ids, *words))

    def _complete_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Make max_tokens a number that max_model_len leaves room for; such a request ends with "length"."""
        if params.max_tokens is not None:
            max_tokens = min(params.max_tokens, self._max_model_len - num_prompt_tokens)
        else:
            # Below 1 the prompt itself does not fit into the KV cache, and the scheduler refuses it with the numbers.
            max_tokens = max(1, self._max_tokens_limit(num_prompt_tokens))
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but after {num_prompt_tokens} prompt tokens there is room for {max_tokens}"
            )
        return params.with_values(max_tokens=max_tokens)


def _allows_a_token(grammar: CompiledGrammar, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
    """Whether an output can begin, or be empty, with a grammar beside allowed_token_ids and bad words of one token."""
    bad = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.allowed_token_ids is None and not bad:
        return True
    mask = bytearray(grammar.start(params).bitmask())
    if any(_has_bit(mask, token_id) for token_id in eos_token_ids):
        return True
    for token_id in sorted(bad):
        if token_id >> 3 < len(mask):
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
    if params.allowed_token_ids is None:
        return any(mask)
    return any(_has_bit(mask, token_id) for token_id in params.allowed_token_ids)


def _has_bit(mask: bytearray, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def encode_bad_words(tokenizer: TextTokenizer, bad_words: Sequence[str]) -> list[tuple[int, ...]]:
    """Each word in tokens, as it is written at the beginning of a text and after a space.

    vLLM takes the second form only if it has as many tokens as the first one and begins with another. A word of two tokens
    that is one token after a space would then come through, so here every second form counts that is not blocked already:
    one that ends in the tokens of the first form is.
    """
    token_ids: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in bad_words:
        first, after_space = (
            tuple(encode(tokenizer, prefix + word.lstrip(), add_special_tokens=False)) if word.strip() else () for prefix in ("", " ")
        )
        if not first:  # nothing but spaces, or nothing that the tokenizer keeps
            first = after_space = tuple(encode(tokenizer, word, add_special_tokens=False))
        if not first:
            raise InvalidRequestError(f"bad_words: {word!r} has no tokens")
        token_ids[first] = None
        if after_space[-len(first) :] != first:
            token_ids[after_space] = None
    return list(token_ids)


def check_request_options(request_id: object, priority: object, cache_salt: object) -> tuple[str | None, int, str | None]:
    """Check what comes with a prompt; returns it as plain values. Raises InvalidRequestError."""
    return (
        _read_name("request_id", request_id, most=MAX_REQUEST_ID_CHARS),
        fields.whole("priority", priority, least=-(2**63), most=2**63 - 1),
        # An empty one would share with requests that have none, which is not what whoever gives one means.
        _read_name("cache_salt", cache_salt, most=MAX_CACHE_SALT_CHARS),
    )


def _read_name(name: str, value: object, *, most: int) -> str | None:
    if value is None:
        return None
    text = fields.text(f"{name} must be a non-empty string or None", name, value)
    fields.require(len(text) <= most, f"{name} must have at most {most} characters, got {len(text)}")
    return text


async def _run(num_chars: int, encode: Callable[[TextTokenizer, Any], T], tokenizer: TextTokenizer, text: Any) -> T:
    if num_chars <= _MAX_INLINE_CHARS:
        return encode(tokenizer, text)
    return await asyncio.to_thread(encode, tokenizer, text)


def _encode_text(tokenizer: TextTokenizer, prompt: TextPrompt) -> tuple[str, list[int]]:
    check_unicode("the prompt", prompt.text)
    plain = str.__str__(prompt.text)
    return plain, encode(tokenizer, plain, add_special_tokens=prompt.add_special_tokens)


def _encode_chat(tokenizer: TextTokenizer, messages: list[Mapping[str, str]]) -> tuple[str, list[int]]:
    try:
        text = tokenizer.apply_chat_template(messages)
    except InvalidRequestError:
        raise
    except Exception as exc:  # templates refuse conversations (two user turns, an unknown role) with their own exceptions
        raise InvalidRequestError(f"the chat template refused the messages: {exc}") from exc
    check_unicode("the chat prompt", text)
    # The template writes its own special tokens: adding them again would give two beginnings of text.
    return text, encode(tokenizer, text, add_special_tokens=False)


def encode(tokenizer: TextTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids, in whatever thread, without holding the others up. Raises InvalidRequestError."""
    backend = getattr(tokenizer, "backend", None)
    try:
        if backend is None or len(text) <= _MAX_INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # `tokenizers` keeps the GIL while it encodes one text and lets go of it for a batch. Holding it would stop the event
        # loop from whatever thread this runs in: 0.2 s for 200,000 characters.
        token_ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return token_ids
    except Exception as exc:  # of whatever kind a tokenizer raises: it is this request that it cannot take
        raise InvalidRequestError(f"the tokenizer failed on a text of {len(text)} characters: {type(exc).__name__}: {exc}") from exc


def _read_items(prompt: object, *, num_kept: int | None, most: int) -> list[Any]:
    """The items of a list or an array. Of token ids only the last `num_kept` (None: all), and none of far too many: copying
    millions of them takes time.
    """
    is_array = hasattr(prompt, "tolist") and not isinstance(prompt, memoryview)
    if not is_array and (not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes, bytearray, memoryview))):
        hint = ": put the message into a list" if isinstance(prompt, Mapping) else ""
        raise InvalidRequestError(f"the prompt must be text, token ids or chat messages, got {type(prompt).__name__}{hint}")
    given: Any = prompt
    try:
        length = len(given)
        first = given[:1].tolist() if is_array else list(itertools.islice(given, 1))
        if not first:
            raise InvalidRequestError("the prompt is empty")
        if whole(first[0]) is not None:
            if num_kept is None and length > most:
                raise _too_long(length, most)
            if num_kept is not None and (is_array or isinstance(given, (list, tuple, range))):
                given = given[-num_kept:]
        elif is_array:
            raise _wrong_item(first)
        return given.tolist() if is_array else list(given)
    except InvalidRequestError:
        raise
    except Exception as exc:  # of a class of the caller's, or an array without a dimension
        raise InvalidRequestError(f"the prompt, a {type(prompt).__name__}, cannot be read: {type(exc).__name__}: {exc}") from exc


def _too_long(num_tokens: int, most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt has {num_tokens} tokens, but at most {most} fit: max_model_len is {most + 1} and at least one token is generated"
    )


def _wrong_item(items: list[Any]) -> InvalidRequestError:
    index, item = next((index, item) for index, item in enumerate(items) if whole(item) is None)
    return InvalidRequestError(f"the prompt must be text, token ids or chat messages, but item {index} is {type(item).__name__}")


def _check_messages(messages: list[Any]) -> int:
    """Check the shape of chat messages; returns the number of characters in them."""
    num_chars = 0
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f'chat message {index} must be a mapping with "role" and "content", got {type(message).__name__}')
        for key in ("role", "content"):
            if key not in message:
                raise InvalidRequestError(f"chat message {index} has no {key!r}; it has {sorted(map(str, message))}")
            if not isinstance(message[key], str):
                raise InvalidRequestError(f"{key!r} of chat message {index} must be text, got {type(message[key]).__name__}")
        if not message["role"]:
            raise InvalidRequestError(f"'role' of chat message {index} is empty")
        num_chars += len(message["content"])
    return num_chars
