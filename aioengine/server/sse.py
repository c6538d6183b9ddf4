"""Server-sent events: a response that is written as it comes, and given up when nobody takes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aioengine.errors import AioEngineError
from aioengine.printable import get_logger
from aioengine.server.errors import RequestError, error_object, problem_of
from aioengine.server.limits import SendWatch

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
    """

    def __init__(self, make: Callable[[int, str], Any]) -> None:
        self._make = make
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            head, _, tail = event(self._make(index, _MARK)).rpartition(_ENCODER.encode(_MARK))
            around = self._around[index] = (head, tail)
        return around[0] + _ENCODER.encode(text) + around[1]


def error_event(exc: BaseException) -> bytes:
    """After the status line an error can only be told within the stream, in the same form."""
    return event(error_object(problem_of(exc)))


class EventStream(Response):
    """Sends what `events` yields. The generator is closed when it ends, when the client leaves, and when it stops reading.

    describe: the last event of a stream that fails.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        send_timeout_s: float,
        headers: Mapping[str, str] | None = None,
        describe: Any = error_event,
    ) -> None:
        self._events = events
        self._send_timeout_s = send_timeout_s
        self._describe = describe
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not writing.done():
                writing.cancel()
                await asyncio.wait([writing])
        if not writing.cancelled() and (exc := writing.exception()) is not None:
            raise exc

    async def _write(self, send: Send) -> None:
        watch = SendWatch(self._send_timeout_s)
        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for part in events:
                        watch.begin()
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                        watch.end()
                except (AioEngineError, RequestError) as exc:
                    await send({"type": "http.response.body", "body": self._describe(exc), "more_body": True})
                except OSError:
                    raise
                except Exception as exc:
                    logger.exception("a stream failed")
                    await send({"type": "http.response.body", "body": self._describe(exc), "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client left: there is nobody to tell
        finally:
            watch.close()
            if watch.expired:
                logger.info("a client took nothing for %g s: its stream is given up", self._send_timeout_s)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
