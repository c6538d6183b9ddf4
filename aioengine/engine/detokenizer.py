"""Token ids to text, one token at a time: no half characters, and stop strings found wherever the token borders fall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from aioengine.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 bytes wait for the rest of theirs. Byte-level tokenizers decode
# those to one replacement character, byte-fallback ones to one a byte.
_MAX_HELD = 3
# Tokens of left context: enough for a character's bytes and for decoders that treat the first token in a special way.
_CONTEXT = 6
_MAX_WINDOW = 4 * _CONTEXT


class TextTokenizer(Protocol):
    """What the engine asks of a tokenizer; `aioengine.models.tokenizer.Tokenizer` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...


class IncrementalDecoder:
    """Decodes a growing token sequence; the pieces it returns add up to the text.

    A short window of the latest tokens is decoded again for each new token, and what goes beyond the characters already
    returned is new. Replacement characters at the end are kept back: the bytes behind them may still become a
    character. `flush()` returns them once no token can follow. The window starts in the prompt, so that a continuation
    keeps its leading space with tokenizers that drop the first one of a text.

    Why not `tokenizers.DecodeStream`: it has no flush, so the bytes of an unfinished character are lost at the end, and
    it raises when the text of earlier tokens changes, as it does with byte-fallback vocabularies after an invalid byte.
    Such text cannot be taken back once it was returned; here the decoder starts a new window after it.
    """

    __slots__ = ("_emitted", "_skip", "_skip_special_tokens", "_stable", "_tokenizer", "_window")

    def __init__(self, tokenizer: TextTokenizer, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._window: list[int] = [t for t in prompt_token_ids[-_CONTEXT:] if t not in self._skip]
        self._stable = self._decode(self._window)  # the window's text as far as it has been returned
        self._emitted = len(self._stable)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that it completes, which may be empty."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._stable):
            self._window = [token_id]
            self._stable, self._emitted = "", 0
            text = self._decode(self._window)
        end = max(self._emitted, len(text) - _num_held(text))
        piece = text[self._emitted : end]
        self._emitted = end
        self._stable = text[:end]
        if len(self._window) > _MAX_WINDOW:
            self._shorten_window(text[end:])
        return piece

    def flush(self) -> str:
        """Return what was kept back; no token may follow."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens) if token_ids else ""

    def _shorten_window(self, held: str) -> None:
        """Forget all but the last tokens, if the text kept back is the same without the forgotten ones."""
        window = self._window[-_CONTEXT:]
        text = self._decode(window)
        end = len(text) - len(held)
        if end > 0 and text[end:] == held:
            self._window, self._stable, self._emitted = window, text[:end], end


def _num_held(text: str) -> int:
    tail = text[-_MAX_HELD:]
    return len(tail) - len(tail.rstrip(_REPLACEMENT))


class Detokenizer:
    """The text of one request as the user may see it, and the end of it where a stop string says so.

    A stop string is found as soon as its last character is there, so the result does not depend on how the text is cut
    into tokens. Of two that end at the same character the longer one counts. A suffix of the text is kept back only
    while it is the beginning of a stop string. A stop string counts if the token that completes it is not among the
    first `min_tokens`.
    """

    __slots__ = ("_decoder", "_include_stop", "_min_tokens", "_num_tokens", "_stop", "_text", "_visible")

    def __init__(self, tokenizer: TextTokenizer, *, prompt_token_ids: Sequence[int], sampling_params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=sampling_params.skip_special_tokens
        )
        self._stop = sampling_params.stop_strings
        self._include_stop = sampling_params.include_stop_str_in_output
        self._min_tokens = sampling_params.min_tokens
        self._num_tokens = 0
        self._text = ""
        self._visible = 0  # characters of it that can no longer turn out to belong to a stop string

    @property
    def text(self) -> str:
        """The text so far, without what may still become a stop string or a character."""
        return self._text[: self._visible]

    def push(self, token_id: int) -> str | None:
        """Add one output token; return the stop string that it completes, if any. Nothing may be pushed after one."""
        self._num_tokens += 1
        return self._append(self._decoder.push(token_id))

    def finish(self) -> str | None:
        """No token follows: show everything that was kept back, unless a stop string appears in it (then return that)."""
        stop = self._append(self._decoder.flush())
        if stop is None:
            self._visible = len(self._text)
        return stop

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        old_length = len(self._text)
        self._text += piece
        if self._stop and self._num_tokens > self._min_tokens:
            match = find_stop_string(self._text, self._stop, new_from=old_length)
            if match is not None:
                stop, start = match
                self._visible = start + (len(stop) if self._include_stop else 0)
                self._text = self._text[: self._visible]
                return stop
        held = 0 if self._include_stop else _num_held_for_stop(self._text, self._stop)
        # A stop string that ended within the first min_tokens is plain text by now, so what is shown stays shown.
        self._visible = max(self._visible, len(self._text) - held)
        return None


def find_stop_string(text: str, stop: Sequence[str], *, new_from: int) -> tuple[str, int] | None:
    """The stop string whose last character comes first at or after `new_from`, and where it starts; None: there is none."""
    best: tuple[int, int, str] | None = None
    for candidate in stop:
        start = text.find(candidate, max(0, new_from - len(candidate) + 1))
        if start >= 0:
            found = (start + len(candidate), start, candidate)
            if best is None or found[:2] < best[:2]:
                best = found
    return None if best is None else (best[2], best[1])


def _num_held_for_stop(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that a stop string begins with."""
    first = len(text)
    for candidate in stop:
        start = text.find(candidate[0], max(0, len(text) - len(candidate) + 1))
        while 0 <= start < first:
            if candidate.startswith(text[start:]):
                first = start
                break
            start = text.find(candidate[0], start + 1)
    return len(text) - first
