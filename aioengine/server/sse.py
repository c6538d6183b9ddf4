"""Server-sent events: a response that is written as it comes, and given up when nobody takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.errors import AioEngineError
from aioengine.printable import get_logger
from aioengine.server.delivery import Delivery, StreamEvents
from aioengine.server.errors import RequestError, error_object, problem_of
from aioengine.server.leaving import UntilClientLeaves, direct_of
from aioengine.server.limits import SendWatch
from aioengine.server.service import Service
from aioengine.server.started import Started

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()
_MARK = "<the text>"


def event(value: Any, *, name: str | None = None) -> bytes:
    """One event with `value` as JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _ENCODER.encode(value) + b"\n\n"


class TextEvents:
    """Events that differ in one text alone, as nearly all of a stream do: what surrounds it is encoded once.

    make: the value of an event with this index and text. Nothing behind the text in it may hold a text of the client's.
    name: of the events.
    """

    def __init__(self, make: Callable[[int, str], Any], *, name: str | None = None) -> None:
        self._make = make
        self._name = name
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            head, _, tail = event(self._make(index, _MARK), name=self._name).rpartition(_ENCODER.encode(_MARK))
            around = self._around[index] = (head, tail)
        return around[0] + _ENCODER.encode(text) + around[1]


class OpenAIEvents:
    """What the events of OpenAI's streams have in common (of `StreamEvents`)."""

    def begin(self) -> bytes:
        return b""

    def fail(self, exc: Exception) -> bytes:
        """After the status line an error can only be told within the stream, in the same form."""
        return event(error_object(problem_of(exc)))

    def close(self) -> None:
        """There is nothing to clear up."""


class EventStream(Response):
    """Sends what `events` say of the generations in `started`. These are ended when it ends, when the client leaves, and when it
    stops reading.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, started: Sequence[Started], events: StreamEvents) -> None:
        self._service = service
        self._started = started
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = direct_of(scope)
        delivery = Delivery(self._started, self._events, self._service.deliveries, None if direct is None else direct.write)
        watch = SendWatch(self._service.settings.send_timeout_s)
        self._service.turnstile.num_streams += 1
        try:
            with UntilClientLeaves(scope, receive), watch:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._write(delivery, watch, send)
        except TimeoutError:
            logger.info("a client took nothing for %g s: its stream is given up", watch.timeout_s)
        except (OSError, ClientDisconnect):
            pass  # the client left: there is nobody to tell
        finally:
            self._service.turnstile.num_streams -= 1
            self._events.close()
            for one in self._started:
                await one.close()

    async def _write(self, delivery: Delivery, watch: SendWatch, send: Send) -> None:
        try:
            delivery.begin()
            part = await delivery.next_part()
            while not delivery.is_over:
                watch.begin()
                await send({"type": "http.response.body", "body": part, "more_body": True})
                watch.end()
                part = await delivery.next_part()
        except Exception as exc:
            if not isinstance(exc, (AioEngineError, RequestError)):
                if isinstance(exc, OSError):
                    raise
                logger.exception("a stream failed")
            part = self._events.fail(exc)
        watch.begin()
        await send({"type": "http.response.body", "body": part, "more_body": False})
        watch.end()
