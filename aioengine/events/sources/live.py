"""Watches an engine in this process."""

from __future__ import annotations

import time
from typing import Protocol

from aioengine.events.bus import StepBus, Subscription
from aioengine.events.sources.base import EngineControl, Gap, ItemStream, SourceStatus, StepSource, StreamItem
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader


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

    playback = None
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
