"""Serving an app in the running event loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from aioengine.errors import ConfigError
from aioengine.server.connection import BoundedProtocol

DEFAULT_MAX_CONNECTIONS = 1024
_KEEP_ALIVE_S = 30
_LAST_WORDS_S = 5.0  # for answers that are complete and not yet sent


class _Server(uvicorn.Server):
    """Leaves signals to the command that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(app: ASGIApp, *, host: str, port: int, max_connections: int = DEFAULT_MAX_CONNECTIONS) -> None:
    """Serve `app` at host:port until this task is cancelled; then let the answers that are being sent end, for a moment.

    Raises ConfigError if the address cannot be used.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait([serving], timeout=2 * _LAST_WORDS_S)
        raise
    except SystemExit:  # how uvicorn says that it cannot listen
        raise ConfigError(f"cannot listen at {host}:{port}: is the address in use, or not this machine's?") from None
