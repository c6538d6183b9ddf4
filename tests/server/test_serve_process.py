"""`aioengine serve --fake` as a process of its own: keys, signals, addresses, and what runs beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aioengine.cli import main
from tests.server.sockets import KEY

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A served engine and what it has said so far."""

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aioengine", "serve", "--fake", "--port", "0", *options],
            cwd=ROOT,
            env={**os.environ, "AIOENGINE_API_KEY": "", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    @property
    def url(self) -> str:
        self.wait_for(lambda: any("serving" in line for line in self.said))
        line = next(line for line in self.said if "serving" in line)
        return line.split(" at ")[1].split("/v1")[0].replace("0.0.0.0", "127.0.0.1")

    def wait_for(self, condition: Any, *, within_s: float = 30.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "".join(self.said)
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.01)

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(20)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for file in (self.process.stdout, self.process.stderr):
            assert file is not None
            file.close()


@contextmanager
def process(*options: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    running = Process(*options, env=env)
    try:
        yield running
    finally:
        running.close()


def written(path: Path, num_tokens: int) -> str:
    """A script with an answer of so many tokens, 50 a second."""
    path.write_text(json.dumps({"tokens_per_s": 50, "answers": [{"text": "a" * num_tokens}]}))
    return str(path)


@pytest.fixture
def script(tmp_path: Path) -> str:
    return written(tmp_path / "script.json", 60)


@pytest.fixture
def long_script(tmp_path: Path) -> str:
    return written(tmp_path / "long.json", 3000)


def chat(url: str, **options: Any) -> dict[str, Any]:
    return {"url": f"{url}/v1/chat/completions", "json": {"messages": [{"role": "user", "content": "hi"}], **options}, "timeout": 20}


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.text = ""
        self.begun = threading.Event()
        self._url = url
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", **chat(self._url, stream=True)) as response:
            for part in response.iter_text():
                self.text += part
                self.begun.set()


# ---------------------------------------------------------------------------------------------------- the key
def test_the_key_comes_from_a_file_or_the_environment_and_is_never_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    for options, env in ((("--api-key-file", str(tmp_path / "key")), {}), ((), {"AIOENGINE_API_KEY": KEY})):
        with process(*options, env=env) as served:
            assert httpx.get(served.url + "/v1/models").status_code == 401
            assert httpx.get(served.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
            assert httpx.get(served.url + "/health").status_code == 200
            assert KEY not in Path(f"/proc/{served.process.pid}/cmdline").read_text()
            assert served.end() == 0
            assert KEY not in "".join(served.said)


def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "script.json").write_text('{"answers": [{"txt": "x"}]}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, key, words in (
            (("--port", port), "", ("cannot listen", port, "in use")),
            (("--host", "0.0.0.0"), "", ("0.0.0.0", "--api-key-file", "--no-auth")),
            (("--host", "::"), "", ("::", "--no-auth")),
            (("--host", "192.0.2.1", "--no-auth"), "", ("cannot listen", "192.0.2.1")),
            (("--host", "no such host", "--no-auth"), "", ("cannot listen", "no such host")),
            (("--port", "70000"), "", ("70000",)),
            (("--max-connections", "0"), "", ("max_connections",)),
            (("--api-key-file", str(tmp_path / "empty")), "", ("empty",)),
            (("--api-key-file", str(tmp_path / "none")), "", ("none",)),
            ((), "short", ("8 printable",)),
            (("--script", str(tmp_path / "script.json")), "", ("script.json", "txt", "answers")),
            (("--script", str(tmp_path / "none.json")), "", ("none.json",)),
            (("--max-num-seqs", "0"), "", ("max_num_seqs",)),
        ):
            monkeypatch.setenv("AIOENGINE_API_KEY", key)
            assert main(["serve", "--fake", *options]) == 2, options
            said = capsys.readouterr().err
            assert said.count("\n") == 1, (options, said)
            for word in words:
                assert word in said, (options, said)


def test_a_server_that_is_open_to_others_says_so_aloud() -> None:
    with process("--host", "0.0.0.0", "--no-auth") as served:
        assert httpx.get(served.url + "/v1/models").status_code == 200
        assert "NO API KEY" in "".join(served.said)
        assert served.end() == 0


# ---------------------------------------------------------------------------------------------------- the end
def test_sigterm_lets_streams_end_and_refuses_what_is_new(script: str) -> None:
    with process("--script", script) as served:
        url = served.url
        stream = Stream(url)
        assert stream.begun.wait(10)
        with httpx.Client() as waiting:
            assert waiting.get(url + "/health").status_code == 200
            served.process.send_signal(signal.SIGTERM)
            served.wait_for(lambda: any("SIGTERM" in line for line in served.said))
            health = waiting.get(url + "/health")
            assert health.status_code == 503, "at once, on connections old and new"
            assert httpx.get(url + "/health").status_code == 503
            refused = httpx.post(**chat(url))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"]
        assert served.process.wait(20) == 0
        stream.join()
        assert stream.text.count('"content":"a"') == 60
        assert "[DONE]" in stream.text


def test_a_second_signal_stops_at_once(long_script: str) -> None:
    with process("--script", long_script) as served:
        stream = Stream(served.url)
        assert stream.begun.wait(10)
        served.process.send_signal(signal.SIGTERM)
        served.wait_for(lambda: any("SIGTERM" in line for line in served.said))
        start = time.monotonic()
        assert served.end() == 143
        assert time.monotonic() - start < 5
        stream.join()
        assert "[DONE]" not in stream.text
        assert "error" in stream.text, "the client is told"


def test_ctrl_c_stops_at_once_and_idle_servers_stop_at_once(long_script: str) -> None:
    with process("--script", long_script) as served:
        stream = Stream(served.url)
        assert stream.begun.wait(10)
        assert served.end(signal.SIGINT) == 130
        stream.join()
        assert "Traceback" not in "".join(served.said)
    with process() as served:
        assert served.url
        start = time.monotonic()
        assert served.end() == 0
        assert time.monotonic() - start < 5


# ---------------------------------------------------------------------------------------------------- beside it
def test_top_and_a_recording_show_a_served_engine(tmp_path: Path, script: str) -> None:
    address, recording = str(tmp_path / "events.sock"), tmp_path / "steps.jsonl"
    with process("--script", script, "--events", address, "--record", str(recording)) as served:
        stream = Stream(served.url)
        assert stream.begun.wait(10)
        command = [sys.executable, "-m", "aioengine", "top", address, "--once", "--json"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert '"num_running' in shown.stdout or '"running' in shown.stdout
        assert served.end() == 0
        stream.join()
    lines = recording.read_text().splitlines()
    assert any("chatcmpl-" in line for line in lines)
    assert "hi" not in {word for line in lines for word in line.split('"')}, "prompts travel as lengths"


def test_a_fake_server_needs_no_torch() -> None:
    code = """
import asyncio, sys
from aioengine.cli import build_parser
from aioengine.commands import serve
from aioengine.server.fake import ScriptedEngine
async def main():
    async with ScriptedEngine() as engine:
        serve.create_app(engine, serve.ServerSettings())
        async for output in engine.generate("x"):
            pass
        assert output.text
asyncio.run(main())
heavy = {"torch", "transformers", "textual", "rich", "triton"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
