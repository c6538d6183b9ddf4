"""Finds places in a recording without holding it in memory."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heappush, heapreplace
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from aioengine.events.wire import WireError, WireHeader, decode_header

Landmark = Literal["preemption", "abort", "slowest"]
LANDMARKS: tuple[Landmark, ...] = get_args(Landmark)

STRIDE = 64
"""One place in so many events is remembered: a day of 50 steps a second needs 3 MB."""

_NUM_SLOWEST = 16
_NUM_OPEN_STEPS = 64
_BLOCK_BYTES = 256 << 10
_MAX_DIGITS = 32
# The lines begin like this because the fields are written in the order of the dataclasses. Quotes inside a JSON string are
# escaped, so none of the patterns can match within a text. A request's name or a JSON schema's property can be a key, though,
# and then look like one of these fields: such keys come before them, so the last match counts.
_HEAD = re.compile(rb'\{"type":"(step|result|snapshot)","step_id":(\d{1,18}),"time":([-+.\deE]+),')
_SCHEDULE_START = b',"schedule_start":'
_UPDATE_END = b',"update_end":'
_PREEMPTED = b',"preempted_req_ids":['
_FINISHED = b',"finished":['
_ABORTED = b',"finish_reason":"abort","num_output_tokens":'


class RecordingIndex:
    """Sparse offsets of a recording's events, and the places worth jumping to. Grows by `scan()`, also with the file.

    Positions count events: position p is the place before event p. Raises WireError if the file is no recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_events = 0  # found so far
        self.is_complete = False  # all that is in the file now has been found
        self.first_time = 0.0
        self.last_time = 0.0
        self._offsets = array("q")  # of the events 0, STRIDE, 2 * STRIDE ...
        self._times = array("d")
        self._step_ids = array("q")  # of the latest step event before or at that place
        self._preemptions = array("q")  # positions behind a step that preempts
        self._aborts = array("q")
        self._snapshots = array("q")  # positions before a snapshot
        self._slowest: list[tuple[float, int]] = []  # heap of (seconds, position behind the step event)
        self._open_steps: dict[int, tuple[float, int]] = {}  # step id -> (schedule_start, position), without a result yet
        self._latest_step_id = 0
        try:
            with self.path.open("rb") as file:
                first = file.readline()
                self.header: WireHeader = decode_header(first)
        except OSError as exc:
            raise WireError(f"cannot read {self.path}: {exc.strerror}") from exc
        except WireError as exc:
            raise WireError(f"{self.path}, line 1: {exc}") from exc
        self._end_offset = self.events_offset = len(first)

    # ------------------------------------------------------------------ growing
    def scan(self, *, budget_s: float | None = None) -> bool:
        """Look at more of the file, for about `budget_s` seconds at most; True if all of it has been seen.

        A torn last line is left for the next call: the file may still be growing.
        """
        deadline = None if budget_s is None else time.perf_counter() + budget_s
        rest = b""  # the beginning of a line whose end has not been read
        with self.path.open("rb") as file:
            file.seek(self._end_offset)
            while block := file.read(max(_BLOCK_BYTES, len(rest))):
                data = rest + block if rest else block
                start = 0
                while (end := data.find(b"\n", start) + 1) > 0:
                    self._add(data, start, end)
                    start = end
                rest = data[start:]
                if deadline is not None and time.perf_counter() > deadline:
                    self.is_complete = False
                    return False
        self.is_complete = True
        return True

    def scan_in_parts(self, budget_s: float) -> Iterator[int]:
        """Scan all of the file, giving way about every `budget_s` seconds."""
        while not self.scan(budget_s=budget_s):
            yield self.num_events

    def _add(self, data: bytes, start: int, end: int) -> None:
        """One line of the data."""
        position, offset = self.num_events, self._end_offset
        self._end_offset += end - start
        self.num_events += 1
        head = _HEAD.match(data, start, end)
        if head is not None:
            tag, step_id, event_time = head[1], int(head[2]), float(head[3])
            if event_time > self.last_time:
                self.last_time = event_time
            if position == 0:
                self.first_time = event_time
            if tag == b"step":
                self._add_step(data, start, end, step_id, position + 1)
            elif tag == b"result":
                self._add_result(data, start, end, step_id, position + 1)
            else:
                self._snapshots.append(position)
        if position % STRIDE == 0:
            self._offsets.append(offset)
            self._times.append(self.last_time)
            self._step_ids.append(self._latest_step_id)

    def _add_step(self, data: bytes, start: int, end: int, step_id: int, position: int) -> None:
        self._latest_step_id = step_id
        # From the end, each from where the last one was found: the batch, which is long, stands before them.
        end = data.rfind(_SCHEDULE_START, start, self._note_aborts(data, start, end, position))
        started = _number_at(data, end + len(_SCHEDULE_START)) if end >= 0 else None
        if started is None:
            return
        self._open_steps[step_id] = (started, position)
        if len(self._open_steps) > _NUM_OPEN_STEPS:
            del self._open_steps[next(iter(self._open_steps))]
        place = data.rfind(_PREEMPTED, start, end)
        if place >= 0 and not data.startswith(b"]", place + len(_PREEMPTED)):
            self._preemptions.append(position)

    def _add_result(self, data: bytes, start: int, end: int, step_id: int, position: int) -> None:
        place = data.rfind(_UPDATE_END, start, self._note_aborts(data, start, end, position))
        started = self._open_steps.pop(step_id, None)
        ended = _number_at(data, place + len(_UPDATE_END)) if place >= 0 else None
        if started is None or ended is None:
            return
        entry = (ended - started[0], started[1])
        if len(self._slowest) < _NUM_SLOWEST:
            heappush(self._slowest, entry)
        elif entry > self._slowest[0]:
            heapreplace(self._slowest, entry)

    def _note_aborts(self, data: bytes, start: int, end: int, position: int) -> int:
        """Returns where the requests that ended are told: the fields that are looked for stand before it."""
        place = data.rfind(_FINISHED, start, end)
        if place < 0:
            return end
        if not data.startswith(b"]", place + len(_FINISHED)) and data.find(_ABORTED, place, end) >= 0:
            self._aborts.append(position)
        return place

    # ------------------------------------------------------------------ finding
    def seek(self, file: BufferedReader, position: int) -> None:
        """Put a file at the event of that position, which must have been found."""
        assert 0 <= position <= self.num_events, f"position {position} of {self.num_events}"
        if position == self.num_events:
            file.seek(self._end_offset)
            return
        file.seek(self._offsets[position // STRIDE])
        for _ in range(position % STRIDE):
            file.readline()

    def latest_snapshot(self, position: int) -> int | None:
        """The position of the last snapshot before one; None if there is none."""
        index = bisect_left(self._snapshots, position) - 1
        return self._snapshots[index] if index >= 0 else None

    def position_of_step(self, step_id: int) -> int:
        """The position right behind that step's event, or behind the next later one; the end if there is none."""
        place = max(0, bisect_left(self._step_ids, step_id) - 1)
        for position, tag, found, _ in self._heads(place * STRIDE):
            if tag == b"step" and found >= step_id:
                return position + 1
        return self.num_events

    def position_of_time(self, seconds: float) -> int:
        """The position behind the last event that happened at most `seconds` after the first one."""
        wanted = self.first_time + seconds
        place = max(0, bisect_right(self._times, wanted) - 1)
        for position, _, _, event_time in self._heads(place * STRIDE):
            if event_time > wanted:
                return position
        return self.num_events

    def position_of_steps_from(self, position: int, count: int) -> int:
        """The position right behind the step event that is `count` steps later (or, if negative, earlier)."""
        if count > 0:
            for found, tag, _, _ in self._heads(position):
                if tag == b"step":
                    count -= 1
                    if count == 0:
                        return found + 1
            return self.num_events
        start = position
        while start > 0:
            end, start = start, max(0, start - STRIDE)
            behind = [found + 1 for found, tag, _, _ in self._heads(start, end) if tag == b"step" and found + 1 < position]
            if len(behind) >= -count:
                return behind[count]
            count += len(behind)
        return 0

    def next_landmark(self, kind: Landmark, position: int, *, backwards: bool = False) -> int | None:
        """The next place of that kind behind (or before) a position; None if there is none as far as scanned.

        Slow steps are visited from the slowest down, one after the other, wherever they are.
        """
        if kind == "slowest":
            ranked = [place for _, place in sorted(self._slowest, reverse=True)]
            if not ranked:
                return None
            rank = ranked.index(position) if position in ranked else -1
            following = rank - 1 if backwards else rank + 1
            return ranked[following % len(ranked)]
        places = self._places(kind)
        index = bisect_left(places, position) - 1 if backwards else bisect_right(places, position)
        return places[index] if 0 <= index < len(places) else None

    def marks(self, kind: Landmark, num_cells: int) -> list[bool]:
        """Whether each of so many equal parts of the recording, as far as scanned, has a place of that kind."""
        places = sorted(place for _, place in self._slowest) if kind == "slowest" else self._places(kind)
        bounds = [round(self.num_events * cell / num_cells) for cell in range(num_cells + 1)]
        indexes = [bisect_right(places, bound) for bound in bounds]
        return [first < last for first, last in pairwise(indexes)]

    def _places(self, kind: Landmark) -> array[int]:
        return self._preemptions if kind == "preemption" else self._aborts

    def _heads(self, start: int, end: int | None = None) -> Iterator[tuple[int, bytes, int, float]]:
        """(position, type, step id, time) of the events from `start` on."""
        stop = self.num_events if end is None else min(end, self.num_events)
        if start >= stop:
            return
        with self.path.open("rb") as file:
            self.seek(file, start)
            for position in range(start, stop):
                head = _HEAD.match(file.readline())
                if head is not None:
                    yield position, head[1], int(head[2]), float(head[3])


def _number_at(data: bytes, start: int) -> float | None:
    """None if there is none."""
    try:
        return float(data[start : data.index(b",", start, start + _MAX_DIGITS)])
    except ValueError:
        return None
