"""Outputs on their way to readers: all that a step brought is handled in one turn of the loop, and written at once where that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from aioengine.outputs import RequestOutput
from aioengine.server.started import Started

_WRITE_INTERVAL_S = 0.002
"""No reader can tell events apart that are closer than that; a step of a model takes longer."""


class StreamEvents(Protocol):
    """What one streamed answer says, in bytes that hold whole events; empty where there is nothing to say.

    What it raises ends the stream: `fail` says so to the reader.
    """

    def begin(self) -> bytes: ...

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Of the next output of the generation with this index."""

    def end(self) -> bytes:
        """Every generation has ended."""

    def fail(self, exc: Exception) -> bytes: ...

    def close(self) -> None:
        """Nothing follows, however it ended."""


class Deliveries:
    """Those that have something new. They are served together, in the turn of the loop after the engine's step.

    A task for each of them that is woken for each event would cost more than the event, and so does the system's part of a
    write: where steps follow each other faster than `_WRITE_INTERVAL_S`, the events of several go out in one write.
    """

    def __init__(self) -> None:
        self._ready: list[Delivery] = []
        self._holding: list[Delivery] = []
        self._last_write = -_WRITE_INTERVAL_S
        self._timer: asyncio.TimerHandle | None = None

    def add(self, delivery: Delivery) -> None:
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._serve)
        self._ready.append(delivery)

    def hold(self, delivery: Delivery) -> None:
        """It has something to write."""
        self._holding.append(delivery)

    def _serve(self) -> None:
        ready, self._ready = self._ready, []
        for delivery in ready:
            delivery.serve()
        if self._holding and self._timer is None:
            loop = asyncio.get_running_loop()
            wait = self._last_write + _WRITE_INTERVAL_S - loop.time()
            if wait <= 0:
                self._write()
            else:
                self._timer = loop.call_later(wait, self._write)

    def _write(self) -> None:
        self._timer = None
        self._last_write = asyncio.get_running_loop().time()
        holding, self._holding = self._holding, []
        for delivery in holding:
            delivery.write()


class _Source:
    """One generation of an answer."""

    __slots__ = ("_delivery", "index", "started")

    def __init__(self, delivery: Delivery, index: int, started: Started) -> None:
        self._delivery = delivery
        self.index = index
        self.started = started

    def note_ready(self) -> None:
        delivery = self._delivery
        delivery.ready.append(self)
        if len(delivery.ready) == 1:
            delivery.deliveries.add(delivery)


class Delivery:
    """The outputs of an answer's generations, as events for one reader.

    write_now: writes, or returns False if the reader is slow. What cannot be written so, and the end, is for the task that asks
    `next_part()`. While that writes, nothing is taken: a slow reader gets several steps merged.
    """

    __slots__ = ("_error", "_events", "_num_live", "_parts", "_started", "_waiter", "_write_now", "deliveries", "ready")

    def __init__(
        self, started: Sequence[Started], events: StreamEvents, deliveries: Deliveries, write_now: Callable[[bytes], bool] | None
    ) -> None:
        self._started = started
        self._events = events
        self.deliveries = deliveries
        self._write_now = write_now
        self._num_live = len(started)
        self.ready: list[_Source] = []  # have something new
        self._parts: list[bytes] = []  # not written yet
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the task, while it has nothing to write

    def begin(self) -> None:
        """Take the first outputs. Later ones are taken from now on."""
        try:
            self._parts.append(self._events.begin())
            for index, one in enumerate(self._started):
                self._parts.append(self._events.take(index, one.first))
                if one.first.finished:
                    self._num_live -= 1
                else:
                    one.call_when_ready(_Source(self, index, one).note_ready)
            self._add_end()
        except Exception as exc:
            self._error = exc

    @property
    def is_over(self) -> bool:
        """Every generation has ended, and what they said was taken, the end of the stream included."""
        return self._num_live == 0 and self._error is None

    async def next_part(self) -> bytes:
        """What is to be written next. The last is empty if it was written already. Raises what went wrong, once what came before
        it was written.
        """
        if self._error is None:
            self._take()
        while True:
            parts, self._parts = self._parts, []
            part = b"".join(parts)
            if part or self.is_over:
                return part
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def serve(self) -> None:
        """Take what is new. What is to be written is held until all are told to write."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # the task is writing, and will look for more
        was_holding = bool(self._parts)
        self._take()
        if self._error is not None:
            waiter.set_result(None)
        elif self._parts and not was_holding:
            self.deliveries.hold(self)

    def write(self) -> None:
        """Write what is held, or wake the task that does. It is woken at the end in any case: hundreds of streams may end with one
        step, and what they say last comes before their tasks clear up.
        """
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._parts:
            return  # the task has it
        if self._write_now is not None and self._write_now(b"".join(self._parts)):
            self._parts.clear()
            if not self._num_live:
                waiter.set_result(None)
        else:
            waiter.set_result(None)

    def _take(self) -> None:
        ready = self.ready
        if not ready:
            return
        self.ready = []
        try:
            for source in ready:
                output = source.started.take_ready()
                if output is None:
                    continue
                part = self._events.take(source.index, output)
                if part:
                    self._parts.append(part)
                if output.outputs[0].finish_reason is not None and output.finished:  # the first alone tells of nearly all
                    self._num_live -= 1
            self._add_end()
        except Exception as exc:
            self._error = exc

    def _add_end(self) -> None:
        if not self._num_live:
            self._parts.append(self._events.end())
