"""Clients that are slow, endless, many, or make no sense: each is cut off in time, and everybody else is served as always."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aioengine.server.connection import MAX_HEAD_BYTES, MAX_HEADERS, ConnectionLimits
from tests.server.sockets import Connection, Served, http, serving
from tests.waiting import until

QUICK = ConnectionLimits(head_timeout_s=0.4, linger_s=0.3, stall_timeout_s=0.5)
MATE = {"prompt": "mate", "max_tokens": 60, "stream": True, "ignore_eos": True}


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def stream_text(served: Served) -> tuple[str, float]:
    """A mate's answer, and the longest it had to wait for an event."""
    loop = asyncio.get_running_loop()
    async with await served.connect() as connection:
        await connection.send(http("POST", "/v1/completions", MATE))
        text, latest, gap = b"", loop.time(), 0.0
        while b"[DONE]" not in text:
            part = await connection.reader.read(65536)
            assert part, "the mate's stream was cut off"
            text += part
            gap, latest = max(gap, loop.time() - latest), loop.time()
    pieces = [line.split('"text":"')[1].split('"')[0] for line in text.decode().splitlines() if '"text":"' in line]
    return "".join(pieces), gap


@asynccontextmanager
async def with_a_mate(served: Served) -> AsyncIterator[None]:
    """Somebody else streams during the block, and gets what she would have got alone."""
    alone, _ = await stream_text(served)
    assert len(alone) == MATE["max_tokens"]
    mate = asyncio.create_task(stream_text(served))
    try:
        yield
        text, gap = await mate
        assert text == alone
        assert gap < 3, "her stream stood still"
    finally:
        mate.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await mate
    assert await served.is_well()


SLOW = {"tokens_per_s": 60}  # so that the mate's stream lasts a second


def test_the_limits_are_those_that_the_documentation_says() -> None:
    limits = ConnectionLimits()
    assert (limits.max_connections, limits.head_timeout_s, limits.stall_timeout_s) == (1024, 10, 60)


# ---------------------------------------------------------------------------------------------------- slow
async def test_a_head_that_trickles_or_does_not_come_is_cut_off() -> None:
    async with serving(SLOW, limits=QUICK) as served, with_a_mate(served):
        nothing, half, trickle, spaces = [await served.connect() for _ in range(4)]
        await half.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-")

        async def drip(connection: Connection, data: bytes, times: int) -> None:
            for _ in range(times):
                await connection.send(data)
                await asyncio.sleep(0.05)

        drips = [asyncio.create_task(drip(trickle, b"GET /v1/models HTTP/1.1\r\nx-a: b\r\n"[:1], 40))]
        drips.append(asyncio.create_task(drip(spaces, b"\r\n", 40)))
        closed = await asyncio.gather(*(c.is_closed(within_s=2.0) for c in (nothing, half, trickle, spaces)))
        assert closed == [True] * 4
        for task in drips:
            task.cancel()
        await until(lambda: len(served.server.connections) <= 1)  # the mate's


async def test_a_connection_kept_alive_is_not_held_open_by_empty_lines() -> None:
    async with serving(limits=QUICK) as served, await served.connect() as connection:
        await connection.send(http("GET", "/health"))
        assert (await connection.answer()).status == 200
        await connection.send(b"\r\n")  # neither idle nor a request
        assert await connection.is_closed(within_s=2.0)


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_a_body_that_stays_half_is_a_408(framing: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode()
    async with serving(SLOW, limits=QUICK, settings={"read_timeout_s": 0.3}) as served, with_a_mate(served):
        async with await served.connect() as connection:
            await connection.send(head + (b"{" if "length" in framing else b"1\r\n{\r\n"))
            assert (await connection.answer()).status == 408
            assert await connection.is_closed(within_s=2.0), "what is left of the body does not hold it open"
        assert not served.engine.num_unfinished_reqs or served.engine.num_unfinished_reqs == 1


async def test_a_body_that_nobody_reads_does_not_hold_its_connection() -> None:
    async with serving(limits=QUICK) as served:
        for method, path in (("GET", "/v1/models"), ("POST", "/nowhere"), ("DELETE", "/v1/completions")):
            async with await served.connect() as connection:
                await connection.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{{".encode())
                assert (await connection.answer()).status in (200, 404, 405)
                for _ in range(8):
                    await connection.send(b"x")
                    await asyncio.sleep(0.02)
                assert await connection.is_closed(within_s=2.0), path
        assert len(served.server.connections) == 0


async def test_a_client_that_leaves_before_its_body_is_there_leaves_nothing() -> None:
    async with serving() as served:
        for _ in range(20):
            async with await served.connect() as connection:
                await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: len(served.server.connections) == 0)
        assert served.app.state.service.num_open == 0


async def test_a_reader_that_stops_is_cut_off_and_its_request_with_it() -> None:
    long = {"prompt": "x", "max_tokens": 5000, "stream": True, "ignore_eos": True, "logprobs": 10}
    before = rss_bytes()
    async with serving(limits=QUICK, send_buffer=4096) as served:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(http("POST", "/v1/completions", long))
        try:
            await until(lambda: served.engine.num_unfinished_reqs == 1)
            assert await served.is_well()
            await until(lambda: served.engine.num_unfinished_reqs == 0 and len(served.server.connections) == 0, within_s=15)
            assert served.engine.stats().num_used_blocks == 0, "its blocks are free again"
        finally:
            sock.close()
    assert rss_bytes() - before < 64 << 20


@pytest.mark.parametrize("keep", ["close", "keep-alive"])
async def test_a_reader_that_stops_at_the_end_of_an_answer_is_cut_off_too(keep: str) -> None:
    """The whole answer is written, so nobody waits for it any more: only the connection does."""
    async with serving(limits=QUICK, send_buffer=4096) as served:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", served.port))
        body = {"tokens": [97] * 200_000}
        try:
            await asyncio.to_thread(sock.sendall, http("POST", "/detokenize", body, {"connection": keep}))
            await until(lambda: len(served.server.connections) == 1)
            await until(lambda: len(served.server.connections) == 0, within_s=15)
        finally:
            sock.close()


async def test_a_client_that_leaves_frees_its_blocks_within_a_second() -> None:
    async with serving({"tokens_per_s": 200}) as served:
        for stream in (True, False):
            async with await served.connect() as connection:
                await connection.send(
                    http("POST", "/v1/completions", {"prompt": "x" * 100, "max_tokens": 5000, "ignore_eos": True, "stream": stream})
                )
                await until(lambda: served.engine.stats().num_used_blocks > 0)
            await until(lambda: served.engine.stats().num_used_blocks == 0, within_s=1.0)


# ---------------------------------------------------------------------------------------------------- many
async def test_connections_that_only_stand_there_keep_nobody_out() -> None:
    limits = ConnectionLimits(max_connections=50, head_timeout_s=60)
    async with serving(SLOW, limits=limits) as served, with_a_mate(served):
        crowd = [await served.connect() for _ in range(200)]
        for index, connection in enumerate(crowd):
            await connection.send([b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n"][index % 3])
        assert len(served.server.connections) <= 50
        assert await served.is_well(), "a newcomer takes the place of one that is idle"
        assert served.server.connections.num_turned_away >= 150
        await served.hang_up(crowd)


async def test_a_newcomer_is_turned_away_where_everybody_is_being_answered() -> None:
    limits = ConnectionLimits(max_connections=3)
    long = http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True})
    async with serving({"tokens_per_s": 100}, limits=limits) as served:
        busy = [await served.connect() for _ in range(3)]
        for connection in busy:
            await connection.send(long)
            assert (await connection.reader.readline()).startswith(b"HTTP/1.1 200")
        answer = await served.exchange(b"")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        await served.hang_up(busy)
        await until(lambda: len(served.server.connections) == 0)


async def test_a_thousand_connections_at_once() -> None:
    before = rss_bytes()
    async with serving(SLOW) as served, with_a_mate(served):
        crowd = await asyncio.gather(*(served.connect(limit=4096) for _ in range(1000)))
        assert len(served.server.connections) <= 1024
        answers = 0
        for connection in crowd:
            await connection.send(http("GET", "/health"))
        for connection in crowd[-200:]:
            answers += (await connection.answer()).status == 200
        assert answers == 200
        assert rss_bytes() - before < 100 << 20, "both ends of a thousand connections"
        await served.hang_up(crowd)


# ---------------------------------------------------------------------------------------------------- endless
def endless(kind: str) -> tuple[bytes, bytes]:
    """The beginning of a request, and what follows for ever."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    return {
        "target": (b"GET /", b"a" * 4096),
        "method": (b"", b"A" * 4096),
        "header lines": (head, b"x-h: y\r\n" * 512),
        "a header's value": (head + b"x-h: ", b"a" * 4096),
        "a header's name": (head, b"a" * 4096),
        "spaces": (head + b"x-h:", b" " * 4096),
        "empty lines": (b"", b"\r\n" * 2048),
        "a chunk's extension": (chunked + b"1;", b"a" * 4096),
        "a chunk's size": (chunked, b"0" * 4096),
        "a trailer's value": (chunked + b"0\r\nx-h: ", b"a" * 4096),
        "trailers": (chunked + b"0\r\n", b"x-h: y\r\n" * 512),
        "requests": (b"", http("GET", "/health") * 64),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "target",
        "method",
        "header lines",
        "a header's value",
        "a header's name",
        "spaces",
        "empty lines",
        "a chunk's extension",
        "a chunk's size",
        "a trailer's value",
        "trailers",
    ],
)
async def test_what_has_no_end_is_cut_off_and_not_kept(kind: str) -> None:
    begin, more = endless(kind)
    async with serving(limits=ConnectionLimits(head_timeout_s=60), settings={"read_timeout_s": 60}) as served:
        before = rss_bytes()
        async with await served.connect() as connection:
            await connection.send(begin)
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                while num_sent < 32 << 20 and not connection.writer.is_closing() and not connection.reader.at_eof():
                    connection.writer.write(more)
                    await connection.writer.drain()
                    num_sent += len(more)
                    await asyncio.sleep(0)
            assert num_sent < 8 << 20, "the server went on reading"
        assert rss_bytes() - before < 16 << 20
        assert await served.is_well()


async def test_headers_within_the_limits_are_taken_and_those_beyond_are_a_431() -> None:
    async with serving() as served:
        many = {f"x-{index}": "y" for index in range(MAX_HEADERS - 1)}
        assert (await served.get("/health", many)).status == 200
        assert (await served.get("/health", {**many, "x-more": "y", "x-most": "y"})).status == 431
        assert (await served.get("/health", {"x-long": "a" * (MAX_HEAD_BYTES - 200)})).status == 200
        assert (await served.get("/health", {"x-long": "a" * (MAX_HEAD_BYTES + 1)})).status == 431


async def test_requests_that_do_not_wait_for_answers_are_not_piled_up() -> None:
    """One is answered, and the connection closed: the client sends the others again. No answer goes to the wrong request."""
    async with serving({"tokens_per_s": 100}) as served:
        async with await served.connect() as connection:
            slow = http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 20})
            await connection.send(slow + http("GET", "/v1/models") * 2000)
            answer = await connection.answer()
            assert (answer.status, answer.json()["object"]) == (200, "text_completion")
            assert await connection.is_closed(within_s=2.0)
        async with await served.connect() as connection:  # who leaves after that has left: nothing of his goes on
            long = http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5000, "stream": True, "ignore_eos": True})
            await connection.send(long + http("GET", "/v1/models"))
            await connection.reader.readline()
        await until(lambda: served.engine.num_unfinished_reqs == 0, within_s=1.0)


# ---------------------------------------------------------------------------------------------------- bodies
async def test_a_body_that_is_too_large_is_a_413_and_is_not_kept() -> None:
    limit = 8 << 20
    before = rss_bytes()
    async with serving(SLOW) as served, with_a_mate(served):
        told = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {limit + 1}\r\n\r\n".encode()
        assert (await served.exchange(told)).status == 413, "before a byte of it is sent"
        async with await served.connect() as connection:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            sending = asyncio.create_task(send_chunks(connection, b"a" * (1 << 16), 400))
            assert (await connection.answer(timeout_s=10)).status == 413
            sending.cancel()
    assert rss_bytes() - before < 48 << 20


async def send_chunks(connection: Connection, chunk: bytes, times: int) -> None:
    for _ in range(times):
        await connection.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))


async def test_many_large_bodies_at_once_share_a_budget() -> None:
    settings = {"max_body_bytes": 1 << 20, "max_total_body_bytes": 4 << 20}
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 20}\r\n\r\n".encode()
    async with serving(settings=settings) as served:
        crowd = [await served.connect() for _ in range(12)]
        for connection in crowd:
            await connection.send(head + b"a" * ((1 << 20) - 10))
        await until(lambda: served.app.state.service.bodies.num_bytes > 2 << 20)
        assert served.app.state.service.bodies.num_bytes <= 4 << 20
        await until(lambda: any(connection.reader._buffer for connection in crowd))  # type: ignore[attr-defined]
        full = [connection for connection in crowd if connection.reader._buffer]  # type: ignore[attr-defined]
        assert {(await connection.answer()).status for connection in full} == {503}
        await served.hang_up(crowd)
        await until(lambda: served.app.state.service.bodies.num_bytes == 0)
        assert await served.is_well()


# ---------------------------------------------------------------------------------------------------- shapes
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
SHAPES = {
    "length and chunked": POST
    + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "two lengths": POST + b"content-length: 4\r\ncontent-length: 40\r\n\r\n{}{}",
    "a list of lengths": POST + b"content-length: 4, 4\r\n\r\n{}{}",
    "a negative length": POST + b"content-length: -1\r\n\r\n{}",
    "a length with a sign": POST + b"content-length: +2\r\n\r\n{}",
    "a length of many digits": POST + b"content-length: " + b"9" * 40 + b"\r\n\r\n{}",
    "chunked in a list": POST + b"transfer-encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked with a tab": POST + b"transfer-encoding:\x0bchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bad chunk size": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a huge chunk size": POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
    "line feeds alone": b"GET /v1/models HTTP/1.1\nhost: x\n\n",
    "a carriage return in a value": GET + b"x: a\rb\r\n\r\n",
    "a NUL in a value": GET + b"x: a\0b\r\n\r\n",
    "a folded line": GET + b"x: a\r\n b\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nhost: x\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "no HTTP": b"\0" * 100,
    "an unknown method": b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "CONNECT": b"CONNECT evil.example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "TRACE": b"TRACE /v1/models HTTP/1.1\r\nhost: x\r\nx-secret: y\r\n\r\n",
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target that is no URL": b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target of bytes": b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a websocket": GET
    + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: eHh4eHh4eHh4eHh4eHh4eA==\r\n\r\n",
    "an upgrade": GET + b"upgrade: h2c\r\nconnection: upgrade\r\nhttp2-settings: x\r\n\r\n",
    "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
    "an expectation": POST + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n",
}


async def test_requests_of_odd_shapes_are_refused_or_answered_once() -> None:
    async with serving(SLOW, limits=QUICK, settings={"read_timeout_s": 0.3}) as served, with_a_mate(served):
        for name, shape in SHAPES.items():
            async with await served.connect() as connection:
                await connection.send(shape)
                with contextlib.suppress(OSError):
                    connection.writer.write_eof()
                received = b""
                with contextlib.suppress(OSError):
                    async with asyncio.timeout(5):
                        while part := await connection.reader.read(65536):
                            received += part
            assert received.count(b"HTTP/1.1 200") <= (
                name in ("HTTP/1.0", "a websocket", "an upgrade", "line feeds alone", "a folded line")
            ), (name, received)
            assert b"HTTP/1.1 5" not in received, (name, received)
            assert b"101 " not in received, (name, received)
            assert b"x-secret" not in received


async def test_bytes_at_random_kill_nothing() -> None:
    import random

    rng = random.Random(7)
    valid = http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, {"x-a": "b"})
    async with serving(limits=QUICK, settings={"read_timeout_s": 0.2}) as served:

        async def one() -> None:
            data = bytearray(valid)
            for _ in range(rng.randrange(1, 6)):
                place = rng.randrange(len(data))
                data[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
            async with await served.connect() as connection:
                await connection.send(bytes(data))
                with contextlib.suppress(TimeoutError):
                    answer = await connection.answer(timeout_s=3.0)
                    assert answer.status < 500, bytes(data)

        for _ in range(6):
            await asyncio.gather(*(one() for _ in range(50)))
        assert await served.is_well()
