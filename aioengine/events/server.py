"""Publishes an engine's events on a socket, to any number of viewers, none of which can slow it down or harm it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioengine.errors import AioEngineError, ConfigError
from aioengine.events.address import TcpAddress, UnixAddress, bind, parse_address, remove_socket_file
from aioengine.events.bus import StepBus
from aioengine.events.discovery import AUTO, Announcement, announce, auto_address
from aioengine.events.socket_protocol import (
    MAX_COMMAND_BYTES,
    Command,
    Hello,
    Reply,
    Welcome,
    decode_client_line,
    encode_line,
)
from aioengine.events.sources.base import EngineControl, Gap
from aioengine.events.step_event import EngineSnapshot, Event
from aioengine.events.wire import WireError, WireHeader, encode, encode_header
from aioengine.printable import get_logger

logger = get_logger(__name__)

MAX_VIEWERS = 16
_MAX_BUFFERED_BYTES = 4 << 20  # a viewer; some seconds of events of 256 requests
_MAX_WRITE_BYTES = 256 << 10
_WRITE_INTERVAL_S = 0.05  # a viewer that draws ten times a second gains nothing from more, and each write costs the loop
_GAP_INTERVAL_S = 0.25  # between two snapshots for a viewer that is always too slow
_COMMAND_INTERVAL_S = 0.02
_HELLO_TIMEOUT_S = 5.0


class EventServer:
    """Listens at an address; created before the engine, so that a bad address fails early, and started with it.

    address: a path for a Unix socket, which its owner alone can use, or "tcp:HOST:PORT", which needs a `token`; "auto" is a
    socket in the folder where `aioengine top` looks. Once it is started it can be found there, whatever its address.
    include_text: prompts and outputs travel too, where the events have them.

    An event is encoded once for all viewers. Each has a bounded buffer; when it is full, what is in it is dropped and
    counted, and the viewer gets a `Gap` and a snapshot as soon as it reads again. A line that is no command ends the
    viewer's connection. Raises ConfigError if the address cannot be used.
    """

    def __init__(self, address: str | Path, *, token: str | None = None, include_text: bool = False) -> None:
        self.address = parse_address(auto_address() if address == AUTO else address)
        if isinstance(self.address, TcpAddress) and not token:
            raise ConfigError(f"publishing at {self.address} needs a token: whoever reaches the port could read along")
        try:
            self._token = None if token is None else token.encode()
        except UnicodeEncodeError as exc:
            raise ConfigError(f"the token for {self.address} is not valid Unicode at position {exc.start}") from None
        self._include_text = include_text
        self._socket = bind(self.address)
        if isinstance(self.address, TcpAddress):  # port 0 means: any free one
            self.address = TcpAddress(self.address.host, self._socket.getsockname()[1])
        self._inode = self.address.path.stat().st_ino if isinstance(self.address, UnixAddress) else 0
        self._bus: StepBus | None = None
        self._server: asyncio.Server | None = None
        self._header_line = b""
        self._snapshot: Callable[[], EngineSnapshot] | None = None
        self._control: EngineControl | None = None
        self._viewers: set[_Viewer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._has_failed = False
        self._announcement: Announcement | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def num_dropped(self) -> int:
        """Events that the present viewers did not get."""
        return sum(viewer.num_dropped for viewer in self._viewers)

    async def start(
        self, *, bus: StepBus, header: WireHeader, snapshot: Callable[[], EngineSnapshot], control: EngineControl | None = None
    ) -> None:
        """Let viewers in. Whoever has connected since `__init__` has waited for this. `control`: None forbids commands."""
        self._bus, self._snapshot, self._control = bus, snapshot, control
        self._header_line = encode_header(header)
        if isinstance(self.address, UnixAddress):
            self._server = await asyncio.start_unix_server(self._on_connect, sock=self._socket, limit=MAX_COMMAND_BYTES)
        else:
            self._server = await asyncio.start_server(self._on_connect, sock=self._socket, limit=MAX_COMMAND_BYTES)
        where = self.address
        self._announcement = announce(str(where.path.absolute() if isinstance(where, UnixAddress) else where), header)

    async def close(self) -> None:
        """End all connections, after one attempt to send what is buffered, and remove the socket file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._withdraw()
        if self._server is not None:
            self._server.close()
        else:
            self._socket.close()
        for viewer in list(self._viewers):
            viewer.flush()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if isinstance(self.address, UnixAddress):
            remove_socket_file(self.address.path, self._inode)

    def abandon(self) -> None:
        """Free the address without waiting: in the event loop, or after it was closed. Viewers find their connection ended."""
        if self._closed:
            return
        self._closed = True
        self._withdraw()
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for viewer in self._viewers:
            viewer.cut()
        if isinstance(self.address, UnixAddress):
            remove_socket_file(self.address.path, self._inode)

    def _withdraw(self) -> None:
        """Nobody finds it any more, and no event is taken in."""
        if self._announcement is not None:
            self._announcement.withdraw()
        if self._bus is not None:
            self._bus.remove_observer(self._on_event)

    # ------------------------------------------------------------------ events out
    def _on_event(self, event: Event) -> None:
        """Called by the bus. Observes only while somebody is connected. Never raises: viewers get a snapshot instead."""
        try:
            line = encode(event, include_prompts=self._include_text)
        except Exception:
            self._log_failure("an event could not be encoded")
            for viewer in self._viewers:
                viewer.lose(1)
            return
        for viewer in self._viewers:
            viewer.push(line)

    def snapshot_line(self) -> bytes | None:
        """The full state now; None if it cannot be had, which may pass."""
        assert self._snapshot is not None
        try:
            return encode(self._snapshot(), include_prompts=self._include_text)
        except Exception:
            self._log_failure("a snapshot could not be made")
            return None

    def _log_failure(self, what: str) -> None:
        """Once: what is wrong with one event may be wrong with every further one."""
        if not self._has_failed:
            self._has_failed = True
            logger.exception("%s for the viewers of %s; they get a snapshot as soon as there is one", what, self.address)

    def _add_viewer(self, viewer: _Viewer) -> None:
        # Nothing is awaited in between: the snapshot is the state right before the first event that follows it.
        snapshot = self.snapshot_line()
        viewer.push(self._header_line + encode_line(Welcome(control=self._control is not None, can_read=True)) + (snapshot or b""))
        if snapshot is None:
            viewer.lose(1)
        if not self._viewers:
            assert self._bus is not None
            self._bus.add_observer(self._on_event)
        self._viewers.add(viewer)

    def _remove_viewer(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._bus is not None:
            self._bus.remove_observer(self._on_event)

    # ------------------------------------------------------------------ connections
    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        except (OSError, WireError, ValueError, EOFError, TimeoutError) as exc:
            # ValueError: a line longer than the limit. All of these are the viewer's doing.
            logger.debug("a viewer of %s is gone: %s: %s", self.address, type(exc).__name__, exc)
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(RuntimeError):  # the event loop was closed around this
                writer.transport.abort()  # close() would wait for a viewer that does not read

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._token is not None and not await self._is_welcome(reader):
            writer.write(encode_line(Reply(0, error="the token is wrong")))
            await asyncio.wait_for(writer.drain(), _HELLO_TIMEOUT_S)
            return
        if len(self._viewers) >= MAX_VIEWERS:
            writer.write(encode_line(Reply(0, error=f"{MAX_VIEWERS} viewers are attached, which is the most")))
            await asyncio.wait_for(writer.drain(), _HELLO_TIMEOUT_S)
            return
        viewer = _Viewer(self, writer)
        self._add_viewer(viewer)
        sending = asyncio.create_task(viewer.send(), name="aioengine-viewer")
        reading = asyncio.create_task(self._read(reader, viewer), name="aioengine-viewer-commands")
        try:
            done, _ = await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._remove_viewer(viewer)
            if not sending.get_loop().is_closed():  # else nothing runs, and nothing can be awaited
                for task in (sending, reading):
                    task.cancel()
                await asyncio.gather(sending, reading, return_exceptions=True)

    async def _is_welcome(self, reader: asyncio.StreamReader) -> bool:
        assert self._token is not None
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            message = decode_client_line(await reader.readuntil(b"\n"))
        return isinstance(message, Hello) and hmac.compare_digest((message.token or "").encode(), self._token)

    # ------------------------------------------------------------------ commands in
    async def _read(self, reader: asyncio.StreamReader, viewer: _Viewer) -> None:
        """Ends when the viewer leaves; raises for a line that is no message."""
        while line := await reader.readline():
            message = decode_client_line(line)
            if isinstance(message, Command):
                viewer.reply(encode_line(await self._run(message)))
            await asyncio.sleep(_COMMAND_INTERVAL_S)  # a flood of them waits in the viewer's own socket

    async def _run(self, command: Command) -> Reply:
        if self._control is None:
            return Reply(command.id, error="this engine takes no commands: it was not started with allow_events_control=True")
        try:
            return Reply(command.id, result=await run_command(self._control, command))
        except (AioEngineError, TypeError, ValueError, ArithmeticError) as exc:
            return Reply(command.id, error=str(exc) or type(exc).__name__)


async def run_command(control: EngineControl, command: Command) -> Any:
    """Do what a command asks for. Raises TypeError for wrong arguments, and what the control raises."""
    arguments = command.arguments
    match command.action:
        case "pause":
            return await control.pause()
        case "resume":
            return await control.resume()
        case "step":
            return await control.step()
        case "abort":
            return await control.abort(str(arguments.get("request_id")))
        case "submit":
            return await control.submit(
                str(arguments.get("prompt", "")),
                max_tokens=int(arguments.get("max_tokens", 64)),
                temperature=float(arguments.get("temperature", 0.0)),
                chat=arguments.get("chat") is True,
            )
        case "read":
            return await control.read(str(arguments.get("request_id")))


class _Viewer:
    """One connection's buffer. Lines are shared between viewers; only references are kept here."""

    __slots__ = ("_lines", "_num_bytes", "_num_lost", "_ready", "_replies", "_server", "_writer", "num_dropped")

    def __init__(self, server: EventServer, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._writer = writer
        self._lines: deque[bytes] = deque()
        self._replies: list[bytes] = []
        self._num_bytes = 0
        self._num_lost = 0  # since the last snapshot
        self._ready = asyncio.Event()
        self.num_dropped = 0

    def push(self, line: bytes) -> None:
        if self._num_lost:
            self.lose(1)  # a snapshot will tell what this one would have
            return
        if self._lines and self._num_bytes + len(line) > _MAX_BUFFERED_BYTES:
            self.lose(len(self._lines) + 1)
            self._lines.clear()
            self._num_bytes = 0
            return
        self._lines.append(line)
        self._num_bytes += len(line)
        self._ready.set()

    def reply(self, line: bytes) -> None:
        """Never dropped: there is one for each command, and commands are slow to come."""
        self._replies.append(line)
        self._ready.set()

    def lose(self, count: int) -> None:
        """Events will not be sent: a snapshot is, as soon as the viewer reads."""
        self._num_lost += count
        self.num_dropped += count
        self._ready.set()

    async def send(self) -> None:
        """Write what comes, at the viewer's speed. Ends with an error when the connection breaks."""
        writer = self._writer
        while True:
            await self._ready.wait()
            pause = _WRITE_INTERVAL_S
            if self._num_lost:
                snapshot = self._server.snapshot_line()
                if snapshot is not None:
                    gap = Gap(self._num_lost)
                    self._num_lost = 0
                    self.push(encode_line(gap) + snapshot)
                pause = _GAP_INTERVAL_S
            if writer.is_closing():  # uvloop does not let a closed transport be written to
                raise ConnectionResetError("the viewer is gone")
            replies, self._replies = self._replies, []
            writer.write(b"".join(replies) + self._take(_MAX_WRITE_BYTES))
            if not self._lines and not self._num_lost and not self._replies:
                self._ready.clear()
            await writer.drain()
            if not self._lines:
                await asyncio.sleep(pause)

    def _take(self, max_bytes: int) -> bytes:
        lines: list[bytes] = []
        size = 0
        while self._lines and (not lines or size + len(self._lines[0]) <= max_bytes):
            line = self._lines.popleft()
            lines.append(line)
            size += len(line)
        self._num_bytes -= size
        return b"".join(lines)

    def flush(self) -> None:
        """Hand the rest to the kernel as far as it takes it, without waiting."""
        if not self._num_lost and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write(self._take(_MAX_BUFFERED_BYTES))

    def cut(self) -> None:
        """End the connection, whether or not there is an event loop that knows of it."""
        connection = self._writer.get_extra_info("socket")
        if connection is not None:  # else the event loop has closed it, as uvloop does
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
