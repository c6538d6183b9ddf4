"""Replicas as processes, each of which says its own name, so that an answer tells who gave it."""

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
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENS_PER_S = 50


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """`aioengine serve --fake`: the real server and scheduler over a pretended device that says one letter, over and over."""

    def __init__(self, letter: str, folder: Path) -> None:
        self.letter = letter
        script = folder / f"{letter}.json"
        script.write_text(json.dumps({"tokens_per_s": TOKENS_PER_S, "answers": [{"text": letter * 4}]}))
        self.port = free_port()
        command = [sys.executable, "-m", "aioengine", "serve", "--fake", "--script", str(script), "--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
            return bool(response.status == 200)
        return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def wait_for(condition: Callable[[], bool], *, within_s: float = 40.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {within_s:g} s"
        time.sleep(0.05)


def complete(url: str, prompt: str, *, max_tokens: int = 4) -> str:
    """The text of a completion. Raises OSError for any answer but 200."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


class LongRequests:
    """Requests of some seconds each, under way in threads."""

    def __init__(self, url: str, prompts: list[str], *, max_tokens: int) -> None:
        self.ends: list[str] = []  # a letter for each that was answered in full, "-" for each that failed
        self._threads = [threading.Thread(target=self._run, args=(url, prompt, max_tokens)) for prompt in prompts]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, prompt: str, max_tokens: int) -> None:
        try:
            text = complete(url, prompt, max_tokens=max_tokens)
        except OSError:
            self.ends.append("-")
        else:
            assert len(text) == max_tokens
            self.ends.append(text[0])

    def wait(self) -> Counter[str]:
        for thread in self._threads:
            thread.join()
        return Counter(self.ends)


def num_running(replica: Replica) -> int:
    with urllib.request.urlopen(f"{replica.url}/load", timeout=5) as response:
        value: dict[str, Any] = json.load(response)
    return int(value["server_load"])


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **options.pop("env", {})}, **options
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
