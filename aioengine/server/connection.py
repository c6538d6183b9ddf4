"""Connections with bounds that the HTTP server itself does not set: how many there are, how large and how late a request's head may
be, and how long a client may neither send what it announced nor take what it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from aioengine.errors import ConfigError
from aioengine.server.leaving import offer_direct

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
_FRAMING_PER_BODY_BYTE = 16  # a chunk of one byte needs five more to frame it

_VERSIONS = ("1.0", "1.1")  # without any it is 0.9, which has neither headers nor a status
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """max_connections: at once. head_timeout_s: from the first byte of a request to the end of its head.

    linger_s: for the rest of a body that nobody reads, after the answer. stall_timeout_s: how long a client may take nothing
    of what is written to it, and how long a connection that was closed may stay open because of that.
    """

    max_connections: int = 1024
    head_timeout_s: float = 10.0
    linger_s: float = 5.0
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"max_connections must be at least 1, got {self.max_connections}")


class Connections:
    """The connections of one server, at most as many as its limits say.

    Where there is no room, a newcomer takes the place of the one that has been idle longest (it sends no whole request), so
    that connections which only stand there keep nobody out. If all are being answered, the newcomer is turned away.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.num_turned_away = 0
        self._idle: dict[BoundedProtocol, None] = {}  # in the order in which they became idle
        self._busy: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def admit(self, connection: BoundedProtocol) -> bool:
        """Take in a new connection; False if there is no room for it."""
        if len(self) >= self.limits.max_connections:
            self.num_turned_away += 1
            if not self._idle:
                return False
            oldest = next(iter(self._idle))
            self.forget(oldest)
            oldest.give_up()
        self._idle[connection] = None
        return True

    def note(self, connection: BoundedProtocol, *, busy: bool) -> None:
        """The connection has a request that is being answered, or it has none any more."""
        if connection in self._idle or connection in self._busy:  # else it was given up
            self.forget(connection)
            (self._busy if busy else self._idle)[connection] = None

    def forget(self, connection: BoundedProtocol) -> None:
        self._idle.pop(connection, None)
        self._busy.pop(connection, None)


class DirectConnection:
    """What the connection of one request can do for an app without a task of its own; see `leaving.Direct`."""

    __slots__ = ("_cycle", "_flow", "_transport", "on_lost")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._flow = flow
        self._transport = transport
        self.on_lost: Callable[[], None] | None = None

    @property
    def is_lost(self) -> bool:
        return self._cycle.disconnected

    @property
    def send(self) -> object:
        return self._cycle.send

    def write(self, part: bytes) -> bool:
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1 with the bounds of `ConnectionLimits`.

    A request's head has at most 64 KiB and 100 fields (431 else); what is neither head nor body, such as chunk extensions and
    trailers, is counted too. A request that comes before the previous one was answered is not looked at: the connection is
    closed after that answer, and the client sends it again.
    """

    def __init__(self, *args: Any, book: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._book = book
        self._deadline: asyncio.TimerHandle | None = None  # for the client to send something
        self._stall: asyncio.TimerHandle | None = None  # for the client to take something
        self._is_deaf = False  # nothing that still comes is looked at
        self._in_head = True
        self._in_message = False  # between the first byte of a request and its last
        self._began = False  # a request began in the block of bytes at hand
        self._head_bytes = 0
        self._num_fields = 0
        self._body_bytes = 0
        self._other_bytes = 0  # came in whole blocks, and were no body
        self._direct: DirectConnection | None = None  # of the request at hand

    # ------------------------------------------------------------------ the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._book.admit(self):
            self._expect_within(self._book.limits.head_timeout_s)
        else:
            self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._book.forget(self)
        self._expect_nothing()
        self._cancel_stall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._direct is not None and self._direct.on_lost is not None:
            self._direct.on_lost()

    def give_up(self) -> None:
        """Close at once, whatever has not been sent or read."""
        self._is_deaf = True
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._in_message and self._deadline is None:
            self._expect_within(self._book.limits.head_timeout_s)
        self._began = False
        super().data_received(data)
        # A block in which a request began holds the end of another, perhaps: it is counted from the next block on.
        self._other_bytes = 0 if self._began else self._other_bytes + len(data)
        if self._other_bytes > MAX_HEAD_BYTES + _FRAMING_PER_BODY_BYTE * self._body_bytes:
            self._refuse(_TOO_LARGE)

    # ------------------------------------------------------------------ what the parser finds
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = self._in_head = self._in_message = True
        self._head_bytes = self._num_fields = self._body_bytes = self._other_bytes = 0
        self._expect_within(self._book.limits.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        if not self._is_deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._count_head(len(name) + len(value))
        if self._in_head and not self._is_deaf:  # a trailer is no header: who wrote the head may not be who wrote it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_nothing()
        if self._is_deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._is_deaf = True
            return
        if self.parser.get_http_version() not in _VERSIONS:
            self.send_400_response("HTTP/1.0 and HTTP/1.1 are spoken here.")
            return
        self._book.note(self, busy=True)
        super().on_headers_complete()  # the app runs in a task, which has not begun yet
        self._direct = DirectConnection(self.cycle, self.flow, self.transport)
        scope: Any = self.scope
        offer_direct(scope, self._direct)

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            self._body_bytes += len(body)
            self._other_bytes -= len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        self._in_message = False
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its body was there
            self._expect_within(self.timeout_keep_alive)

    # ------------------------------------------------------------------ answers
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._book.note(self, busy=False)
        if self.transport.is_closing():
            self._start_stall()
        elif self._in_message:
            # Closing now could take the answer from a client that is still sending.
            self._expect_within(self._book.limits.linger_s)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.give_up()  # in the middle of another answer
            return
        self._is_deaf = True
        super().send_400_response(msg)
        self._start_stall()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_stall()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._start_stall()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_stall()

    # ------------------------------------------------------------------ bounds
    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_fields > MAX_HEADERS:
            self._refuse(_TOO_LARGE)

    def _refuse(self, answer: bytes) -> None:
        if self._is_deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.give_up()  # in the middle of another answer
            return
        self._is_deaf = True
        self._expect_nothing()
        self.transport.write(answer)
        self.transport.close()
        self._start_stall()

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._is_late)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        self._is_deaf = True
        self.transport.close()
        self._start_stall()

    def _start_stall(self) -> None:
        if self._stall is None:
            self._stall = self.loop.call_later(self._book.limits.stall_timeout_s, self.give_up)

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
