"""Outputs on their way to readers: all that a step brought is handled in one turn of the loop, and written at once where that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from aioengine.outputs import RequestOutput
from aioengine.server.started import Started


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

    A task for each of them that is woken for each event would cost more than the event.
    """

    def __init__(self) -> None:
        self._ready: list[Delivery] = []

    def add(self, delivery: Delivery) -> None:
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._serve)
        self._ready.append(delivery)

    def _serve(self) -> None:
        ready, self._ready = self._ready, []
        for delivery in ready:
            delivery.serve()


class _Source:
    """One generation of an answer."""

    __slots__ = ("_delivery", "index", "started")

    def __init__(self, delivery: Delivery, index: int, started: Started) -> None:
        self._delivery = delivery
        self.index = index
        self.started = started

    def note_ready(self) -> None:
        self._delivery.note_ready(self)


class Delivery:
    """The outputs of an answer's generations, as events for one reader.

    write_now: writes, or returns False if the reader is slow. What cannot be written so, and the end, is for the task that asks
    `next_part()`. While that writes, nothing is taken: a slow reader gets several steps merged.
    """

    __slots__ = ("_deliveries", "_error", "_events", "_num_live", "_pending", "_ready", "_started", "_waiter", "_write_now")

    def __init__(
        self, started: Sequence[Started], events: StreamEvents, deliveries: Deliveries, write_now: Callable[[bytes], bool] | None
    ) -> None:
        self._started = started
        self._events = events
        self._deliveries = deliveries
        self._write_now = write_now
        self._num_live = len(started)
        self._ready: list[_Source] = []
        self._pending = b""
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the task, while it has nothing to write

    def begin(self) -> bytes:
        """The events of the first outputs; later ones are taken from now on."""
        parts: list[bytes] = []
        try:
            parts.append(self._events.begin())
            for index, one in enumerate(self._started):
                parts.append(self._events.take(index, one.first))
                if one.first.finished:
                    self._num_live -= 1
                else:
                    one.call_when_ready(_Source(self, index, one).note_ready)
        except Exception as exc:
            self._error = exc
        return b"".join(parts)

    @property
    def is_over(self) -> bool:
        """Every generation has ended, and what they said was taken."""
        return self._num_live == 0 and self._error is None

    async def next_part(self) -> bytes:
        """What is to be written next. Empty only at the end. Raises what went wrong, once what came before it was written."""
        part = b"" if self._error is not None else self._take()
        while not part and self._num_live and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            part, self._pending = self._pending, b""
        if not part and self._error is not None:
            raise self._error
        return part

    def note_ready(self, source: _Source) -> None:
        self._ready.append(source)
        if len(self._ready) == 1:
            self._deliveries.add(self)

    def serve(self) -> None:
        """Take what is new and write it, or wake the task that writes it."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # the task is writing, and will look for more
        part = self._take()
        if self._num_live and self._error is None and (not part or (self._write_now is not None and self._write_now(part))):
            return
        self._pending = part
        waiter.set_result(None)

    def _take(self) -> bytes:
        ready = self._ready
        if not ready:
            return b""
        self._ready = []
        parts: list[bytes] = []
        try:
            for source in ready:
                output = source.started.take_ready()
                if output is None:
                    continue
                parts.append(self._events.take(source.index, output))
                if output.finished:
                    self._num_live -= 1
        except Exception as exc:
            self._error = exc
        return b"".join(parts)
