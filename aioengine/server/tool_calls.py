"""Tool calls out of a model's text, piece by piece: each character goes out as soon as it is known what it belongs to."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_ID_ALPHABET = string.ascii_letters + string.digits


class TextPiece(NamedTuple):
    """Of the answer's text."""

    text: str


class CallStart(NamedTuple):
    """The beginning of the call with this number."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next part of a call's arguments; all of them add up to JSON, if nothing cuts the answer off."""

    number: int
    text: str


Piece = TextPiece | CallStart | CallArguments
MakeId = Callable[[], str]


class AnswerParser(Protocol):
    """Takes the text as it comes. `finish` gives what was held back."""

    @property
    def num_calls(self) -> int: ...

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


class TextOnly:
    """Without tools everything is text."""

    num_calls = 0

    def push(self, text: str) -> list[Piece]:
        return [TextPiece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class NamedCall:
    """The text is the arguments of one call, by a grammar."""

    def __init__(self, name: str, make_id: MakeId) -> None:
        self.num_calls = 0
        self._name = name
        self._make_id = make_id

    def push(self, text: str) -> list[Piece]:
        start: list[Piece] = []
        if not self.num_calls:
            self.num_calls = 1
            start = [CallStart(0, self._make_id(), self._name)]
        return [*start, CallArguments(0, text)] if text else start

    def finish(self) -> list[Piece]:
        return self.push("")


class ListedCalls:
    """The text is a list of calls, by a grammar."""

    def __init__(self, names: Collection[str], make_id: MakeId) -> None:
        self._scanner = CallScanner(names, make_id)

    @property
    def num_calls(self) -> int:
        return self._scanner.num_calls

    def push(self, text: str) -> list[Piece]:
        return self._scanner.feed(text)[0]

    def finish(self) -> list[Piece]:
        return []


class CallScanner:
    """Reads `{"name": ..., "arguments": {...}}`, or a list of such objects, and gives the arguments out as they come.

    names: what may be called; an object that calls something else is none of ours. first_number: the number of the first call.
    name: the text is the arguments alone, of this call.
    """

    def __init__(self, names: Collection[str], make_id: MakeId, *, first_number: int = 0, name: str | None = None) -> None:
        self.done = False
        self.failed = False
        self.num_calls = 0  # that have begun
        self._names = names
        self._make_id = make_id
        self._first_number = first_number
        self._pieces: list[Piece] = []
        self._key: Any = None
        self._raw: list[str] = []  # of the key or the value that is being read
        self._in_list = False
        self._is_bare = name is not None
        self._state: Callable[[str], bool] = self._at_start if name is None else self._before_value
        self._begin_object()
        if name is not None:
            self._key = "arguments"
            self._set_name(name)

    def feed(self, text: str) -> tuple[list[Piece], int]:
        """What came of `text`, and how many of its characters were read: fewer where the calls end, or make no sense."""
        position = 0
        while position < len(text) and not (self.done or self.failed):
            if self._state(text[position]):
                position += 1
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces, position

    # ------------------------------------------------------------------ states: take a character, or go on and leave it
    def _at_start(self, char: str) -> bool:
        if char == "[":
            self._in_list, self._state = True, self._in_between
        elif char == "{":
            self._state = self._in_object
        elif char not in _SPACE:
            self.failed = True
        return not self.failed

    def _in_between(self, char: str) -> bool:
        if char == "{":
            self._begin_object()
            self._state = self._in_object
        elif char == "]":
            self.done = True
        elif char != "," and char not in _SPACE:
            self.failed = True
        return not self.failed

    def _in_object(self, char: str) -> bool:
        if char == '"':
            self._raw, self._state = [char], self._in_key
        elif char == "}":
            self._end_object()
        elif char != "," and char not in _SPACE:
            self.failed = True
        return not self.failed

    def _in_key(self, char: str) -> bool:
        self._raw.append(char)
        if self._string_ends(char):
            self._key = _loads("".join(self._raw))
            self._state = self._before_colon
        return True

    def _before_colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._before_value
        elif char not in _SPACE:
            self.failed = True
        return not self.failed

    def _before_value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        self._raw, self._depth = [], 0
        self._is_text = char == '"'
        self._is_scalar = not self._is_text and char not in "{["
        if self._is_bare and char != "{":
            self.failed = True
            return False
        # Arguments that are a text hold JSON: they are read at their end.
        self._is_passed_on = self._key in _ARGUMENT_KEYS and not self._is_text
        self._in_string = self._is_escaped = False
        self._state = self._in_value
        return False

    def _in_value(self, char: str) -> bool:
        if self._is_scalar and (char in ",}]" or char in _SPACE):
            self._end_value()
            return False
        if self._is_passed_on:
            self._arguments.append(char)
        else:
            self._raw.append(char)
        if self._in_string:
            self._in_string = not self._string_ends(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if not self._is_scalar and not self._in_string and self._depth == 0:
            self._end_value()
        return True

    def _string_ends(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        else:
            return char == '"'
        return False

    # ------------------------------------------------------------------ what they found
    def _begin_object(self) -> None:
        self._name: str | None = None
        self._key, self._raw = None, []
        self._arguments: list[str] = []  # not given out yet
        self._has_arguments = False
        self._in_string = self._is_escaped = False

    def _end_value(self) -> None:
        self._state = self._in_object
        if self._key == "name":
            self._set_name(_loads("".join(self._raw)))
        elif self._key in _ARGUMENT_KEYS:
            self._has_arguments = True
            if self._is_text:
                text = _loads("".join(self._raw))
                self._arguments.append(text if isinstance(text, str) else "{}")
        if self._is_bare:
            self.done = True

    def _set_name(self, name: Any) -> None:
        if not isinstance(name, str) or name not in self._names or self._name is not None:
            self.failed = True
            return
        self._name = name
        self._pieces.append(CallStart(self._first_number + self.num_calls, self._make_id(), name))
        self.num_calls += 1

    def _end_object(self) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self._flush()
        self._state = self._in_between
        self.done = not self._in_list

    def _flush(self) -> None:
        if self._name is not None and self._arguments:
            self._pieces.append(CallArguments(self._first_number + self.num_calls - 1, "".join(self._arguments)))
            self._arguments = []


def _loads(raw: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None
