"""Reads a recording back: all at once, or place by place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from aioengine.events.recording_index import RecordingIndex
from aioengine.events.step_event import Event
from aioengine.events.stream import Foldable
from aioengine.events.wire import WireError, WireHeader, decode, decode_header

S = TypeVar("S", bound=Foldable)

_FIRST_INTERVAL = 256  # events between two states that are kept; doubled whenever there are too many
_MAX_CHECKPOINTS = 24
_NUM_NEAR = 8  # further ones, close to the place that was last gone to
_NEAR_INTERVAL = 32


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording in memory: what `read_recording` returns."""

    header: WireHeader
    events: list[Event]


def read_recording(path: str | Path) -> Recording:
    """Read a file that `StepRecorder` wrote.

    A last line without its newline is what a killed engine leaves behind; it is ignored. Raises WireError, with file and
    line number, for any other line that is no event, for a newer schema, and for a file that cannot be read.
    """
    path = Path(path)
    lines = _numbered_lines(path)
    number, first = next(lines, (1, b""))
    events: list[Event] = []
    try:
        header = decode_header(first)
        for number, line in lines:  # noqa: B007 - the number is for the message below
            events.append(decode(line))
    except WireError as exc:
        raise WireError(f"{path}, line {number}: {exc}") from exc
    return Recording(header, events)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of the file, counted from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
    except OSError as exc:
        raise WireError(f"cannot read {path}: {exc.strerror}") from exc


class Player(Generic[S]):
    """A place in a recording, and the state there.

    Going forward folds events; going back starts from a copy of the state that was put aside on the way. The copies are a
    bounded number: the longer the recording, the sparser the old ones, with some near the present place. The events stay
    in the file. Raises WireError if the file is no recording.
    """

    def __init__(self, path: str | Path, *, make_state: Callable[[], S]) -> None:
        self.index = RecordingIndex(path)
        self.position = 0  # events folded
        self._make_state = make_state
        self.state = self._initial_state()
        self.last_time: float | None = None  # of the latest event that was folded
        self._file = self.index.path.open("rb")
        self._file.seek(self.index.events_offset)
        self._checkpoints: dict[int, S] = {}  # position -> state, ascending
        self._interval = _FIRST_INTERVAL
        self._near: deque[tuple[int, S]] = deque(maxlen=_NUM_NEAR)

    def _initial_state(self) -> S:
        state = self._make_state()
        state.apply(self.index.header)
        return state

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------------ forward
    def next_event(self) -> Event | None:
        """Fold and return the event at the present place; None at the end (of what is written so far)."""
        offset = self._file.tell()
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self._file.seek(offset)
            return None
        try:
            event = decode(line)
        except WireError as exc:
            raise WireError(f"{self.index.path}, line {self.position + 2}: {exc}") from exc
        self.state.apply(event)
        self.position += 1
        self.last_time = event.time
        if self.position % self._interval == 0 and self.position not in self._checkpoints:
            self._keep_checkpoint()
        return event

    def peek_time(self) -> float | None:
        """When the next event happened; None at the end."""
        offset = self._file.tell()
        line = self._file.readline()
        self._file.seek(offset)
        return time_of_line(line) if line.endswith(b"\n") else None

    def _keep_checkpoint(self) -> None:
        self._checkpoints[self.position] = self.state.copy()
        if len(self._checkpoints) > _MAX_CHECKPOINTS:
            self._interval *= 2
            self._checkpoints = {place: state for place, state in self._checkpoints.items() if place % self._interval == 0}

    # ------------------------------------------------------------------ anywhere
    def seek(self, position: int) -> None:
        """Go to a place. Takes as long as folding from the nearest state that is kept."""
        for _ in self.seek_in_parts(position):
            pass

    def seek_in_parts(self, position: int, *, part: int = 32) -> Iterator[int]:
        """As `seek`, but gives way every `part` events, so that a caller in an event loop can let others run."""
        while position > self.index.num_events and not self.index.scan(budget_s=0.01):
            yield self.position
        position = max(0, min(position, self.index.num_events))
        if not self._base_for(position):
            return
        while self.position < position:
            if self.next_event() is None:
                return
            if position - self.position < _NUM_NEAR * _NEAR_INTERVAL and self.position % _NEAR_INTERVAL == 0:
                self._near.append((self.position, self.state.copy()))
            if self.position % part == 0:
                yield self.position

    def _base_for(self, position: int) -> bool:
        """Take the kept state that is nearest before a place, unless the present one is; False if that place is the present."""
        kept = [*self._checkpoints.items(), *self._near]
        place, state = max(((p, s) for p, s in kept if p <= position), key=lambda entry: entry[0], default=(0, None))
        if place <= self.position <= position:
            return self.position != position
        self.state = self._initial_state() if state is None else state.copy()
        self.position = place
        self.index.seek(self._file, place)
        return True


def time_of_line(line: bytes) -> float | None:
    """The time of an event, without decoding all of it; None if it has no event's beginning."""
    head = line[:96].split(b'"time":', 1)
    try:
        return float(head[1].split(b",", 1)[0])
    except (IndexError, ValueError):
        return None
