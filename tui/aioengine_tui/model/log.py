"""What happened, in words; bounded."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from aioengine.events.step_event import FinishedInfo

LogKind = Literal[
    "arrived", "admitted", "resumed", "preempted", "finished", "aborted", "told", "cleaned_up", "freed", "evicted", "engine", "stream"
]
"""told: the worker is told in a step to forget a request. cleaned_up: it has. engine: paused, resumed. stream: gaps, the
connection."""
LOG_KINDS: tuple[LogKind, ...] = get_args(LogKind)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One thing that happened."""

    number: int  # counts from 1, never reused
    time: float  # seconds of the engine's clock
    step_id: int | None
    kind: LogKind
    request_id: str | None
    text: str


class LogBook:
    """The latest lines, oldest first."""

    def __init__(self, *, max_lines: int) -> None:
        self.lines: deque[LogLine] = deque(maxlen=max_lines)
        self.num_lines = 0  # ever written; the number of the newest one

    def add(self, time: float, step_id: int | None, kind: LogKind, request_id: str | None, text: str) -> None:
        self.num_lines += 1
        self.lines.append(LogLine(self.num_lines, time, step_id, kind, request_id, text))

    def since(self, number: int) -> Iterator[LogLine]:
        """The lines after the one of that number that are still kept, oldest first."""
        num_new = min(self.num_lines - number, len(self.lines))
        if num_new > len(self.lines) // 2:
            return itertools.islice(self.lines, len(self.lines) - num_new, None)
        return reversed([line for line, _ in zip(reversed(self.lines), range(num_new), strict=False)])  # a few of many thousands

    def copy(self) -> LogBook:
        other = LogBook(max_lines=self.lines.maxlen or 1)
        other.lines, other.num_lines = self.lines.copy(), self.num_lines
        return other


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def name_some(names: Sequence[object], limit: int = 6) -> str:
    """ "a, b, c and 4 more" """
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def end_words(info: FinishedInfo) -> str:
    match info.finish_reason:
        case "stop" if info.stop_reason is None:
            return "stopped by an end-of-sequence token"
        case "stop":
            return f"stopped by {'token' if isinstance(info.stop_reason, int) else 'the text'} {info.stop_reason!r}"
        case "length":
            return "reached its length"
        case "repetition":
            return "stopped because it repeated itself"
        case "abort":
            return "aborted"
        case "error":
            return "failed"
        case _:  # of a newer engine
            return f"ended by {info.finish_reason}"
