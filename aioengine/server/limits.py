"""Bodies and readers within bounds: a body has a size and a time, and who stops reading is cut off."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.requests import ClientDisconnect, Request

from aioengine.server.errors import RequestError
from aioengine.server.interruption import Interruption

MAX_NUM_CONTAINERS = 1 << 18
MAX_NUM_ITEMS = 1 << 14
_TOKEN_FIELDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})


def check_num_values(body: bytes) -> None:
    """Raise RequestError if the body may hold more lists and objects than the loop can make in a moment: {},{},{}, ...

    Brackets within texts count too: it takes a millisecond, and megabytes of them are no prompt.
    """
    if len(body) > MAX_NUM_CONTAINERS and body.count(b"{") + body.count(b"[") > MAX_NUM_CONTAINERS:
        raise RequestError(400, f"the body holds more than {MAX_NUM_CONTAINERS} lists and objects")


def check_num_items(value: object) -> None:
    """Raise RequestError if a field holds more than anybody writes; token ids are the engine's to judge."""
    for name in getattr(value, "__struct_fields__", ()):
        items = getattr(value, name)
        if isinstance(items, (list, dict)) and len(items) > MAX_NUM_ITEMS and name not in _TOKEN_FIELDS:
            raise RequestError(400, f"{name} holds {len(items)} entries, at most {MAX_NUM_ITEMS} are allowed", param=name)


class BodyBudget:
    """The bytes of all bodies that are being read, together: many large ones at once would fill the memory."""

    __slots__ = ("max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises RequestError (503) if that many more are too many."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise RequestError(503, f"bodies of more than {self.max_bytes} bytes arrive at once: try again later", kind="server_error")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


async def read_body(request: Request, *, max_bytes: int, timeout_s: float, budget: BodyBudget) -> bytes:
    """The whole body, chunked or not. Raises RequestError (413, 408, 503), and ClientDisconnect where the client left."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                budget.take(len(part))
                body += part
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {timeout_s:g} s", kind="timeout_error") from None
    finally:
        budget.give_back(len(body))
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"the body is larger than {max_bytes} bytes")


class SendWatch(Interruption):
    """A context that raises TimeoutError when one `send` has taken longer than `timeout_s`: its reader takes nothing.

    One timer a stream, not one a send: a timeout around every event would cost more than the event.
    """

    __slots__ = ("_loop", "_since", "_timer", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        super().__init__(TimeoutError)
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the send that is under way began
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self.timeout_s, self._look)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().__exit__(kind, exc, traceback)

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self.timeout_s:
            self.interrupt()
        else:
            self._timer = self._loop.call_later(self.timeout_s - waited, self._look)


__all__ = ["BodyBudget", "ClientDisconnect", "SendWatch", "check_num_items", "check_num_values", "read_body"]
