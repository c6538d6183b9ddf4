"""What a viewer has, wherever its stream comes from: the items that it receives, and what it may do to their source.

A `StepSource` yields the items; a state such as `aioengine_tui.model.state.DashboardState` folds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

from aioengine.errors import AioEngineError
from aioengine.events.recording.index import Landmark
from aioengine.events.step_event import Event
from aioengine.events.wire import WireHeader

ConnectionState = Literal["connecting", "live", "lost", "ended", "paused", "playing"]
"""connecting: no data yet. live: events come as they happen. lost: the engine is unreachable, and tried again. ended: no
more will come. paused, playing: a recording."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Events are missing here, because the reader was too slow or the connection broke. A snapshot follows if one can be had."""

    num_dropped: int  # 0: unknown how many
    reason: str = "the viewer was too slow"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The stream's own state changed."""

    state: ConnectionState
    detail: str = ""  # for people: an address, or what went wrong
    position: int | None = None  # of a recording: events before the current place
    length: int | None = None  # of a recording: events in all, as far as known
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Restored:
    """The viewer's state at another place of a recording (a seek): it becomes the present one."""

    state: Any  # built by the source's `make_state`; nobody else holds it


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """The source asks for a copy of the viewer's state as it is here, to come back to. A viewer may leave it unanswered."""

    answer: Callable[[Any], None]


StreamItem = WireHeader | Event | Gap | SourceStatus | Restored | CopyWanted


# ---------------------------------------------------------------------------------------------------- control
class ControlError(AioEngineError):
    """A command was refused or failed; the message says why."""


class ConnectionFailed(AioEngineError):
    """No engine answers at an address, or it does not let this viewer in; the message says which and why."""


class EngineControl(Protocol):
    """What a viewer may do to an engine, from wherever it watches. Each raises ControlError."""

    async def pause(self) -> None:
        """Schedule no further step until `resume()`."""

    async def resume(self) -> None: ...

    async def step(self) -> int | None:
        """Run one step of a paused engine; its id, or None if there was nothing to run."""

    async def abort(self, request_id: str) -> bool:
        """End a request, named as the events name it; False if it is not live."""

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, chat: bool = False) -> str:
        """Start a request that nobody awaits; returns its id. chat: as a user's message, where the model has a chat template."""

    async def read(self, request_id: str) -> tuple[str, bool] | None:
        """(text so far, whether it has ended) of a request of `submit()`; None if it is not one of the latest."""


class PlaybackControl(Protocol):
    """What a viewer may do to a recording. What changes comes through the stream."""

    @property
    def position(self) -> int:
        """Events before the present place."""

    @property
    def length(self) -> int:
        """Events found so far; the file is looked through in the background."""

    @property
    def duration(self) -> float:
        """Seconds from the first to the last event found so far."""

    @property
    def elapsed(self) -> float:
        """Seconds from the first event to the present place."""

    @property
    def seeking(self) -> bool:
        """A jump is under way: until its state comes, `position`, `elapsed` and the source's `now` stay at what is shown."""

    @property
    def playing(self) -> bool: ...

    @property
    def speed(self) -> float: ...

    def play(self) -> None: ...

    def pause(self) -> None: ...

    def toggle(self) -> None: ...

    def set_speed(self, speed: float) -> None:
        """Times real time, between 0.01 and 1000."""

    async def step(self, count: int = 1) -> None:
        """Pause, and go to the next scheduled step, or `count` further; back if negative."""

    async def seek_step(self, step_id: int) -> None:
        """Go right behind a step's event."""

    async def seek_time(self, seconds: float) -> None:
        """Go to so many seconds after the first event."""

    async def seek_fraction(self, fraction: float) -> None:
        """0 is the beginning, 1 the end."""

    async def jump(self, kind: Landmark, *, backwards: bool = False) -> bool:
        """Pause at the next preemption or abort, or at the slowest step (again: the next slowest); False if there is none."""

    def marks(self, kind: Landmark, num_cells: int) -> list[bool]:
        """Whether each of so many equal parts of the recording, as far as found, has a place of that kind."""


# ---------------------------------------------------------------------------------------------------- the source
@runtime_checkable
class StepSource(Protocol):
    """An async iterator over `StreamItem`s: a header first, then whatever happens. Open it before, close it after.

    The iteration ends when nothing more can come. One task iterates.
    """

    address: str

    @property
    def engine(self) -> EngineControl | None:
        """Commands for the engine, if it takes any; may change while the stream goes on."""

    @property
    def playback(self) -> PlaybackControl | None:
        """Playing, seeking and stepping, if this is a recording."""

    def now(self) -> float:
        """The engine's clock (seconds of its `time.perf_counter()`) at this moment; of a recording, at the place shown."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> StreamItem: ...


class ItemStream(ABC):
    """What is alike in every `StepSource`: it is open inside `async with`, and its own iterator."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def __anext__(self) -> StreamItem: ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self
