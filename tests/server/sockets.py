"""A server over real sockets in the test's own event loop, and clients that send it whatever bytes they like."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from aioengine.server import ServerSettings, create_app
from aioengine.server.connection import ConnectionLimits
from aioengine.server.fake import ScriptedEngine
from aioengine.server.run import Server, bind
from aioengine.server.script import Script, parse_script
from tests.waiting import until

KEY = "a-key-for-tests-0123456789"


@dataclass(slots=True)
class Served:
    """A running server."""

    engine: ScriptedEngine
    app: Starlette
    server: Server
    port: int
    opened: list[Connection] = field(default_factory=list)

    async def connect(self, *, limit: int = 1 << 20) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        connection = Connection(reader, writer)
        self.opened.append(connection)
        return connection

    async def hang_up(self, connections: Sequence[Connection]) -> None:
        """Close them from the client's side."""
        for connection in connections:
            with contextlib.suppress(AttributeError):  # asyncio's, of one that is closed already
                connection.writer.transport.abort()
        for connection in connections:
            with contextlib.suppress(OSError):
                await connection.writer.wait_closed()

    async def exchange(self, request: bytes, *, timeout_s: float = 5.0) -> Answer:
        """Send `request` on a connection of its own and read one answer."""
        async with await self.connect() as connection:
            await connection.send(request)
            return await connection.answer(timeout_s=timeout_s, has_body=not request.startswith(b"HEAD"))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None, *, timeout_s: float = 10.0) -> Answer:
        return await self.exchange(http("POST", path, body, headers), timeout_s=timeout_s)

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.exchange(http("GET", path, None, headers))

    async def is_well(self) -> bool:
        """It lives, and answers a request as always."""
        health = await self.get("/health")
        answer = await self.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"authorization": f"Bearer {KEY}"})
        return (health.status, answer.status) == (200, 200)


@dataclass(slots=True)
class Answer:
    """status 0: the connection was closed without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """As much as the server takes before it closes."""
        with contextlib.suppress(OSError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self, *, timeout_s: float = 5.0, has_body: bool = True) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(has_body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(0)

    async def _answer(self, has_body: bool) -> Answer:
        status_line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        answer = Answer(int(status_line.split()[1]), headers)
        if not has_body or answer.status == 204:
            return answer
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                answer.body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        elif length := int(headers.get("content-length", "0")):
            answer.body = await self.reader.readexactly(length)
        return answer

    async def is_closed(self, *, within_s: float) -> bool:
        """The server has closed it; what it still sends before that is thrown away."""
        try:
            async with asyncio.timeout(within_s):
                while await self.reader.read(65536):
                    pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True


def http(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request; a body that is no bytes is sent as JSON."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "127.0.0.1", **({"content-length": str(len(content))} if body is not None else {}), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content


@asynccontextmanager
async def serving(
    script: Script | dict[str, Any] | None = None,
    *,
    limits: ConnectionLimits | None = None,
    app: Any = None,
    settings: Mapping[str, Any] | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """settings: of `ServerSettings`. app: made of the server's own app, to mount it. options: of the engine."""
    if isinstance(script, dict):
        script = parse_script(json.dumps(script))
    async with ScriptedEngine(script=script, **{"enable_prefix_caching": False, **options}) as engine:
        own = create_app(engine, ServerSettings(**(settings or {})))
        sockets = bind("127.0.0.1", 0)
        if send_buffer is not None:
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # and of the connections
        port = sockets[0].getsockname()[1]
        server = Server(own if app is None else app(own), sockets, limits=limits)
        task = asyncio.create_task(server.serve())
        served = Served(engine, own, server, port)
        try:
            await until(lambda: server.is_listening)
            yield served
        finally:
            await served.hang_up(served.opened)
            await engine.shutdown()
            server.stop()
            await task
