"""A server with the built-in model, for the pages and examples that talk to one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

START_S = 60.0


@pytest.fixture(scope="session")
def server_port() -> Iterator[int]:
    """The port of `aioengine serve smollm2`."""
    port = free_port()
    command = (sys.executable, "-m", "aioengine", "serve", "smollm2", "--port", str(port))
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE) as process:
        try:
            wait_until_healthy(port, process)
            yield port
        finally:
            process.terminate()
            process.communicate(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        assert time.monotonic() < deadline, f"the server does not answer within {START_S:g} s"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
