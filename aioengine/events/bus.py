"""The frame bus: the engine publishes every step, any number of observers listen, and none of them can slow it down."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aioengine.events.step_event import Event
from aioengine.printable import get_logger

logger = get_logger(__name__)

DEFAULT_MAXLEN = 1024
"""Events that a subscription holds for a slow reader: several seconds of steps on any device."""

Observer = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """How a subscription is doing."""

    num_buffered: int  # published, not read yet
    maxlen: int
    num_received: int  # total, dropped ones included
    num_dropped: int  # total: the oldest ones, pushed out while the reader was slow
    closed: bool


class Subscription:
    """A bounded view of the bus: an async iterator over events, and a context manager that ends it.

    When the reader is slower than the engine the oldest events are dropped and counted; the engine never waits. Closing
    (from either side) stops new events; what is buffered can still be read, then the iteration ends. It belongs to the
    event loop that publishes; several tasks may read from it and then share the events between them.
    """

    __slots__ = ("_bus", "_closed", "_events", "_num_dropped", "_num_received", "_ready")

    def __init__(self, bus: StepBus, *, maxlen: int) -> None:
        if maxlen < 1:
            raise ValueError(f"maxlen must be at least 1, got {maxlen}")
        self._bus = bus
        self._events: deque[Event] = deque(maxlen=maxlen)
        self._ready = asyncio.Event()  # set while there is something to read, or nothing more will come
        self._closed = False
        self._num_received = 0
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def closed(self) -> bool:
        return self._closed

    def statistics(self) -> SubscriptionStatistics:
        maxlen = self._events.maxlen
        assert maxlen is not None
        return SubscriptionStatistics(
            num_buffered=len(self._events),
            maxlen=maxlen,
            num_received=self._num_received,
            num_dropped=self._num_dropped,
            closed=self._closed,
        )

    def drain(self) -> list[Event]:
        """Take everything that is buffered, without waiting: for readers that look at a fixed rate."""
        events = list(self._events)
        self._events.clear()
        self._settle()
        return events

    def close(self) -> None:
        """Leave the bus. Idempotent."""
        if not self._closed:
            self._bus.unsubscribe(self)
            self._end()

    def _push(self, event: Event) -> None:
        events = self._events
        if len(events) == events.maxlen:
            self._num_dropped += 1
        events.append(event)
        self._num_received += 1
        self._ready.set()

    def _end(self) -> None:
        self._closed = True
        with contextlib.suppress(RuntimeError):  # a reader's event loop may have been closed before: nobody waits there
            self._ready.set()

    def _settle(self) -> None:
        if not self._events and not self._closed:
            self._ready.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            await self._ready.wait()  # another reader may have taken the event in the meantime: look again
        event = self._events.popleft()
        self._settle()
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class StepBus:
    """Hands each published event to all observers and subscriptions. Owned by the engine; one thread, its event loop's.

    Observers are plain functions, called inside `publish()`: they must be quick. One that raises is logged and removed,
    so a broken observer can neither stop a step nor fill the log. The lists are replaced rather than changed, so an
    observer may add or remove observers while an event is being published.
    """

    __slots__ = ("_closed", "_observers", "_subscriptions")

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()
        self._subscriptions: tuple[Subscription, ...] = ()
        self._closed = False

    @property
    def has_observers(self) -> bool:
        """Whether anybody listens. If not, the engine need not build events."""
        return bool(self._observers or self._subscriptions)

    def publish(self, event: Event) -> None:
        """Hand `event` to everybody. Never waits and never raises."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("an observer of the step bus failed on %s and was removed: %r", type(event).__name__, observer)
                self.remove_observer(observer)
        for subscription in self._subscriptions:
            subscription._push(event)

    def add_observer(self, observer: Observer) -> None:
        """Call `observer(event)` for each event from now on."""
        if not self._closed:
            self._observers = (*self._observers, observer)

    def remove_observer(self, observer: Observer) -> None:
        """Undo `add_observer`; an unknown one is ignored (a failing observer may be gone already)."""
        self._observers = tuple(other for other in self._observers if other != observer)

    def subscribe(self, maxlen: int = DEFAULT_MAXLEN) -> Subscription:
        """A subscription that holds up to `maxlen` unread events. On a closed bus it ends at once."""
        subscription = Subscription(self, maxlen=maxlen)
        if self._closed:
            subscription._end()
        else:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions = tuple(other for other in self._subscriptions if other is not subscription)

    def close(self) -> None:
        """End all subscriptions (their readers still get what is buffered) and forget the observers. Idempotent."""
        self._closed = True
        subscriptions, self._subscriptions, self._observers = self._subscriptions, (), ()
        for subscription in subscriptions:
            subscription._end()
