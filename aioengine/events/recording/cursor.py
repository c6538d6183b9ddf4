"""A place in a recording that can be moved to and fro."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from aioengine.events.recording.index import RecordingIndex
from aioengine.events.step_event import Event
from aioengine.events.wire import WireError, WireHeader, decode

_FIRST_INTERVAL = 256  # events between two states that are kept; doubled whenever there are too many
_MAX_CHECKPOINTS = 24
_NUM_NEAR = 8  # further ones, close to the place that was last gone to
_NEAR_INTERVAL = 32
_MAX_FOLDED = 256  # events that a seek folds rather than lose what was before a snapshot: 0.1 s for 256 requests
HISTORY_EVENTS = 8192
"""So many before a place tell its history: what graphs and lists show. Some two seconds of folding for 256 requests."""


class Foldable(Protocol):
    """A state that events can be folded into, and that can be put aside."""

    @property
    def num_events(self) -> int:
        """Folded into it."""

    def apply(self, item: WireHeader | Event, /) -> None: ...

    def copy(self) -> Self: ...


S = TypeVar("S", bound=Foldable)


class RecordingCursor(Generic[S]):
    """A place in a recording, and the state at any place that is gone to.

    Going on with `next_event` folds nothing: whoever plays the recording folds the events anyhow, and may lend copies of its
    state with `put_aside`. A seek folds, from the nearest state that is kept before its target. The kept ones are a bounded
    number: the longer the recording, the sparser the old ones, with some near the present place. The events stay in the
    file. Raises WireError if the file is no recording.

    whole_history: a seek always folds all that was before its target. Otherwise a far one begins at the nearest snapshot of
    the engine in the recording, and what was before that is missing in the state (`lacks_history`). index: of another cursor in
    the same file.
    """

    def __init__(
        self, path: str | Path, *, make_state: Callable[[], S], whole_history: bool = False, index: RecordingIndex | None = None
    ) -> None:
        self.index = RecordingIndex(path) if index is None else index
        self.position = 0  # events read
        self.last_time: float | None = None  # of the latest event that was read
        self._make_state = make_state
        self._whole_history = whole_history
        self._state, self._state_position = self._initial_state(), 0
        self._file = self.index.path.open("rb")
        self._file.seek(self.index.events_offset)
        self._next_line = b""  # read ahead; empty: not yet
        self._checkpoints: dict[int, S] = {}  # position -> state
        self._interval = _FIRST_INTERVAL
        self._near: deque[tuple[int, S]] = deque(maxlen=_NUM_NEAR)

    def _initial_state(self) -> S:
        state = self._make_state()
        state.apply(self.index.header)
        return state

    def close(self) -> None:
        self._file.close()

    @property
    def offset(self) -> int:
        """Bytes of the file before the present place."""
        return self._file.tell() - len(self._next_line)

    # ------------------------------------------------------------------ forward
    def next_event(self) -> Event | None:
        """The event at the present place, which moves on; None at the end (of what is written so far)."""
        line = self._peek()
        if not line:
            return None
        try:
            event = decode(line, schema_version=self.index.header.schema_version)
        except WireError as exc:
            raise WireError(f"{self.index.path}, line {self.position + 2}: {exc}") from exc
        self._next_line = b""
        self.position += 1
        self.last_time = event.time
        return event

    def peek_time(self) -> float | None:
        """When the next event happened; None at the end."""
        return time_of_line(self._peek())

    def _peek(self) -> bytes:
        """The next line; empty if there is none, or not all of it yet."""
        if not self._next_line:
            offset = self._file.tell()
            line = self._file.readline()
            if line.endswith(b"\n"):
                self._next_line = line
            else:
                self._file.seek(offset)
        return self._next_line

    # ------------------------------------------------------------------ states that are kept
    @property
    def wants_state(self) -> bool:
        """The state of the present place is worth keeping, so that going back from here is short."""
        return self.position % _FIRST_INTERVAL == 0 and self.position not in self._checkpoints

    def put_aside(self, position: int, state: S) -> None:
        """Keep a state of that place, which nobody else may hold."""
        if position % self._interval:
            self._near.append((position, state))
            return
        self._checkpoints[position] = state
        if len(self._checkpoints) > _MAX_CHECKPOINTS:
            self._interval *= 2
            self._checkpoints = {place: kept for place, kept in self._checkpoints.items() if place % self._interval == 0}

    # ------------------------------------------------------------------ anywhere
    @property
    def state(self) -> S:
        """The state at the present place, after a seek: it must not be changed."""
        assert self._state_position == self.position, "seek() comes first"
        return self._state

    @property
    def lacks_history(self) -> bool:
        """After a seek: the state knows less of what was before than `HISTORY_EVENTS` events would tell."""
        return self.state.num_events < min(self.position, HISTORY_EVENTS)

    def adopt(self, state: S) -> None:
        """Another state of the present place, which knows more and which nobody else may hold."""
        self._state, self._state_position = state, self.position

    def seek(self, position: int) -> None:
        """Go to a place. Takes as long as folding from the nearest state that is kept."""
        for _ in self.seek_in_parts(position):
            pass

    def seek_in_parts(self, position: int, *, part: int = 32, history: int = 0) -> Iterator[int]:
        """As `seek`, but gives way every `part` events, so that a caller in an event loop can let others run.

        history: begin so many events before the place, or earlier.
        """
        while position > self.index.num_events and not self.index.scan(budget_s=0.01):
            yield self.position
        position = max(0, min(position, self.index.num_events))
        self._go_to_base_of(position, history)
        while self.position < position:
            event = self.next_event()
            if event is None:
                return
            self._state.apply(event)
            self._state_position = self.position
            is_near = position - self.position < _NUM_NEAR * _NEAR_INTERVAL and self.position % _NEAR_INTERVAL == 0
            is_due = self.position % self._interval == 0 and self.position not in self._checkpoints
            if is_near or is_due:
                self.put_aside(self.position, self._state.copy())
            if self.position % part == 0:
                yield self.position

    def _go_to_base_of(self, position: int, history: int) -> None:
        """Go to the nearest place before a position of which there is a state that knows enough, or else to a snapshot."""
        kept = [
            (place, state)
            for place, state in (*self._checkpoints.items(), *self._near, (self._state_position, self._state))
            if place <= position and (state.num_events >= place or state.num_events + position - place >= history)
        ]
        place, state = max(kept, key=lambda entry: entry[0], default=(0, None))
        if position - place > _MAX_FOLDED and not self._whole_history:
            snapshot = self.index.latest_snapshot(max(0, position - history))
            if snapshot is not None and snapshot > place:
                place, state = snapshot, None
        if state is not self._state:
            self._state = self._initial_state() if state is None else state.copy()
        self._state_position = place
        if self.position != place:
            self.position = place
            self.index.seek(self._file, max(0, place - 1))
            self.last_time = time_of_line(self._file.readline()) if place else None
            self._next_line = b""


def time_of_line(line: bytes) -> float | None:
    """The time of an event, without decoding all of it; None if it has no event's beginning."""
    head = line[:96].split(b'"time":', 1)
    try:
        return float(head[1].split(b",", 1)[0])
    except (IndexError, ValueError):
        return None
