"""Watches an engine in another process, and comes back when it does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

from aioengine.events.address import Address, TcpAddress, parse_address
from aioengine.events.socket_protocol import (
    Action,
    Command,
    Hello,
    Reply,
    ServerLine,
    Welcome,
    decode_server_line,
    encode_line,
)
from aioengine.events.sources.base import ConnectionFailed, ControlError, EngineControl, Gap, ItemStream, SourceStatus, StreamItem
from aioengine.events.step_event import SCHEMA_VERSION, EngineSnapshot, StepEvent, StepResultEvent
from aioengine.events.wire import WireError, WireHeader
from aioengine.printable import get_logger

logger = get_logger(__name__)

_MAX_LINE_BYTES = 64 << 20  # a snapshot of very many blocks is the longest
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 2.0
_REPLY_TIMEOUT_S = 30.0


class SocketSource(ItemStream):
    """A `StepSource` over a socket.

    When the connection breaks it says so (`SourceStatus` "lost"), tries again for as long as it takes, and goes on with a
    header and a snapshot; a `Gap` comes before if it is the same engine. With reconnect=False it ends instead.

    `open()` raises ConnectionFailed if nobody answers at the address.
    """

    playback = None

    def __init__(self, address: str, *, token: str | None = None, reconnect: bool = True) -> None:
        self._address: Address = parse_address(address)
        self.address = str(self._address)
        self._token = token
        self._reconnect = reconnect
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pending: list[StreamItem] = []  # to be yielded before the next line
        self._header: WireHeader | None = None
        self._control: RemoteControl | None = None
        self._clock_offset = 0.0  # engine's perf_counter minus ours; 0 on one machine
        self._closed = False

    # ------------------------------------------------------------------ StepSource
    @property
    def engine(self) -> EngineControl | None:
        """None until the engine has said that it takes commands, and where it does not."""
        return self._control

    def now(self) -> float:
        return time.perf_counter() + self._clock_offset

    async def open(self) -> None:
        await self._connect()
        self._pending.append(SourceStatus("connecting", self.address))

    async def close(self) -> None:
        self._closed = True
        self._disconnect("the viewer was closed")

    async def __anext__(self) -> StreamItem:
        while not self._closed:
            if self._pending:
                return self._pending.pop(0)
            if self._reader is None:
                await self._come_back()
                continue
            try:
                line = await self._reader.readuntil(b"\n")
                version = SCHEMA_VERSION if self._header is None else self._header.schema_version
                item = self._read_line(decode_server_line(line, schema_version=version))
            except (OSError, EOFError, WireError, asyncio.LimitOverrunError, TypeError) as exc:
                self._lose(exc)
                continue
            if item is not None:
                return item
        raise StopAsyncIteration

    # ------------------------------------------------------------------ lines
    def _read_line(self, line: ServerLine) -> StreamItem | None:
        match line:
            case WireHeader():
                return self._note_header(line)
            case Welcome():
                assert self._writer is not None
                self._control = RemoteControl(self._writer, can_read=line.can_read) if line.control else None
                return SourceStatus("live", self.address)
            case Reply():
                if line.id == 0 and line.error is not None:
                    raise WireError(line.error)
                if self._control is not None:
                    self._control.settle_reply(line)
                return None
            case StepEvent() | StepResultEvent() | EngineSnapshot():
                if isinstance(self._address, TcpAddress):
                    # An event cannot arrive before it happened: the largest difference seen is the closest to the truth.
                    self._clock_offset = max(self._clock_offset, line.time - time.perf_counter())
                return line
            case _:
                return line

    def _note_header(self, header: WireHeader) -> StreamItem:
        before, self._header = self._header, header
        if isinstance(self._address, TcpAddress) and (before is None or before.perf_counter != header.perf_counter):
            self._clock_offset = header.perf_counter - time.perf_counter()
        if before is not None and before.perf_counter == header.perf_counter:
            self._pending.append(header)
            return Gap(0, "the connection was lost")
        return header

    # ------------------------------------------------------------------ the connection
    async def _connect(self) -> None:
        try:
            if isinstance(self._address, TcpAddress):
                connecting = asyncio.open_connection(self._address.host, self._address.port, limit=_MAX_LINE_BYTES)
            else:
                connecting = asyncio.open_unix_connection(self._address.path, limit=_MAX_LINE_BYTES)
            self._reader, writer = await asyncio.wait_for(connecting, 10.0)
            self._writer = writer
            if self._token is not None:
                writer.write(encode_line(Hello(self._token)))
        except (OSError, TimeoutError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else type(exc).__name__
            raise ConnectionFailed(f"no engine answers at {self.address}: {reason}") from exc

    async def _come_back(self) -> None:
        delay = _FIRST_RETRY_S
        while not self._closed:
            await asyncio.sleep(delay)
            with contextlib.suppress(ConnectionFailed):
                await self._connect()
                return
            delay = min(2 * delay, _LAST_RETRY_S)

    def _lose(self, exc: Exception) -> None:
        reason = "the engine closed the connection" if isinstance(exc, EOFError) else str(exc) or type(exc).__name__
        self._disconnect(reason)
        if self._closed:
            return
        if self._reconnect:
            self._pending.append(SourceStatus("lost", f"{self.address}: {reason}"))
        else:
            self._closed = True
            raise StopAsyncIteration if self._header is not None else ConnectionFailed(f"{self.address}: {reason}")

    def _disconnect(self, reason: str) -> None:
        if self._control is not None:
            self._control.fail(reason)
            self._control = None
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


class RemoteControl:
    """An `EngineControl` over a connection. Replies are read by the source's iteration, so keep iterating."""

    def __init__(self, writer: asyncio.StreamWriter, *, can_read: bool = True) -> None:
        self._writer = writer
        self._can_read = can_read
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def step(self) -> int | None:
        result = await self._call("step")
        return None if result is None else int(result)

    async def abort(self, request_id: str) -> bool:
        return bool(await self._call("abort", request_id=request_id))

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, chat: bool = False) -> str:
        try:
            prompt.encode()
        except UnicodeEncodeError as exc:  # it would arrive as another text
            raise ControlError(f"submit: the prompt is not valid Unicode: {prompt[exc.start]!r} at position {exc.start}") from None
        return str(await self._call("submit", prompt=prompt, max_tokens=max_tokens, temperature=temperature, chat=chat))

    async def read(self, request_id: str) -> tuple[str, bool] | None:
        if not self._can_read:
            raise ControlError("this engine is older than the answers of prompts that a viewer sent")
        match await self._call("read", request_id=request_id):
            case [str(text), bool(has_ended)]:
                return text, has_ended
            case _:
                return None

    async def _call(self, action: Action, **arguments: Any) -> Any:
        if self._writer.is_closing():
            raise ControlError(f"{action}: the engine cannot be reached")
        command = Command(next(self._ids), action, arguments)
        reply = self._waiting[command.id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(encode_line(command))
            return await asyncio.wait_for(reply, _REPLY_TIMEOUT_S)
        except TimeoutError:
            raise ControlError(f"{action}: the engine did not answer within {_REPLY_TIMEOUT_S:.0f} s") from None
        finally:
            self._waiting.pop(command.id, None)

    def settle_reply(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.id)
        if waiting is None or waiting.done():
            return
        if reply.error is not None:
            waiting.set_exception(ControlError(reply.error))
        else:
            waiting.set_result(reply.result)

    def fail(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ControlError(reason))
