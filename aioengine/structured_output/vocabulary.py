"""The model's vocabulary as llguidance needs it: which bytes each token stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def build_vocabulary(tokenizer: object | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """A trie of the tokens; takes 0.2 s for 49,152 of them.

    tokenizer: has a `backend`, a `tokenizers.Tokenizer`, as the engine's own has; or `token_bytes()`, the bytes of every
        token id (empty: none), beside `encode` and `special_token_ids`.
    vocab_size: of the model. Ids that the tokenizer does not know are never allowed. eos_token_ids: below vocab_size.

    Raises InvalidRequestError if the tokenizer does not tell, or if nothing could end an output.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos_token_ids:
        raise InvalidRequestError("structured outputs need an end-of-sequence token, and the model has none")
    if tokenizer is None:
        raise InvalidRequestError("structured outputs need a tokenizer and this engine has none")
    ending = sorted(eos_token_ids)
    size = max(vocab_size, getattr(tokenizer, "vocab_size", 0))
    backend = getattr(tokenizer, "backend", None)
    try:
        if backend is not None:
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ending)
        if hasattr(tokenizer, "token_bytes"):
            return LLTokenizer(TokenizerWrapper(_TokenBytes(tokenizer, size, ending[0])), eos_token=ending)
    except ValueError as exc:
        raise InvalidRequestError(f"structured outputs cannot be made with this model's tokenizer: {exc}") from exc
    raise InvalidRequestError(
        f"structured outputs need to know the bytes of each token: {type(tokenizer).__name__} has neither `backend` nor `token_bytes()`"
    )


class _TokenBytes:
    """What `TokenizerWrapper` asks a tokenizer for."""

    def __init__(self, tokenizer: Any, size: int, eos_token_id: int) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None
        tokens: list[bytes] = list(tokenizer.token_bytes())
        self.tokens: Sequence[bytes] = tokens + [b""] * (size - len(tokens))
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        token_ids: list[int] = self._encode(text, add_special_tokens=False)
        return token_ids
