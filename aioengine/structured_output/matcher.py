"""How far the output of one request has got in its grammar, and what may come next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aioengine.sampling_params import SamplingParams
from aioengine.structured_output.vocabulary import SPECIAL_TOKEN_MARKER, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

NO_NEXT_TOKEN = "no token of the vocabulary can come next"

MAX_MASK_S = 1.0
"""Seconds of a processor's time. All requests of a step wait for a mask, so a grammar that takes longer ends its own."""

_LONG_TEXT_BYTES = 512
_REST_BYTES = 64
"""A longer text without alternatives is cut into tokens once, but for its last bytes, whose tokens depend on what follows."""

_MAX_MESSAGE_CHARS = 600


class GrammarError(Exception):
    """A grammar cannot go on: it took too much work, or has no next token in this vocabulary. Ends its request, no other."""


class CompiledGrammar:
    """A grammar at its beginning, shared by all requests that use it; never advanced itself."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], *, num_mask_bytes: int, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self.vocabulary = vocabulary
        self.eos_bits = _bits(eos_token_ids)
        self.misread_bits = _bits(vocabulary.misread)
        self.num_mask_bytes = num_mask_bytes

    def start(self, params: SamplingParams) -> GrammarMatcher:
        """A matcher of its own for one request."""
        return GrammarMatcher(self._matcher.deep_copy(), self, params)


class GrammarMatcher:
    """Owned by one request. A mask is bytes: token i is bit i % 8 of byte i // 8, and 1 allows it.

    Once the output is complete, because an end-of-sequence token was taken or because nothing can be added, the grammar
    is at rest: only end-of-sequence tokens are allowed, and whatever is sampled then (`ignore_eos` goes on) changes nothing.

    Before `min_tokens`, tokens that would end the output are left out of the mask as long as anything else is allowed, here
    and by `allowed_token_ids` and `bad_words`. Where nothing else is, the grammar wins: an output that matches is worth more
    than one that is long enough.
    """

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar, params: SamplingParams) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._params = params
        self._min_tokens = params.min_tokens
        self._ending_bits = (grammar.eos_bits | _bits(params.stop_token_ids)) if params.min_tokens else 0
        self._token_ids: list[int] = []
        self._is_complete = False
        self._error: str | None = None
        self._written_as_is = b""  # forced text that the tokenizer was seen to write as it is
        self._planned: deque[int] = deque()  # the next tokens, of a long forced text

    @property
    def is_complete(self) -> bool:
        """Nothing can be added any more. False does not mean that the output does not match yet."""
        return self._is_complete

    @property
    def error(self) -> str | None:
        """Why the output does not match and never will."""
        return self._error

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Take in sampled tokens. Returns why the output does not match any more, if it does not; `bitmask` raises then."""
        for token_id in token_ids:
            if self._is_complete or self._error is not None:
                break
            self._token_ids.append(token_id)
            if self._planned and self._planned.popleft() != token_id:
                self._planned.clear()
            if not self._matcher.consume_token(token_id):
                self._error = explain(self._matcher.get_error())
            elif self._matcher.is_stopped():
                self._is_complete = True
            elif self._ends_request(token_id) and not self._matcher.is_accepting():
                self._error = f"the grammar asks for more behind the end-of-sequence token {token_id}, which ends a request"
        return self._error

    def bitmask(self) -> bytes:
        """What may come next. Raises GrammarError, also where that is nothing."""
        grammar = self._grammar
        if self._error is not None:
            raise GrammarError(self._error)
        if self._is_complete:
            return grammar.eos_bits.to_bytes(grammar.num_mask_bytes, "little")
        if self._planned:
            return self._only(self._planned[0])
        start = time.thread_time()
        mask = self._matcher.compute_bitmask()
        forced = self._matcher.compute_ff_bytes()
        if self._matcher.is_error():  # the mask of a matcher in error allows the end
            raise GrammarError(explain(self._matcher.get_error()))
        if (duration := time.thread_time() - start) > MAX_MASK_S:
            raise GrammarError(f"it took {duration:.1f} s to find out what may come next, at most {MAX_MASK_S:g} s are given")
        if forced:
            mask = self._as_written(mask, forced)
        if grammar.misread_bits:
            mask = self._without_misread(mask)
        return mask if len(self._token_ids) >= self._min_tokens else self._without_ending(mask)

    def _ends_request(self, token_id: int) -> bool:
        return not self._params.ignore_eos and bool(self._grammar.eos_bits >> token_id & 1)

    def _as_written(self, mask: bytes, forced: bytes) -> bytes:
        """The mask where the grammar leaves only one text: it allows the token by which the tokenizer begins that text.

        If the tokenizer writes something else, such as the special token that the text spells, that mask is wrong.
        """
        text = forced.partition(SPECIAL_TOKEN_MARKER)[0]  # a special token that the grammar itself asks for is none of this
        if not text or self._written_as_is.endswith(text):
            return mask
        vocabulary = self._grammar.vocabulary
        token_ids = vocabulary.tokens_of(text)
        if token_ids is not None:
            self._written_as_is = text
            if len(text) <= _LONG_TEXT_BYTES:
                return mask
        else:
            token_ids = vocabulary.spell(text)
            if not token_ids:
                raise GrammarError(NO_NEXT_TOKEN)
        if len(text) > _LONG_TEXT_BYTES:
            self._plan(token_ids, num_bytes=len(text) - _REST_BYTES)
        return self._only(token_ids[0])

    def _plan(self, token_ids: Sequence[int], *, num_bytes: int) -> None:
        for token_id in token_ids:
            num_bytes -= len(self._grammar.vocabulary.trie.decode_bytes([token_id]))
            if num_bytes < 0:
                break
            self._planned.append(token_id)

    def _only(self, token_id: int) -> bytes:
        return (1 << token_id).to_bytes(self._grammar.num_mask_bytes, "little")

    def _without_misread(self, mask: bytes) -> bytes:
        rest = int.from_bytes(mask, "little") & ~self._grammar.misread_bits
        if not rest:
            raise GrammarError(NO_NEXT_TOKEN)
        return rest.to_bytes(len(mask), "little")

    def _without_ending(self, mask: bytes) -> bytes:
        allowed = int.from_bytes(mask, "little")
        permitted = allowed & self._permitted_bits()
        for ending in (self._ending_bits, self._grammar.eos_bits):
            if permitted & ~ending:
                return (allowed & ~ending).to_bytes(len(mask), "little")
        return mask

    def _permitted_bits(self) -> int:
        """What the request's own masks leave. The worker applies them; here they only tell whether anything is left."""
        params = self._params
        bits = -1 if params.allowed_token_ids is None else _bits(params.allowed_token_ids)
        for *start, last in params.bad_words_token_ids:
            if not start or self._token_ids[-len(start) :] == start:
                bits &= ~(1 << last)
        return bits


def explain(error: str) -> str:
    """llguidance's message without the dump of its state; "NoExtension" and the like, its names for reasons, in words."""
    lines: list[str] = []
    for line in error.strip().splitlines():
        if line.startswith("<"):
            break
        lines.append(line.rstrip())
    text = "\n".join(lines).strip()
    if len(text) > _MAX_MESSAGE_CHARS:  # it quotes the grammar
        text = f"{text[: _MAX_MESSAGE_CHARS // 2]} ... {text[-_MAX_MESSAGE_CHARS // 2 :]}"
    return NO_NEXT_TOKEN if text in ("", "NoExtension", "NoExtensionBias") else text


def _bits(token_ids: Iterable[int]) -> int:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits
