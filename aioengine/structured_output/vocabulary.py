"""The model's vocabulary as llguidance needs it: which bytes each token stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPECIAL_TOKEN_MARKER = b"\xff"
"""What llguidance puts before special tokens where it has them among bytes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """trie: the tokens as llguidance has them. misread: ids that are never allowed, as their text is not the bytes that `trie`
    has for them, or as the model has no logits for them.
    """

    trie: LLTokenizer
    misread: frozenset[int] = frozenset()

    def tokens_of(self, text: bytes) -> list[int] | None:
        """The tokens that the tokenizer writes `text` in, if they stand for it byte by byte; None if they do not.

        They need not: where the text spells a special token it finds that one, and a normalizer may write another text.
        """
        token_ids: list[int] = self.trie.tokenize_bytes(text)
        if not all(self._is_text(token_id) for token_id in token_ids) or self.trie.decode_bytes(token_ids) != text:
            return None
        return token_ids

    def spell(self, text: bytes) -> list[int]:
        """`text` in the longest tokens that stand for its next bytes; cut off where there is none."""
        spelled: list[int] = []
        place = 0
        for token_id in self._greedy(text):
            piece = self.trie.decode_bytes([token_id])
            if not self._is_text(token_id) or not text.startswith(piece, place):
                # One of the tokens that may not be used: a shorter one has to do, and the rest begins elsewhere.
                return spelled + self._shorter(text[place : place + len(piece) - 1])
            spelled.append(token_id)
            place += len(piece)
        return spelled

    def _greedy(self, text: bytes) -> list[int]:
        try:
            start = text.decode()
        except UnicodeDecodeError as exc:
            start = text[: exc.start].decode()
        # The rest of a character whose first bytes are written already is no text; then the trie is asked all the same.
        token_ids: list[int] = self.trie.greedy_tokenize(start) if start else self.trie.tokenize_bytes(_rest_of_character(text))
        return token_ids

    def _shorter(self, text: bytes) -> list[int]:
        """The longest token that begins `text` and may be used; none, if there is none."""
        for end in range(len(text), 0, -1):
            for token_id in self._greedy(text[:end])[:1]:
                if self._is_text(token_id) and text.startswith(self.trie.decode_bytes([token_id])):
                    return [token_id]
        return []

    def _is_text(self, token_id: int) -> bool:
        return not self.trie.is_special_token(token_id) and token_id not in self.misread


def build_vocabulary(tokenizer: object | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """A trie of the tokens; takes 0.2 s for 49,152 of them.

    tokenizer: has a `backend`, a `tokenizers.Tokenizer`, as the engine's own has; or `token_bytes()`, the bytes of every
        token id (empty: none), beside `encode` and `special_token_ids`.
    vocab_size: of the model. Ids that only one of tokenizer and model knows are never allowed. eos_token_ids: below vocab_size.

    Raises InvalidRequestError if the tokenizer does not tell, or if nothing could end an output.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos_token_ids:
        raise InvalidRequestError("structured outputs need an end-of-sequence token, and the model has none")
    if tokenizer is None:
        raise InvalidRequestError("structured outputs need a tokenizer and this engine has none")
    ending = sorted(eos_token_ids)
    size = max(vocab_size, getattr(tokenizer, "vocab_size", 0))
    beyond = frozenset(range(vocab_size, size))
    backend: Any = getattr(tokenizer, "backend", None)
    try:
        if backend is not None:
            trie = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ending)
            return Vocabulary(trie, _misread_tokens(trie, backend) | beyond)
        if hasattr(tokenizer, "token_bytes"):
            return Vocabulary(LLTokenizer(TokenizerWrapper(_TokenBytes(tokenizer, size, ending[0])), eos_token=ending), beyond)
    except ValueError as exc:
        raise InvalidRequestError(f"structured outputs cannot be made with this model's tokenizer: {exc}") from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # how a failed assertion of Rust code arrives, past `Exception`
            raise
        raise InvalidRequestError(f"structured outputs cannot be made with this model's tokenizer: {exc}") from exc
    raise InvalidRequestError(
        f"structured outputs need to know the bytes of each token: {type(tokenizer).__name__} has neither `backend` nor `token_bytes()`"
    )


def _misread_tokens(trie: LLTokenizer, backend: Any) -> frozenset[int]:
    """Added tokens whose text is not the bytes in the trie: they are no part of the model's own alphabet of bytes."""
    before = next((i for i in backend.encode("a", add_special_tokens=False).ids if not trie.is_special_token(i)), None)
    if before is None:
        return frozenset()
    text_before = backend.decode([before])  # some decoders drop a space at the beginning of a text
    misread = set()
    for token_id in backend.get_added_tokens_decoder():
        if not trie.is_special_token(token_id):
            text = backend.decode([before, token_id], skip_special_tokens=False)
            if text != text_before + trie.decode_bytes([token_id]).decode(errors="replace"):
                misread.add(token_id)
    return frozenset(misread)


def _rest_of_character(text: bytes) -> bytes:
    """The bytes at the beginning of `text` that continue a character."""
    length = 1
    while length < len(text) and text[length] & 0xC0 == 0x80:
        length += 1
    return text[:length]


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
