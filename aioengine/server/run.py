"""Serving an app in the running event loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from aioengine.errors import ConfigError
from aioengine.server.connection import BoundedProtocol, ConnectionLimits, Connections

_KEEP_ALIVE_S = 30
_LAST_WORDS_S = 5  # for answers that are complete and not yet sent
_SPARE_FILES = 128  # beside connections: the model, a recording, viewers


def bind(host: str, port: int) -> list[socket.socket]:
    """Take the address without listening yet, one socket for each of the host's addresses. Port 0: any that is free.

    Raises ConfigError if none of them can be used.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"cannot listen at {host!r}: {exc}") from None
    sockets: list[socket.socket] = []
    errors: list[OSError] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as exc:  # a family that this machine does not have
            errors.append(exc)
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            number = sockets[0].getsockname()[1] if sockets else port  # the same one for all, also where it was chosen freely
            sock.bind((address[0], number, *address[2:]))
            sock.setblocking(False)
            sockets.append(sock)
        except OSError as exc:
            sock.close()
            errors.append(exc)
    if not sockets:
        raise ConfigError(f"cannot listen at {host}:{port}: {errors[0].strerror}")
    return sockets


class Server:
    """Serves `app` at `sockets` until it is stopped. Leaves signals to the command that it runs in."""

    def __init__(self, app: ASGIApp, sockets: Sequence[socket.socket], *, limits: ConnectionLimits | None = None) -> None:
        self.connections = Connections(limits or ConnectionLimits())
        _raise_file_limit(self.connections.limits.max_connections)
        protocol: Any = partial(BoundedProtocol, book=self.connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what a client does wrong is no news
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        self._sockets = list(sockets)
        self._server = _Uvicorn(config)

    async def serve(self) -> None:
        """Until `stop()`; then answers that are complete are sent, for a moment. Cancelling does the same."""
        serving = asyncio.create_task(self._server.serve(self._sockets))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait([serving], timeout=2 * _LAST_WORDS_S)
            raise

    def stop(self) -> None:
        self._server.should_exit = True

    @property
    def is_listening(self) -> bool:
        return self._server.started


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(app: ASGIApp, *, host: str, port: int, limits: ConnectionLimits | None = None) -> None:
    """Serve `app` at host:port until this task is cancelled. Raises ConfigError if the address cannot be used."""
    await Server(app, bind(host, port), limits=limits).serve()


def _raise_file_limit(num_connections: int) -> None:
    """Let the process have as many files as it may have connections, if the system allows that many."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
