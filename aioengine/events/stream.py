"""What a viewer receives, wherever it comes from: the header, events, and what happened to the stream itself.

A `StepSource` (aioengine/events/source.py) yields these; a state such as `aioengine_tui.state.DashboardState` folds them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

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


class Foldable(Protocol):
    """A state that a player can fold events into and put aside."""

    def apply(self, item: StreamItem) -> None: ...

    def copy(self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Restored:
    """The viewer's state at another place of a recording (a seek): it becomes the present one."""

    state: Any  # built by the source's `make_state`; nobody else holds it


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """The source asks for a copy of the viewer's state as it is here, to come back to. A viewer may leave it unanswered."""

    answer: Callable[[Any], None]


StreamItem = WireHeader | Event | Gap | SourceStatus | Restored | CopyWanted


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
