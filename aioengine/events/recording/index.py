"""Finds places in a recording without holding it in memory."""

from __future__ import annotations

import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heappush, heapreplace
from io import BufferedReader
from pathlib import Path
from typing import Literal, get_args

from aioengine.events.wire import WireError, WireHeader, decode_header

Landmark = Literal["preemption", "abort", "slowest"]
LANDMARKS: tuple[Landmark, ...] = get_args(Landmark)

STRIDE = 64
"""One place in so many events is remembered: a day of 50 steps a second needs 3 MB."""

_NUM_SLOWEST = 16
_NUM_OPEN_STEPS = 64
# The lines begin like this because the fields are written in the order of the dataclasses. Quotes inside a JSON string are
# escaped, so none of the patterns can match within a text. A request's name or a JSON schema's property can be a key, though,
# and then look like one of these fields: such keys come before them, so the last match counts.
_HEAD = re.compile(rb'\{"type":"(step|result|snapshot)","step_id":(\d{1,18}),"time":([-+.\deE]+),')
_SCHEDULE_START = re.compile(rb'.*,"schedule_start":([-+.\deE]+),')
_UPDATE_END = re.compile(rb'.*,"update_end":([-+.\deE]+),')
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
        with self.path.open("rb") as file:
            file.seek(self._end_offset)
            for count, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                self._add(line)
                if deadline is not None and count % 32 == 0 and time.perf_counter() > deadline:
                    self.is_complete = False
                    return False
        self.is_complete = True
        return True

    def scan_in_parts(self, budget_s: float) -> Iterator[int]:
        """Scan all of the file, giving way about every `budget_s` seconds."""
        while not self.scan(budget_s=budget_s):
            yield self.num_events

    def _add(self, line: bytes) -> None:
        position, offset = self.num_events, self._end_offset
        self._end_offset += len(line)
        self.num_events += 1
        head = _HEAD.match(line)
        if head is not None:
            tag, step_id, event_time = head[1], int(head[2]), float(head[3])
            self.last_time = max(self.last_time, event_time)
            if position == 0:
                self.first_time = event_time
            if tag == b"step":
                self._add_step(line, step_id, position + 1)
            elif tag == b"result":
                self._add_result(line, step_id)
            else:
                self._snapshots.append(position)
            if tag != b"snapshot" and _ABORTED in line and line.find(_ABORTED, line.rfind(_FINISHED)) >= 0:
                self._aborts.append(position + 1)
        if position % STRIDE == 0:
            self._offsets.append(offset)
            self._times.append(self.last_time)
            self._step_ids.append(self._latest_step_id)

    def _add_step(self, line: bytes, step_id: int, position: int) -> None:
        self._latest_step_id = step_id
        place = line.rfind(_PREEMPTED)
        if place >= 0 and not line.startswith(b"]", place + len(_PREEMPTED)):
            self._preemptions.append(position)
        start = _SCHEDULE_START.match(line)
        if start is not None:
            self._open_steps[step_id] = (float(start[1]), position)
            if len(self._open_steps) > _NUM_OPEN_STEPS:
                del self._open_steps[next(iter(self._open_steps))]

    def _add_result(self, line: bytes, step_id: int) -> None:
        started, end = self._open_steps.pop(step_id, None), _UPDATE_END.match(line)
        if started is None or end is None:
            return
        entry = (float(end[1]) - started[0], started[1])
        if len(self._slowest) < _NUM_SLOWEST:
            heappush(self._slowest, entry)
        elif entry > self._slowest[0]:
            heapreplace(self._slowest, entry)

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
        places = self._preemptions if kind == "preemption" else self._aborts
        index = bisect_left(places, position) - 1 if backwards else bisect_right(places, position)
        return places[index] if 0 <= index < len(places) else None

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
