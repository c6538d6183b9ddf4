"""A client that closes its connection, noticed while nobody reads from it; and bytes for one that is there, written at once.

On this package's own `Server` the connection says so itself (`Direct`). On any other one a task waits for `http.disconnect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from aioengine.server.interruption import Interruption

_EXTENSION = "aioengine.direct"


class Direct(Protocol):
    """The connection of one request. on_lost: called when it is closed."""

    on_lost: Callable[[], None] | None

    @property
    def is_lost(self) -> bool: ...

    @property
    def send(self) -> object:
        """What the app was given to send with."""

    def write(self, part: bytes) -> bool:
        """Write a part of the body that has begun; False, and nothing is written, if the client is slow to take what there is."""


def offer_direct(scope: Scope, direct: Direct) -> None:
    scope.setdefault("extensions", {})[_EXTENSION] = direct


def keep_direct(scope: Scope, send: Send) -> None:
    """Withdraw the offer where another program stands between the server and this app: it may do something with what is sent."""
    direct = direct_of(scope)
    if direct is not None and direct.send != send:
        del scope["extensions"][_EXTENSION]


def direct_of(scope: Scope) -> Direct | None:
    extensions = scope.get("extensions")
    direct: Direct | None = None if extensions is None else extensions.get(_EXTENSION)
    return direct


class UntilClientLeaves(Interruption):
    """A context that raises ClientDisconnect when the client closes its connection. The body of its request was read before."""

    __slots__ = ("_direct", "_receive", "_watch")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(ClientDisconnect)
        self._direct = direct_of(scope)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        direct = self._direct
        if direct is None:
            self._watch = asyncio.create_task(self._until_disconnect())
        elif direct.is_lost:
            raise ClientDisconnect
        else:
            direct.on_lost = self.interrupt
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self._direct is not None:
            self._direct.on_lost = None
        if self._watch is not None:
            self._watch.cancel()
        super().__exit__(kind, exc, traceback)

    async def _until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt()
