"""The waterfall as text: steps or milliseconds fall on columns, requests on rows.

Columns are numbered absolutely: a column of `per_column` steps holds the steps whose id, divided by it, is the column's number,
and a column of milliseconds those that ran in it. So a picture moves by whole columns and nothing in it changes its place.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from aioengine_tui.model.waterfall import (
    ABORTED,
    CELLS,
    CHUNK,
    COMPUTES,
    DECODE,
    DRAFT,
    ENDED,
    IDLE,
    MIXED,
    NONE,
    PREEMPTED,
    PREFILL,
    PROMPTS,
    RESUMED,
    WAITING,
    StepMark,
    WaterfallRow,
)  # fmt: skip
from aioengine_tui.model.why.words import STOP_LETTERS
from aioengine_tui.widgets.glyphs import CELL_GLYPHS, EIGHTHS
from aioengine_tui.widgets.text import Line, Part, fit_line

Axis = Literal["steps", "time"]

STEP_ZOOMS = (1, 2, 5, 10, 20, 50, 100)
"""Steps a column."""
TIME_ZOOMS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Milliseconds a column."""

CELL_ROLES: dict[str, str] = {
    "none": "text", "waiting": "muted", "preempted": "alert", "idle": "muted", "decode": "decode", "draft": "decode", "chunk": "chunk",
    "prefill": "prefill", "resumed": "resumed", "ended": "finished", "aborted": "bad", "mixed": "chunk",
}  # fmt: skip

_DRAFT_BASE = 32  # codes from here on: a draft cell with so many tokens
_MAX_DIGIT = 9
_TICKS = 10  # columns between two labels of the axis
# Where several cells fall into one column, the one that is rarest and matters most is shown.
_ORDER = (NONE, IDLE, WAITING, DECODE, DRAFT, CHUNK, PREFILL, MIXED, RESUMED, ENDED, ABORTED, PREEMPTED)
_RANK = {cell: rank for rank, cell in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True)
class Scale:
    """What a column is."""

    axis: Axis = "steps"
    per_column: int = 1  # steps, or milliseconds
    origin: float = 0.0  # seconds of the engine's clock: where column 0 of the time axis begins

    def columns_of(self, mark: StepMark) -> tuple[int, int]:
        """The first and the last column of a step."""
        if self.axis == "steps":
            column = mark.step_id // self.per_column
            return column, column
        start = mark.start if mark.start is not None else mark.time
        end = mark.end if mark.end is not None else mark.result_time if mark.result_time is not None else start
        first = self.column_at(start)
        return first, max(first, self.column_at(end - 1e-6))

    def column_at(self, time: float) -> int:
        """The column of a moment of the time axis."""
        return int((time - self.origin) * 1e3 // self.per_column)

    def words(self) -> str:
        if self.axis == "steps":
            return "1 step a column" if self.per_column == 1 else f"{self.per_column} steps a column"
        return f"{self.per_column} ms a column"

    def label(self, column: int, *, columns: int = 1) -> str:
        """The first step of a column, or when it begins; as exact as labels `columns` apart need to be."""
        if self.axis == "steps":
            return str(column * self.per_column)
        distance = columns * self.per_column  # milliseconds
        digits = next((digits for digits in (0, 1, 2) if distance % 10 ** (3 - digits) == 0), 3)
        return f"{column * self.per_column / 1e3:.{digits}f}s"


class Window:
    """The columns that are shown, `first` to `last`, and the steps in them."""

    def __init__(self, marks: Sequence[StepMark], scale: Scale, *, last: int, width: int) -> None:
        self.scale = scale
        self.width = max(1, width)
        self.last = last
        self.first = last - self.width + 1
        self.marks: list[StepMark] = []
        self.spans: list[tuple[int, int]] = []  # of each of the marks, in columns counted from `first`
        for mark in reversed(marks):
            begin, end = scale.columns_of(mark)
            if end < self.first:
                break
            if begin <= last:
                self.marks.append(mark)
                self.spans.append((max(0, begin - self.first), min(self.width - 1, end - self.first)))
        self.marks.reverse()
        self.spans.reverse()
        self._ids = [mark.step_id for mark in self.marks]

    @property
    def step_range(self) -> tuple[int, int] | None:
        """The ids of the first and the last step shown; None: there is none."""
        return (self._ids[0], self._ids[-1]) if self._ids else None

    def steps_in(self, column: int) -> list[StepMark]:
        """The steps in a column, counted from `first`."""
        return [mark for mark, (begin, end) in zip(self.marks, self.spans, strict=True) if begin <= column <= end]

    @cached_property
    def letters(self) -> str:
        """Why admission stopped, a letter a column; of several reasons the most frequent, a blank where nobody waited."""
        stops: list[Counter[str]] = [Counter() for _ in range(self.width)]
        for mark, (begin, end) in zip(self.marks, self.spans, strict=True):
            letter = STOP_LETTERS.get(mark.stop, "?")
            for column in range(begin, end + 1) if letter != " " else ():
                stops[column][letter] += 1
        return "".join(count.most_common(1)[0][0] if count else " " for count in stops)

    @cached_property
    def _stopped(self) -> list[set[str] | None]:
        """At whom admission stopped, a set a column; None where an old engine does not tell."""
        names: list[set[str] | None] = [set() for _ in range(self.width)]
        for mark, (begin, end) in zip(self.marks, self.spans, strict=True):
            for column in range(begin, end + 1):
                known = names[column]
                if mark.stopped_req_id is not None and known is not None:
                    known.add(mark.stopped_req_id)
                elif mark.stop != "queue_empty":
                    names[column] = None
        return names

    @cached_property
    def _uncovered(self) -> list[int]:
        """Columns in which nothing was computed."""
        covered = {column for begin, end in self.spans for column in range(begin, end + 1)}
        return [column for column in range(self.width) if column not in covered]

    # ------------------------------------------------------------------ a row
    def codes(self, row: WaterfallRow) -> bytes:
        """What the request did, a code a column: an index into CELLS, or _DRAFT_BASE and the tokens of a draft cell."""
        codes = bytearray(self.width)
        if not self._ids:
            return bytes(codes)
        for begin, end, code in self._stretches(row):
            if begin > end:
                continue
            codes[begin] = _merge(codes[begin], code)
            if end > begin:
                codes[begin + 1 : end] = bytes((code,)) * (end - begin - 1)
                codes[end] = _merge(codes[end], code)
        for column in self._uncovered:
            if codes[column] in COMPUTES:
                codes[column] = IDLE
        return bytes(codes)

    def _stretches(self, row: WaterfallRow) -> Iterator[tuple[int, int, int]]:
        """(first column, last column, code) of each run that is shown."""
        ids, spans, runs = self._ids, self.spans, row.runs
        in_time = self.scale.axis == "time"
        start_index = max(0, row.index_at(ids[0]) or 0)
        last_step = row.end_step if row.end_step is not None else 1 << 60
        for index in range(start_index, len(runs)):
            run = runs[index]
            if run.start_step > ids[-1]:
                return
            is_last = index + 1 == len(runs)
            stop = last_step if is_last else runs[index + 1].start_step - 1
            shares_until = min(stop, row.last_share_step) if is_last and run.cell in COMPUTES else stop
            begin, end = bisect_left(ids, run.start_step), bisect_right(ids, shares_until) - 1
            code = _DRAFT_BASE + min(run.num_tokens, _MAX_DIGIT) if run.cell == DRAFT and self.scale.per_column == 1 else run.cell
            if begin <= end:
                left, right = spans[begin][0], spans[end][1]
                if in_time and run.cell == WAITING and index == 0:
                    left = max(0, min(left, self.scale.column_at(row.arrival_time) - self.first))
                if in_time and run.cell in (WAITING, PREEMPTED, IDLE) and end + 1 < len(spans):
                    right = max(right, spans[end + 1][0] - 1)  # nothing changes for it between two steps
                yield left, right, code
            if shares_until < stop:  # it runs on without tokens
                rest = bisect_right(ids, shares_until)
                if rest < len(ids) and (until := bisect_right(ids, stop) - 1) >= rest:
                    yield spans[rest][0], spans[until][1], IDLE

    def line(self, row: WaterfallRow) -> Line:
        parts: Line = []
        column = 0
        for code, run in itertools.groupby(self.codes(row)):
            size = len(list(run))
            if code >= _DRAFT_BASE:
                parts.append(Part(_digit(code - _DRAFT_BASE) * size, CELL_ROLES["draft"]))
            elif code == WAITING:
                parts += self._wait_parts(row.request_id, column, column + size)
            else:
                parts.append(Part(CELL_GLYPHS[CELLS[code]] * size, CELL_ROLES[CELLS[code]]))
            column += size
        return parts

    def _wait_parts(self, request_id: str, begin: int, end: int) -> Line:
        """The letter of the reason where admission stopped at this very request; who waits behind it has a sign for that."""
        stopped = [names is None or request_id in names for names in self._stopped[begin:end]]
        parts: Line = []
        for is_stopped, group in itertools.groupby(stopped):
            size = len(list(group))
            text = self.letters[begin : begin + size] if is_stopped else CELL_GLYPHS["waiting"] * size
            parts.append(Part(text, "warn" if is_stopped else CELL_ROLES["waiting"]))
            begin += size
        return parts

    # ------------------------------------------------------------------ above the rows
    def axis_line(self, *, cursor: int | None = None) -> Line:
        """Labels at round columns; the one under the cursor takes the place of those that it would touch."""
        text = [" "] * self.width
        own = self.scale.label(self.first + cursor) if cursor is not None else ""
        begin = max(0, min(cursor, self.width - len(own))) if cursor is not None else self.width
        for column in range(max(0, -(-self.first // _TICKS) * _TICKS), self.last + 1, _TICKS):
            label, at = f"|{self.scale.label(column, columns=_TICKS)}", column - self.first
            if at + len(label) <= self.width and (at + len(label) < begin or at > begin + len(own)):
                text[at : at + len(label)] = label
        line = "".join(text)
        if cursor is None:
            return [Part(line, "muted")]
        return [Part(line[:begin], "muted"), Part(own, "cursor"), Part(line[begin + len(own) :], "muted")]

    def steps_line(self) -> Line:
        """Where each step begins, with its id where there is room: the second axis of a picture over time."""
        text = [" "] * self.width
        begins = [begin for begin, _ in self.spans]
        for index, (mark, begin) in enumerate(zip(self.marks, begins, strict=True)):
            room = (begins[index + 1] if index + 1 < len(begins) else self.width) - begin
            label = f"|{mark.step_id}"
            label = label if len(label) <= room else "|"
            text[begin : begin + len(label)] = label
        return [Part("".join(text[: self.width]), "muted")]

    def level_line(self, share: Callable[[StepMark], float], role: str) -> Line:
        """A share of 1 as eighths, the highest of each column."""
        levels = [0.0] * self.width
        for mark, (begin, end) in zip(self.marks, self.spans, strict=True):
            value = share(mark)
            for column in range(begin, end + 1):
                levels[column] = max(levels[column], value)
        return [Part("".join(EIGHTHS[max(1, min(8, round(level * 8))) if level > 0 else 0] for level in levels), role)]


def _digit(num_tokens: int) -> str:
    return str(num_tokens) if num_tokens else CELL_GLYPHS["draft"]


def _merge(old: int, new: int) -> int:
    """The code of a column in which a request did both."""
    if old in (NONE, new):
        return new
    old_cell, new_cell = (DRAFT if old >= _DRAFT_BASE else old), (DRAFT if new >= _DRAFT_BASE else new)
    cells = {old_cell, new_cell}
    if cells & {DECODE, DRAFT} and cells & (PROMPTS - {RESUMED}):
        return MIXED
    return old if _RANK[old_cell] >= _RANK[new_cell] else new


def cell_at(line: Line, column: int) -> Line:
    """The line with the cell of a column reversed."""
    parts: Line = []
    at = 0
    for text, role in line:
        offset = column - at
        if 0 <= offset < len(text):
            parts += [Part(text[:offset], role), Part(text[offset], "cursor"), Part(text[offset + 1 :], role)]
        else:
            parts.append(Part(text, role))
        at += len(text)
    return [part for part in parts if part.text]


def waterfall_legend(width: int) -> list[Line]:
    """What the cells and letters mean, in lines of whole entries."""
    entries = [(CELL_GLYPHS[name], CELL_ROLES[name], _LEGEND_WORDS.get(name, name)) for name in _LEGEND]
    entries += [(letter, "warn", words) for letter, words in _LETTER_WORDS]
    lines: list[Line] = [[]]
    used = 0
    for glyph, role, words in entries:
        size = len(words) + 4
        if used + size > width and used:
            lines.append([])
            used = 0
        lines[-1] += [Part(glyph, role), Part(f" {words}  ", "muted")]
        used += size
    return [fit_line(line, width) for line in lines]


_LEGEND = ("prefill", "chunk", "decode", "mixed", "resumed", "preempted", "idle", "ended", "aborted", "waiting")
_LETTER_WORDS = (("B", "waits: budget"), ("S", "max_num_seqs"), ("K", "no blocks"), ("P", "preempting"), ("F", "in flight"))
_LEGEND_WORDS = {"prefill": "prompt", "mixed": "both", "idle": "no token", "waiting": "waits behind"}
