"""Random prompts of an exact length, also after their text has been tokenized again.

Decoding random ids and encoding the text rarely gives as many ids back: neighbours merge, and half characters become
other ones. So tokens are drawn from those that survive the round trip alone, and a prompt is mended until it survives as
a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import ConfigError

_NUM_CANDIDATES = 2048
_MAX_ROUNDS = 64


class RandomPrompts:
    """Draws prompts for one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int, random: Random) -> None:
        self._tokenizer = tokenizer
        self._random = random
        self._candidates = self._find_candidates(vocab_size)

    def _find_candidates(self, vocab_size: int) -> list[int]:
        ids = range(vocab_size)
        sample = self._random.sample(ids, min(len(ids), 2 * _NUM_CANDIDATES))
        stable = [
            token_id for token_id in sample if token_id not in self._tokenizer.special_token_ids and self._encode([token_id]) == [token_id]
        ]
        # A token that begins with a space and goes on with letters never merges with what stands before it.
        words = [token_id for token_id in stable if self._tokenizer.decode([token_id])[1:].isalpha()]
        candidates = [token_id for token_id in words if self._tokenizer.decode([token_id])[0] == " "] or stable
        if not candidates:
            raise ConfigError("the tokenizer has no token that survives decoding and encoding: random prompts cannot be made")
        return candidates[:_NUM_CANDIDATES]

    def _encode(self, token_ids: Sequence[int]) -> list[int]:
        return self._tokenizer.encode(self._tokenizer.decode(token_ids), add_special_tokens=False)

    def make(self, length: int) -> list[int]:
        """`length` random tokens whose text has exactly that many. Raises ConfigError if none can be found."""
        return self.extend([], length)

    def extend(self, prefix: Sequence[int], length: int) -> list[int]:
        """`prefix`, unchanged, and `length` random tokens."""
        total = len(prefix) + length
        tail = self._draw(length)
        for _ in range(_MAX_ROUNDS):
            token_ids = [*prefix, *tail]
            again = self._encode(token_ids)
            if again == token_ids:
                return token_ids
            # What came back is a better start than new dice, as far as the prefix has survived.
            kept = again[len(prefix) : total] if again[: len(prefix)] == list(prefix) else []
            tail = kept + self._draw(length - len(kept))
        raise ConfigError(f"found no random prompt of exactly {total} tokens in {_MAX_ROUNDS} tries")

    def _draw(self, num_tokens: int) -> list[int]:
        return self._random.choices(self._candidates, k=num_tokens)
