"""Publishing on a socket: what viewers get, and that none of them can harm the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.errors import AioEngineError, ConfigError
from aioengine.events import server as server_module
from aioengine.events.bus import StepBus
from aioengine.events.server import EventServer
from aioengine.events.socket_protocol import Command, Hello, Reply, decode_client_line, decode_server_line, encode_line
from aioengine.events.sources.base import ConnectionFailed, ControlError, Gap, SourceStatus, StepSource
from aioengine.events.sources.live import live_source
from aioengine.events.sources.open import open_source
from aioengine.events.sources.socket import SocketSource
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent, StepResultEvent
from aioengine.events.wire import WireError, WireHeader
from aioengine.testing import FakeExecutor, FakeTokenizer
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import state_to_json
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def make_engine(path: Path | str | None, *, forward_s: float = 0.001, **options: Any) -> AsyncEngine:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 2000, "block_size": 4}
    executor = FakeExecutor(num_blocks=4001, block_size=4, forward_s=forward_s)
    return AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), events=path, **{**small, **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "e.sock"


def exists(path: Path) -> bool:
    return path.exists()


def mode_of(path: Path) -> int:
    return path.stat().st_mode


@contextlib.asynccontextmanager
async def watching(source: StepSource, state: DashboardState) -> AsyncIterator[list[Any]]:
    items: list[Any] = []

    async def consume() -> None:
        async for item in source:
            items.append(item)
            state.apply(item)

    async with source:
        task = asyncio.create_task(consume())
        try:
            yield items
        finally:
            task.cancel()
            await asyncio.wait([task])
    if not task.cancelled() and task.exception() is not None:
        raise task.exception()  # type: ignore[misc]


async def generate(engine: AsyncEngine, *, num_requests: int = 4, max_tokens: int = 20) -> None:
    await engine.generate_batch(
        [[i] * 9 for i in range(num_requests)], SamplingParams(max_tokens=max_tokens, temperature=0), progress=False
    )


# ---------------------------------------------------------------------------------------------------- what viewers get
async def test_a_viewer_gets_the_header_a_snapshot_and_then_every_event(path: Path) -> None:
    async with make_engine(path) as engine:
        await generate(engine)
        seen: list[Any] = []
        remote, local = DashboardState(), DashboardState()
        async with watching(SocketSource(str(path)), remote) as items, watching(live_source(engine), local):
            await until(lambda: remote.stats is not None)
            engine.bus.add_observer(seen.append)
            await generate(engine)
            await until(lambda: remote.last_event_time == seen[-1].time == local.last_event_time)
            assert isinstance(items[0], SourceStatus)
            assert isinstance(items[1], WireHeader)
            assert isinstance(items[3], EngineSnapshot)
            assert [item.step_id for item in items if isinstance(item, StepEvent)] == [e.step_id for e in seen if isinstance(e, StepEvent)]
            assert remote.status.state == local.status.state == "live"
            assert remote.totals == local.totals
            newest = slice(4)  # what ended before differs by what was still to be cleaned up when each attached
            assert state_to_json(remote)["finished"][newest] == state_to_json(local)["finished"][newest]


async def test_two_viewers_attach_detach_and_attach_again(path: Path) -> None:
    async with make_engine(path) as engine:
        first, second, third = DashboardState(), DashboardState(), DashboardState()
        async with watching(SocketSource(str(path)), first):
            await generate(engine)
            async with watching(SocketSource(str(path)), second):
                await until(lambda: second.stats is not None)
                await generate(engine)
                await until(lambda: first.last_event_time == second.last_event_time and first.num_in_flight == 0)
            assert engine.bus.has_observers
        await until(lambda: not engine.bus.has_observers)  # nothing is encoded for nobody
        await generate(engine)
        async with watching(SocketSource(str(path)), third):
            await until(lambda: third.last_step_id > first.last_step_id)
        assert second.since_attach.num_steps < first.since_attach.num_steps
        assert second.totals == first.totals


async def test_a_viewer_comes_back_when_the_engine_does(path: Path) -> None:
    state = DashboardState()
    engine = make_engine(path)
    await engine.start()
    async with watching(SocketSource(str(path)), state):
        await generate(engine)
        await engine.shutdown()
        await until(lambda: state.status.state == "lost")
        assert state.is_stale
        assert not exists(path)
        async with make_engine(path) as other:
            await until(lambda: state.status.state == "live")
            assert state.last_step_id == 0
            await generate(other)
            await until(lambda: state.totals.num_finished == 4)


async def test_without_reconnect_the_stream_ends_with_the_engine(path: Path) -> None:
    engine = make_engine(path)
    await engine.start()
    async with SocketSource(str(path), reconnect=False) as source:
        await engine.shutdown()
        items = [item async for item in source]
    assert isinstance(items[-1], EngineSnapshot)


async def test_text_is_published_only_when_asked_for(path: Path) -> None:
    for publish in (False, True):
        state = DashboardState()
        async with make_engine(path, publish_text=publish) as engine, watching(SocketSource(str(path)), state):
            await until(lambda: state.stats is not None)  # noqa: B023
            outputs = [output async for output in engine.generate("a secret", SamplingParams(max_tokens=8, temperature=0))]
            await until(lambda: bool(state.finished))  # noqa: B023
            (row,) = state.finished.values()
            assert row.prompt == ("a secret" if publish else None)
            assert row.text == (outputs[-1].text if publish else None)


# ---------------------------------------------------------------------------------------------------- the address
async def test_the_socket_belongs_to_its_owner_alone_and_is_removed(path: Path) -> None:
    old = os.umask(0)
    try:
        async with make_engine(path):
            assert stat.S_IMODE(mode_of(path)) == 0o600
            assert stat.S_ISSOCK(mode_of(path))
    finally:
        os.umask(old)
    assert not exists(path)


async def test_a_stale_socket_file_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with make_engine(path):
        state = DashboardState()
        async with watching(SocketSource(str(path)), state):
            await until(lambda: state.stats is not None)


async def test_a_socket_in_use_is_left_alone(path: Path) -> None:
    async with make_engine(path) as first:
        with pytest.raises(ConfigError, match="another engine listens"):
            await make_engine(path).start()
        assert exists(path)
        await generate(first)


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        EventServer(path)
    assert path.read_text() == "precious"


async def test_a_socket_file_of_another_process_is_not_removed(path: Path) -> None:
    server = EventServer(path)
    os.unlink(path)
    other = EventServer(path)
    await server.close()
    assert exists(path)
    await other.close()
    assert not exists(path)


@pytest.mark.parametrize("address", ["tcp:", "tcp:host", "tcp:host:port", "tcp:host:99999", "x" * 200])
def test_impossible_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        EventServer(address, token="t")


def test_a_missing_engine_is_told_with_its_address(path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=r"e\.sock"):
        open_source(path, make_state=DashboardState)


async def test_tcp_needs_the_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        EventServer("tcp:127.0.0.1:0")
    server = EventServer("tcp:127.0.0.1:0", token="right")
    async with make_engine(None) as engine:
        await server.start(bus=engine.bus, header=engine.wire_header, snapshot=engine.snapshot)
        state = DashboardState()
        async with watching(SocketSource(str(server.address), token="right"), state):
            await until(lambda: state.stats is not None)
        for hello in (encode_line(Hello("wrong")), encode_line(Hello()), b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)  # type: ignore[union-attr]
            writer.write(hello)
            received = await reader.read()
            assert b"header" not in received
            assert b"snapshot" not in received
            writer.transport.abort()
        with pytest.raises(AioEngineError, match="token is wrong"):
            async with SocketSource(str(server.address), token="wrong", reconnect=False) as source:
                [item async for item in source]
        await server.close()


# ---------------------------------------------------------------------------------------------------- bad viewers
def start_viewer(path: Path) -> subprocess.Popen[bytes]:
    """Another process that attaches and reads all it gets."""
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r}); print('on', flush=True)\nwhile s.recv(65536): pass"
    viewer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == b"on\n"
    return viewer


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_BUFFERED_BYTES", 64 << 10)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_viewer_that_is_killed_or_stopped_does_not_hold_the_engine(path: Path, sent: signal.Signals, small_buffers: None) -> None:
    async with make_engine(path) as engine:
        viewer = await asyncio.to_thread(start_viewer, path)
        try:
            await until(lambda: engine.bus.has_observers)
            server = engine._life.publisher._server
            assert server is not None
            running = asyncio.create_task(generate(engine, max_tokens=600))
            await asyncio.sleep(0.1)
            viewer.send_signal(sent)
            await asyncio.wait_for(running, 30)
            if sent == signal.SIGSTOP:
                (held,) = server._viewers
                assert held._num_bytes <= 64 << 10
                assert server.num_dropped > 0
                viewer.send_signal(signal.SIGCONT)
                await until(lambda: not held._num_lost)
            else:
                await until(lambda: server.num_viewers == 0)
        finally:
            viewer.kill()
            await asyncio.to_thread(viewer.communicate)


async def test_a_slow_reader_gets_a_gap_and_a_snapshot_and_is_right_again(path: Path, small_buffers: None) -> None:
    async with make_engine(path) as engine:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        connection.setblocking(False)
        await until(lambda: engine.bus.has_observers)
        published: list[Event] = []
        engine.bus.add_observer(published.append)
        await generate(engine, max_tokens=800)  # far more than the buffers of both sides hold
        state = DashboardState()
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        await generate(engine, max_tokens=3)
        gaps: list[Gap] = []
        num_received = -1  # the snapshot that everybody begins with is no event
        while num_received + state.num_dropped < len(published):
            item = decode_server_line(await asyncio.wait_for(reader.readuntil(b"\n"), 10))
            if isinstance(item, Gap):
                gaps.append(item)
                following = decode_server_line(await reader.readuntil(b"\n"))
                assert isinstance(following, EngineSnapshot)
                state.apply(item)
                assert state.is_stale
                state.apply(following)
            elif isinstance(item, (StepEvent, StepResultEvent, EngineSnapshot)):
                num_received += 1
                state.apply(item)
            elif isinstance(item, WireHeader):
                state.apply(item)
        assert gaps
        assert num_received + state.num_dropped == len(published), "what is lost is counted to the last event"
        assert state.last_step_id == engine.snapshot().step_id
        assert state.num_dropped == sum(gap.num_dropped for gap in gaps) > 0
        assert not state.out_of_sync
        assert state.requests == {}
        assert state.blocks.num_used == 0
        writer.transport.abort()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe" * 1000 + b"\n",
        b"{}\n",
        b"[" * 100_000 + b"\n",
        b'{"type":"command"}\n',
        b'{"type":"command","id":1,"action":"explode"}\n',
        b'{"type":"command","id":"x","action":"pause"}\n',
        b'{"type":"command","id":1,"action":"pause","arguments":3}\n',
        b'{"type":"hello","token":7}\n',
        b"x" * (3 << 20),
    ],
    ids=lambda garbage: repr(garbage[:20]),
)
async def test_garbage_ends_its_senders_connection_and_nothing_else(path: Path, garbage: bytes) -> None:
    async with make_engine(path, allow_events_control=True) as engine:
        good = DashboardState()
        async with watching(SocketSource(str(path)), good):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(garbage)
            with contextlib.suppress(OSError):
                await asyncio.wait_for(writer.drain(), 5)
                await asyncio.wait_for(reader.read(1 << 24), 5)
                while await asyncio.wait_for(reader.read(1 << 20), 5):
                    pass
            writer.transport.abort()
            await generate(engine)
            await until(lambda: good.totals.num_finished == 4)
            assert not engine.is_paused


async def test_a_flood_of_commands_is_slowed_down(path: Path) -> None:
    async with make_engine(path) as engine:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"".join(encode_line(Command(number, "pause")) for number in range(1, 20_000)))
        start = time.monotonic()
        await generate(engine, max_tokens=100)
        assert time.monotonic() - start < 10
        writer.transport.abort()


async def test_there_is_a_limit_to_the_number_of_viewers(path: Path) -> None:
    async with make_engine(path) as engine:
        server = engine._life.publisher._server
        assert server is not None
        connections = [await asyncio.open_unix_connection(path) for _ in range(server_module.MAX_VIEWERS)]
        await until(lambda: server.num_viewers == server_module.MAX_VIEWERS)
        with pytest.raises(AioEngineError, match="viewers are attached"):
            async with SocketSource(str(path), reconnect=False) as source:
                [item async for item in source]
        for _, writer in connections:
            writer.transport.abort()


async def test_an_engine_that_never_starts_leaves_no_socket(path: Path) -> None:
    bus = StepBus()
    server = EventServer(path)
    await server.close()
    assert not exists(path)
    assert not bus.has_observers


# ---------------------------------------------------------------------------------------------------- commands
async def test_commands_from_a_viewer(path: Path) -> None:
    state = DashboardState()
    async with make_engine(path, allow_events_control=True, publish_text=True) as engine:
        source = SocketSource(str(path))
        async with watching(source, state):
            await until(lambda: source.engine is not None)
            control = source.engine
            assert control is not None
            await control.pause()
            assert engine.is_paused
            await until(lambda: state.paused)
            first = await control.submit("x" * 20, max_tokens=5)
            second = await control.submit("y" * 20, max_tokens=500)
            await until(lambda: {first, second} <= state.requests.keys())
            assert state.last_step_id == 0
            assert [await control.step() for _ in range(3)] == [1, 2, 3]
            await until(lambda: state.num_in_flight == 0 and state.last_step_id == 3)
            assert await control.abort(second)
            assert not await control.abort(second)
            assert not await control.abort("nobody")
            await control.resume()
            await until(lambda: {first, second} <= state.finished.keys())
            assert state.finished[first].finish_reason == "length"
            assert state.finished[second].finish_reason == "abort"
            assert state.finished[first].prompt == "x" * 20
            answer = await control.read(first)
            assert answer == (state.finished[first].text, True)
            assert await control.read("nobody") is None
            chat = await control.submit("hello", max_tokens=3, chat=True)
            await until(lambda: chat in state.finished)
            assert state.finished[chat].prompt == FakeTokenizer().apply_chat_template([{"role": "user", "content": "hello"}])
            with pytest.raises(ControlError, match="pause"):
                await control.step()
            with pytest.raises(ControlError, match="max_tokens"):
                await control.submit("x", max_tokens=0)


async def test_no_command_is_taken_unless_allowed(path: Path) -> None:
    async with make_engine(path) as engine:
        source = SocketSource(str(path))
        async with watching(source, state := DashboardState()):
            await until(lambda: state.stats is not None)
            assert source.engine is None
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_line(Command(5, "pause")))
        while b'"reply"' not in (line := await asyncio.wait_for(reader.readline(), 5)):
            assert line, "the connection was ended without an answer"
        assert b"takes no commands" in line
        assert not engine.is_paused
        writer.transport.abort()


async def test_a_prompt_that_is_no_text_is_refused_by_the_viewers_side(path: Path) -> None:
    async with make_engine(path, allow_events_control=True), SocketSource(str(path)) as source:
        async for item in source:
            if isinstance(item, SourceStatus) and item.state == "live":
                break
        assert source.engine is not None
        with pytest.raises(ControlError, match="not valid Unicode"):
            await source.engine.submit("a\ud800")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"type":"command","id":true,"action":"pause"}', "id: Expected `int`, got `bool`"),
        (b'{"type":"command","id":1,"action":"dance"}', "action: Invalid enum value 'dance'"),
        (b'{"type":"command","id":1,"action":"abort","arguments":["a"]}', "arguments: Expected `object`"),
        (b'{"type":"command","id":1,"action":"abort","loud":1}', "unknown field `loud`"),
        (b'{"type":"command","id":1}', "missing required field `action`"),
        (b'{"type":"hello","token":7}', "token: Expected `str | null`"),
        (b'{"type":"welcome","control":true}', "Invalid value 'welcome'"),
        (b"[]", "Expected `object`"),
        (b"hello", "not a message"),
        (b"[" * 100_000, "not a message"),
    ],
)
def test_a_viewers_line_that_is_wrong_is_named(line: bytes, message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        decode_client_line(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"type":"gap","num_dropped":"many"}', "num_dropped: Expected `int`, got `str`"),
        (b'{"type":"welcome","control":"yes"}', "control: Expected `bool`"),
        (b'{"type":"reply","id":1,"result":5,"error":5}', "error: Expected `str | null`"),
    ],
)
def test_an_engines_line_that_is_wrong_is_named(line: bytes, message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        decode_server_line(line)
    assert decode_server_line(encode_line(Reply(1, {"a": [1, None]}))) == Reply(1, {"a": [1, None]})
