"""Where a viewer's stream comes from: an engine in this process, a socket, or a recording. The viewer cannot tell which."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from aioengine.events.address import TcpAddress, parse_address
from aioengine.events.bus import StepBus, Subscription
from aioengine.events.client import SocketSource
from aioengine.events.playback import FileSource, PlaybackControl
from aioengine.events.protocol import ConnectionFailed, EngineControl
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.stream import Foldable, Gap, ItemStream, SourceStatus, StreamItem
from aioengine.events.wire import WireHeader


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
    def player(self) -> PlaybackControl | None:
        """Playing, seeking and stepping, if this is a recording."""

    def now(self) -> float:
        """The engine's clock (seconds of its `time.perf_counter()`) at this moment; of a recording, at the place shown."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> StreamItem: ...


class PublishingEngine(Protocol):
    """What a `LiveSource` needs of an engine; `AsyncEngine` has it."""

    @property
    def bus(self) -> StepBus: ...

    @property
    def wire_header(self) -> WireHeader: ...

    @property
    def control(self) -> EngineControl: ...

    def snapshot(self) -> EngineSnapshot: ...


class LiveSource(ItemStream):
    """An engine in this process and event loop."""

    player = None
    address = "this process"

    def __init__(self, engine: PublishingEngine, *, maxlen: int = 1024) -> None:
        self._engine = engine
        self._maxlen = maxlen
        self._subscription: Subscription | None = None
        self._num_dropped = 0
        self._pending: list[StreamItem] = []

    @property
    def engine(self) -> EngineControl | None:
        return self._engine.control

    def now(self) -> float:
        return time.perf_counter()

    async def open(self) -> None:
        """Subscribe. Raises AioEngineError if the engine is not started."""
        self._pending = [self._engine.wire_header, SourceStatus("live", self.address), self._engine.snapshot()]
        self._subscription = self._engine.bus.subscribe(self._maxlen)

    async def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    async def __anext__(self) -> StreamItem:
        if self._pending:
            return self._pending.pop(0)
        subscription = self._subscription
        assert subscription is not None, "open() comes first"
        lost = subscription.num_dropped - self._num_dropped
        if lost and not subscription.closed:
            # The rest is older than the snapshot, which tells it all.
            lost += len(subscription.drain())
            self._num_dropped = subscription.num_dropped
            self._pending.append(self._engine.snapshot())
            return Gap(lost)
        try:
            return await anext(subscription)
        except StopAsyncIteration:
            if self._num_dropped < 0:
                raise
            self._num_dropped = -1  # the end has been told
            return SourceStatus("ended", "the engine was shut down")


def live_source(engine: PublishingEngine) -> StepSource:
    """Watch an engine in this process."""
    return LiveSource(engine)


def open_source(
    target: str | Path,
    *,
    make_state: Callable[[], Foldable],
    token: str | None = None,
    reconnect: bool = True,
    whole_history: bool = False,
) -> StepSource:
    """A source by its name: a socket's path, "tcp:HOST:PORT", or a recording's path.

    make_state: builds the state that a recording's player keeps, to go back to (`DashboardState`). whole_history: in a
    recording, fold all that was before, also for a far seek (see `Player`).
    Raises ConfigError for an impossible address; opening the source raises ConnectionFailed or WireError.
    """
    if isinstance(target, str) and target.startswith(("tcp:", "unix:")):
        return SocketSource(target, token=token, reconnect=reconnect)
    path = Path(target)
    if path.is_socket():
        return SocketSource(str(path), token=token, reconnect=reconnect)
    if path.is_file():
        return FileSource(path, make_state=make_state, whole_history=whole_history)
    if not path.exists() and path.suffix in (".sock", ".socket"):
        raise ConnectionFailed(f"no engine publishes at {path}: there is no such socket")
    raise ConnectionFailed(f"{path} is neither a socket nor a recording" if path.exists() else f"there is no {path}")


__all__ = [
    "ConnectionFailed",
    "EngineControl",
    "FileSource",
    "LiveSource",
    "PlaybackControl",
    "PublishingEngine",
    "SocketSource",
    "StepSource",
    "TcpAddress",
    "live_source",
    "open_source",
    "parse_address",
]
