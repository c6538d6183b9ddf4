"""Token ids to text, one token at a time: no half characters, and stop strings found wherever the token borders fall."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from aioengine.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 bytes wait for the rest of theirs. Byte-level tokenizers decode
# those to one replacement character, byte-fallback ones to one a byte, and to one more for a byte before them that shows as
# nothing by itself: the space that such a decoder takes from the beginning of a text.
_MAX_HELD = 4
# Tokens of left context: enough for a character's bytes and for decoders that treat the first token in a special way.
_CONTEXT = 6
_MAX_WINDOW = 2 * _CONTEXT  # decoding takes time by the token, and shortening takes a decoding


class TextTokenizer(Protocol):
    """What the engine asks of a tokenizer; `aioengine.checkpoint.tokenizer.Tokenizer` is one."""

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

    spaces_between_special_tokens: False takes away the space that some decoders put before a special token which follows
    another one.

    Why not `tokenizers.DecodeStream`: it has no flush, so the bytes of an unfinished character are lost at the end, and
    it raises when the text of earlier tokens changes, as it does with byte-fallback vocabularies after an invalid byte.
    Such text cannot be taken back once it was returned; here the decoder starts a new window after it.
    """

    __slots__ = ("_emitted", "_join", "_last_is_special", "_skip", "_skip_special_tokens", "_stable", "_tokenizer", "_window", "num_held")

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self.num_held = 0  # characters kept back
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._join = frozenset() if skip_special_tokens or spaces_between_special_tokens else tokenizer.special_token_ids
        self._last_is_special = False
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
        self.num_held = len(text) - end
        if len(self._window) > _MAX_WINDOW:
            self._shorten_window(text[end:])
        return self._without_space(piece, token_id) if self._join else piece

    def skipped_text(self, token_id: int) -> str:
        """What a special token that is left out of the text looks like; empty for others."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if token_id in self._skip else ""

    def _without_space(self, piece: str, token_id: int) -> str:
        follows_special, self._last_is_special = self._last_is_special, token_id in self._join
        return piece.removeprefix(" ") if follows_special and self._last_is_special else piece

    def flush(self) -> str:
        """Return what was kept back; no token may follow."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        self.num_held = 0
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

    A special token that `skip_special_tokens` leaves out counts where its text is, or is a part of, a stop string: it is hidden in
    the text then, which is to say never shown, unless `include_stop_str_in_output` shows the stop string that it belongs to.

    Only the end of the text is kept here, as much as a stop string may reach back, so a token costs the same however
    long the text is. A token is visible when its last character is.
    """

    __slots__ = (
        "_decoder",
        "_hidden",
        "_include_stop",
        "_max_stop_len",
        "_min_tokens",
        "_new",
        "_num_chars",
        "_num_tokens",
        "_num_visible",
        "_num_visible_tokens",
        "_stop",
        "_tail",
        "_token_ends",
    )

    def __init__(self, tokenizer: TextTokenizer, *, prompt_token_ids: Sequence[int], sampling_params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=sampling_params.skip_special_tokens,
            spaces_between_special_tokens=sampling_params.spaces_between_special_tokens,
        )
        self._stop = sampling_params.stop_strings
        self._max_stop_len = max(map(len, self._stop), default=0)
        self._include_stop = sampling_params.include_stop_str_in_output
        self._min_tokens = sampling_params.min_tokens
        self._tail = ""  # the end of the text: what is not visible, and what a stop string may begin in
        self._hidden: deque[tuple[int, int]] = deque()  # from where to where in the text special tokens are hidden, if not shown yet
        self._num_chars = 0  # of the text, what is hidden in it included
        self._num_visible = 0  # characters of it that can no longer turn out to belong to a stop string
        self._new: list[str] = []  # visible, not taken
        self._num_tokens = 0
        self._num_visible_tokens = 0  # not taken
        self._token_ends: deque[int] = deque()  # for each token that is not visible: characters up to its last one

    def take(self) -> tuple[str, int]:
        """What became visible since the last call: text, and how many tokens."""
        text = self._new[0] if len(self._new) == 1 else "".join(self._new)
        self._new.clear()
        num_tokens, self._num_visible_tokens = self._num_visible_tokens, 0
        return text, num_tokens

    def push(self, token_id: int) -> str | None:
        """Add one output token; return the stop string that it completes, if any. Nothing may be pushed after one."""
        self._num_tokens += 1
        piece = self._decoder.push(token_id)
        if not piece and self._stop:
            hidden = self._decoder.skipped_text(token_id)
            if hidden and any(hidden in stop for stop in self._stop):
                self._hidden.append((self._num_chars, self._num_chars + len(hidden)))
                piece = hidden
        stop = self._append(piece) if piece else None
        end = self._num_chars + self._decoder.num_held
        if stop is not None or self._num_visible >= end:
            self._num_visible_tokens += 1 + len(self._token_ends)
            self._token_ends.clear()
        else:
            self._token_ends.append(end)
            while self._token_ends[0] <= self._num_visible:
                self._token_ends.popleft()
                self._num_visible_tokens += 1
        return stop

    def finish(self) -> str | None:
        """No token follows: show everything that was kept back, unless a stop string appears in it (then return that)."""
        piece = self._decoder.flush()
        stop = self._append(piece) if piece else None
        if stop is None:
            self._show_up_to(self._num_chars)
        self._num_visible_tokens += len(self._token_ends)
        self._token_ends.clear()
        return stop

    def _append(self, piece: str) -> str | None:
        self._num_chars += len(piece)
        if not self._stop:
            self._num_visible = self._num_chars
            self._new.append(piece)
            return None
        old_length = len(self._tail)
        self._tail += piece
        if self._num_tokens > self._min_tokens:
            match = find_stop_string(self._tail, self._stop, new_from=old_length)
            if match is not None:
                stop, start = match
                start += self._num_chars - len(self._tail)
                self._show_up_to(start)
                if self._include_stop:
                    self._hidden.clear()
                    self._show_up_to(start + len(stop))
                return stop
        may_show = self._include_stop and not self._hidden  # what is hidden is shown if it turns out to belong to a stop string
        held = 0 if may_show else _num_held_for_stop(self._tail, self._stop)
        self._show_up_to(self._num_chars - held)
        self._tail = self._tail[-max(held, self._max_stop_len - 1, 1) :]
        return None

    def _show_up_to(self, num_chars: int) -> None:
        """Make the text visible up to there. What is visible stays visible: a stop string in the first min_tokens is text."""
        offset = self._num_chars - len(self._tail)  # where the tail begins in the text
        while self._hidden and self._hidden[0][0] < num_chars:
            start, end = self._hidden[0]
            self._show_piece(start, offset)
            self._num_visible = max(self._num_visible, min(end, num_chars))
            if end > num_chars:
                return
            self._hidden.popleft()
        self._show_piece(num_chars, offset)

    def _show_piece(self, num_chars: int, offset: int) -> None:
        if num_chars > self._num_visible:
            self._new.append(self._tail[self._num_visible - offset : num_chars - offset])
            self._num_visible = num_chars


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
