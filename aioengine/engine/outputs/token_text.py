"""What each token is by itself: its text, and its bytes, of which a piece of a character is no text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.outputs import Logprob, TokenLogprobs

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText(NamedTuple):
    text: str
    bytes: bytes | None  # None: the tokenizer does not tell


class TokenTexts:
    """Of one tokenizer, each looked up once. Keeps two short strings a token that was asked for."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._all_bytes: Sequence[bytes] | None = None
        # A `tokenizers.Tokenizer`, as the engine's own tokenizer has; else one that knows its bytes, as for structured outputs.
        self._backend: Any = getattr(tokenizer, "backend", None)
        if self._backend is None and callable(tokens := getattr(tokenizer, "token_bytes", None)):
            self._all_bytes = tokens()
        self._added: dict[int, Any] = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self._decoders = _decoder_types(self._backend)

    def of(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def fill_in(self, entries: Sequence[TokenLogprobs]) -> None:
        """Give the entries, which are as they came from the worker, their texts: 10,000 take three milliseconds of the loop.

        Into the entries themselves: building others would take several times as long.
        """
        known, look_up = self._known, self.of
        set_text, set_bytes = _slot(Logprob, "decoded_token"), _slot(Logprob, "token_bytes")
        for row in entries:
            for token_id, entry in row.items():
                text, data = known.get(token_id) or look_up(token_id)
                set_text(entry, text)
                set_bytes(entry, data)

    def _look_up(self, token_id: int) -> TokenText:
        try:
            data = self._bytes_of(token_id)
            if data is not None:
                return TokenText(data.decode(errors="replace"), data)
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        except Exception:  # an id without a token, or whatever a tokenizer cannot do: it is not worth a request
            return TokenText("", None)
        return TokenText(text, None if _REPLACEMENT in text else text.encode())

    def _bytes_of(self, token_id: int) -> bytes | None:
        if self._all_bytes is not None:
            return self._all_bytes[token_id]
        if self._backend is None:
            return None
        if token_id in self._added:
            added: str = self._added[token_id].content
            return added.encode()
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # of a vocabulary that was padded
        if "ByteLevel" in self._decoders:
            return _from_byte_level(token)
        if "ByteFallback" in self._decoders and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        if self._decoders & {"Metaspace", "Replace"}:
            return token.replace("\u2581", " ").encode()
        return None


def _decoder_types(backend: Any) -> frozenset[str]:
    """The kinds of steps that a `tokenizers.Tokenizer` decodes by."""
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())  # what pickling writes: JSON of this decoder alone, not of the vocabulary
    steps = state.get("decoders", [state])
    return frozenset(step.get("type", "") for step in steps)


def _from_byte_level(token: str) -> bytes | None:
    """GPT-2's alphabet, in which every byte is a printable character. None if the token holds another one."""
    data = bytearray()
    for character in token:
        code = ord(character)
        if 33 <= code <= 126 or 161 <= code <= 172 or 174 <= code <= 255:
            data.append(code)
        elif 256 <= code < 256 + len(_SHIFTED):
            data.append(_SHIFTED[code - 256])
        else:
            return None
    return bytes(data)


# The bytes without a printable character of their own, in order: they are written as the characters from 256 on.
_SHIFTED = (*range(33), *range(127, 161), 173)


def _slot(cls: type, name: str) -> Callable[[object, object], None]:
    """Writes a slot of a frozen dataclass."""
    setter: Callable[[object, object], None] = cls.__dict__[name].__set__
    return setter
