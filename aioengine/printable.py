"""Other people's text on its way to a terminal, a log or JSON: request ids, prompts, model and file names, error texts.

A terminal obeys control characters, and a reader of a log believes its lines. Whatever we print or log and have not written
ourselves goes through here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any, TextIO

PROSE = "\n\t\u200c\u200d"
"""What a text of several lines may keep: its lines, its tabs, and the joiners that scripts and emoji are spelt with."""

# C0, DEL and C1 controls; soft hyphen, marks and overrides of direction, joiners and other characters without a width;
# line separators; lone surrogates (no encoding can write them); annotation and tag characters.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str, *, keep: str = "") -> str:
    """The text in one line without anything that a terminal obeys or that hides or reorders what is read.

    Each such character becomes a middle dot, those of `keep` stay. Every character is taken by itself, so a stream may be
    filtered piece by piece.
    """
    if text.isprintable():  # nearly always, and fifty times as fast
        return text
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else "\N{MIDDLE DOT}", text)


def printable_json(value: Any, *, indent: int | None = None) -> str:
    """JSON of plain values that can be printed: what `printable` takes away is escaped, so nothing is lost."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if text.isprintable():
        return text
    # Outside of its strings JSON holds nothing of the kind but the line feeds of `indent`.
    return _UNPRINTABLE.sub(lambda match: "\n" if match[0] == "\n" else _json_escape(match[0]), text)


def _json_escape(char: str) -> str:
    return json.dumps(char)[1:-1]


class PrintableStream:
    """Text for people on its way to `stream`: lines stay, the rest is filtered."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text, keep=PROSE))
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


# ---------------------------------------------------------------------------------------------------- logs
class LogLines(str):
    """Several lines for a log that we composed ourselves of printable parts."""

    __slots__ = ()


class _Shown:
    """An argument of a log message whose text is made when the message is."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


class PrintableFormatter(logging.Formatter):
    """For a log of our own: records of other libraries are filtered too. Only the first line of a record is not indented."""

    def format(self, record: logging.LogRecord) -> str:
        return _indented(super().format(record))


def get_logger(name: str) -> logging.Logger:
    """The logger of that name; what it is given to log is printable, whatever handler writes it.

    Texts, exceptions and paths among the arguments are filtered, and so is the traceback of an exception.
    """
    logger = logging.getLogger(name)
    if _filter_record not in logger.filters:
        logger.addFilter(_filter_record)
    return logger


def _filter_record(record: logging.LogRecord) -> bool:
    if isinstance(record.args, Mapping):
        record.args = {name: _shown(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(map(_shown, record.args))
    if record.exc_info and record.exc_text is None:
        # A formatter takes this text where it is set, and makes it from the exception where it is not.
        record.exc_text = _indented(logging.Formatter().formatException(record.exc_info))
    return True


def _indented(text: str) -> str:
    """Printable, and no line but the first looks like the beginning of a record: the message of an exception may have any."""
    return printable(text, keep="\n\t").replace("\n", "\n  ")


def _shown(value: object) -> object:
    if isinstance(value, (bool, int, float, LogLines)) or value is None:
        return value  # "%d" wants the number itself
    return _Shown(value)
