"""Connections with bounds that the HTTP server itself does not set: size and time of a request's head, and of doing nothing."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 10.0

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes a connection whose request has a head of more than 64 KiB or 100 fields, or one that is not there after 10 s."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        if not self._is_refused:
            super().on_headers_complete()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if not self._is_refused and (self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS):
            self._is_refused = True
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self.transport.close()
