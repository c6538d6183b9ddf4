"""How far the output of one request has got in its grammar, and what may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aioengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_MESSAGE_CHARS = 600


class GrammarError(Exception):
    """A grammar cannot go on: it took too much work, or has no next token in this vocabulary. Ends its request, no other."""


class CompiledGrammar:
    """A grammar at its beginning, shared by all requests that use it; never advanced itself."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], *, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self.eos_bits = _bits(eos_token_ids)
        self.num_mask_bytes = num_mask_bytes

    def start(self, params: SamplingParams) -> GrammarMatcher:
        """A matcher of its own for one request."""
        return GrammarMatcher(self._matcher.deep_copy(), self, params)


class GrammarMatcher:
    """Owned by one request. A mask is bytes: token i is bit i % 8 of byte i // 8, and 1 allows it.

    Once the output is complete, because an end-of-sequence token was taken or because nothing can be added, the grammar
    is at rest: only end-of-sequence tokens are allowed, and whatever is sampled then (`ignore_eos` goes on) changes nothing.

    Before `min_tokens`, tokens that would end the output are left out of the mask as long as anything else is allowed.
    Where the grammar allows nothing else, it wins: an output that matches is worth more than one that is long enough.
    """

    def __init__(self, matcher: LLMatcher, grammar: CompiledGrammar, params: SamplingParams) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self._min_tokens = params.min_tokens
        self._ending_bits = (grammar.eos_bits | _bits(params.stop_token_ids)) if params.min_tokens else 0
        self._num_tokens = 0
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Nothing can be added any more. False does not mean that the output does not match yet."""
        return self._is_complete

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in sampled tokens. One that does not match, which the mask rules out, makes `bitmask` raise from then on."""
        self._num_tokens += len(token_ids)
        for token_id in token_ids:
            if self._is_complete or not self._matcher.consume_token(token_id):
                return
            self._is_complete = self._matcher.is_stopped()

    def bitmask(self) -> bytes:
        """What may come next. Raises GrammarError, also where that is nothing."""
        grammar = self._grammar
        if self._is_complete:
            return grammar.eos_bits.to_bytes(grammar.num_mask_bytes, "little")
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the mask of a matcher in error allows the end
            raise GrammarError(explain(self._matcher.get_error()))
        if self._num_tokens >= self._min_tokens:
            return mask
        allowed = int.from_bytes(mask, "little")
        for ending in (self._ending_bits, grammar.eos_bits):
            if rest := allowed & ~ending:
                return rest.to_bytes(len(mask), "little")
        return mask


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
    return "no token of the vocabulary can come next" if text in ("", "NoExtension", "NoExtensionBias") else text


def _bits(token_ids: Iterable[int]) -> int:
    bits = 0
    for token_id in token_ids:
        bits |= 1 << token_id
    return bits
