"""`aioengine bench serve --base-url`, against a server of ours without a model and against ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from aioengine.cli import main
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, ConfigError
from aioengine.testing import FakeTokenizer
from aioengine_bench.client import RequestFailed
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.http_client import HttpClient
from aioengine_bench.serve import result_keys, serve
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import DatasetSpec, RemoteSpec, SaveOptions
from tests.bench.conftest import FakeHost
from tests.server.sockets import KEY, serving

DATASET = DatasetSpec(name="random", num_prompts=6, input_len=20, output_len=12)


def settings_for(url: str, path: Path, **changes: Any) -> ServeSettings:
    remote: dict[str, Any] = {name: changes.pop(name) for name in ("backend", "model", "send_text") if name in changes}
    save = SaveOptions(output_json=str(path), detailed=True)
    return ServeSettings(
        config=EngineConfig(model="fake"),
        dataset=DATASET,
        save=save,
        remote=RemoteSpec(base_url=url, **remote),
        disable_progress=True,
        **changes,
    )


async def measured(url: str, path: Path, **changes: Any) -> dict[str, Any]:
    settings = settings_for(url, path, **changes)
    await serve(settings, FakeHost().host())
    return read(path)


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_a_server_is_measured_under_the_keys_of_an_engine(tmp_path: Path, backend: str, suffix: str) -> None:
    async with serving({"tokens_per_s": 500}) as served:
        result = await measured(f"http://127.0.0.1:{served.port}{suffix}", tmp_path / "r.json", backend=backend)
    assert set(result_keys(settings_for("http://x", tmp_path / "r.json"))) <= set(result)
    assert (result["completed"], result["failed"], result["backend"], result["model_id"]) == (6, 0, backend, "fake")
    assert result["total_output_tokens"] == 6 * 12
    assert result["output_lens"] == [12] * 6
    assert result["median_tpot_ms"] > 1.5
    assert result["endpoint"] == ("/v1/completions" if backend == "openai" else "/v1/chat/completions")
    if backend == "openai":
        assert result["total_input_tokens"] == 6 * 20


async def test_token_counts_are_the_servers_where_events_hold_several(tmp_path: Path) -> None:
    """A slow reader, or a server that merges, has fewer events than tokens."""
    text = b"".join(b'data: {"choices":[{"index":0,"text":"%d","finish_reason":null}]}\n\n' % i for i in range(3))
    end = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":5}}}\n\ndata: [DONE]\n\n'
    async with answering(text + end + usage) as url:
        chunks = [chunk async for chunk in client_of(url).send(REQUEST, request_id="a")]
    assert [chunk.num_tokens for chunk in chunks] == [1, 1, 10]
    assert "".join(chunk.text for chunk in chunks) == "012"
    assert chunks[-1].num_cached_tokens == 5


async def test_the_usage_may_come_with_the_finish_reason() -> None:
    """As llama.cpp's server sends it, which holds back tokens that end inside a character: the last event has no text."""
    text = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}],"usage":{"completion_tokens":0}}\n\n' * 2
    usage = b'"usage":{"completion_tokens":12,"prompt_tokens_details":{"cached_tokens":5}}'
    end = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}],' + usage + b"}\n\ndata: [DONE]\n\n"
    async with answering(text + end) as url:
        chunks = [chunk async for chunk in client_of(url).send(REQUEST, request_id="a")]
    assert [chunk.num_tokens for chunk in chunks] == [1, 11]
    assert chunks[-1].num_cached_tokens == 5


@pytest.mark.parametrize(("answered", "num_connections"), [(b"", 3), (b"HTTP/1.1 2", 1)])
async def test_a_kept_connection_that_the_server_closes_is_opened_anew_once(answered: bytes, num_connections: int) -> None:
    """Only where nothing was answered on it, and only once: the third request finds a server that closes every connection."""
    event = b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}],"usage":{"completion_tokens":12}}\n\n'
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(event) + event
    answers = iter([whole, answered, whole, b""] if not answered else [whole, answered])
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while answer := await read_and_answer(reader, next(answers, b"")):
            writer.write(answer)
            if answer is not whole:
                break
        writer.close()

    async def read_and_answer(reader: asyncio.StreamReader, answer: bytes) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return answer

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert [chunk.num_tokens async for chunk in client.send(REQUEST, request_id="a")] == [12]
        if not answered:
            assert [chunk.num_tokens async for chunk in client.send(REQUEST, request_id="b")] == [12]
        with pytest.raises(RequestFailed, match="broke off"):
            await anext(client.send(REQUEST, request_id="c"))
        await client.close()
    assert connections == num_connections


async def test_an_event_is_stamped_when_its_last_byte_arrives(tmp_path: Path) -> None:
    async with serving({"answers": [{"text": "abcdefghij", "tokens_per_s": 50}]}) as served:
        loop, times = asyncio.get_running_loop(), []
        client = client_of(f"http://127.0.0.1:{served.port}")
        async for chunk in client.send(BenchRequest([97] * 4, 10), request_id="a"):
            assert chunk.time is not None
            times.append(chunk.time)
        await client.close()
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert len(times) == 10
        assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.02, abs=0.01)
        assert loop.time() >= times[-1]


REQUEST = BenchRequest([97, 98, 99], 12)


def client_of(url: str, **options: Any) -> HttpClient:
    return HttpClient(RemoteSpec(base_url=url, **options), model="fake", tokenizer=FakeTokenizer())


@contextlib.asynccontextmanager
async def answering(body: bytes, *, head: bytes | None = None) -> AsyncIterator[str]:
    """A server that answers everything with these bytes, and then closes."""
    start = head if head is not None else b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start + body)
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


GOOD = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "body", "words"),
    [
        (None, GOOD + b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (None, GOOD, "broke off"),
        (None, GOOD + b"data: [DONE]\n\n", "finish_reason"),
        (None, GOOD + b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\ndata: [DONE]\n\n', "2 of 12"),
        (None, b"data: {nonsense\n\n", "no JSON"),
        (None, b"data: 5\n\n", "no object"),
        (CHUNKED, b"40\r\n" + GOOD[:20], "broke off"),
        (b"HTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\n", b"busy", "HTTP 503: busy"),
        (b"HTTP/1.1 400 X\r\ncontent-length: 30\r\n\r\n", b'{"error":{"message":"bad wish"}', "HTTP 400"),
        (b"", b"", "broke off"),
    ],
)
async def test_whatever_goes_wrong_in_a_stream_is_a_failure(head: bytes | None, body: bytes, words: str) -> None:
    async with answering(body, head=head) as url:
        with pytest.raises(RequestFailed, match=words):
            async for _ in client_of(url).send(REQUEST, request_id="a"):
                pass


async def test_errors_of_the_script_are_counted_and_named(tmp_path: Path) -> None:
    script = {
        "answers": [
            {"times": 1, "text": "warm"},
            {"times": 2, "error": {"status": 429, "message": "slow down"}},
            {"times": 1, "text": "abcdef", "fail_after_tokens": 3},
        ]
    }
    async with serving(script) as served:
        result = await measured(f"http://127.0.0.1:{served.port}", tmp_path / "r.json")
    assert (result["completed"], result["failed"]) == (3, 3)
    assert any("slow down" in reason for reason in result["failure_reasons"])
    assert any("script lets it fail" in reason for reason in result["failure_reasons"])


async def test_the_key_comes_from_the_environment_and_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(settings={"api_key": KEY}) as served:
        url = f"http://127.0.0.1:{served.port}"
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
            await measured(url, tmp_path / "r.json")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        result = await measured(url, tmp_path / "r.json", send_text=True)
    assert result["completed"] == 6
    assert KEY not in (tmp_path / "r.json").read_text()


async def test_what_cannot_be_measured_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    async with serving(max_model_len=24) as served:
        url = f"http://127.0.0.1:{served.port}"
        with pytest.raises(ConfigError, match="it serves fake"):
            await measured(url, tmp_path / "r.json", model="other")
        with pytest.raises(ConfigError, match="24"):
            await measured(url, tmp_path / "r.json")
        with pytest.raises(ConfigError, match="cannot reach"):
            await measured("http://127.0.0.1:1", tmp_path / "r.json")
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://me:secret@x"):
        with pytest.raises(ConfigError):
            RemoteSpec(base_url=url)
    async with answering(b"", head=b"") as url:
        with pytest.raises(AioEngineError, match="cannot reach"):
            await measured(url, tmp_path / "r.json")


def test_options_that_would_do_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in (
        (["--backend", "openai-chat"], "--base-url"),
        (["--send-text"], "--base-url"),
        (["--base-url", "http://x", "--max-num-seqs", "4"], "--max-num-seqs"),
        (["--base-url", "http://x", "--record", "f"], "--record"),
        (["--base-url", "http://x", "--backend", "openai-chat", "--send-text"], "--send-text"),
        (["--base-url", "nonsense"], "nonsense"),
    ):
        assert main(["bench", "serve", *options]) == 2
        assert word in capsys.readouterr().err


async def test_the_rate_is_the_arrival_process_of_the_in_process_mode(tmp_path: Path) -> None:
    from aioengine_bench.arrivals import ArrivalProcess

    async with serving() as served:
        arrivals = ArrivalProcess(request_rate=100.0, burstiness=math.inf)
        result = await measured(f"http://127.0.0.1:{served.port}", tmp_path / "r.json", arrivals=arrivals, max_concurrency=2)
    assert result["start_times"][-1] >= 0.045
    assert result["request_rate"] == 100.0
