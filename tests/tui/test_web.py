"""`aioengine top --web`: who may connect, and the dashboard in a real headless browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.events.recording.writer import StepRecorder
from aioengine.events.step_event import StepEvent, StepResultEvent
from tests.tui.support import HEADER, busy_items

aiohttp = pytest.importorskip("aiohttp", reason="textual-serve is not installed (aioengine[web])")
pytest.importorskip("textual_serve", reason="textual-serve is not installed (aioengine[web])")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        (None, "localhost:8000", True),
        ("https://example.com", "localhost:8000", False),
        ("http://localhost:9000", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("http://rebound.example:8000", "rebound.example:8000", False),
    ],
)
def test_pages_of_other_sites_may_not_connect(origin: str | None, host: str, allowed: bool) -> None:
    from aioengine.commands.top_web import is_same_site

    assert is_same_site(origin, host, loopback_only=True) is allowed


def start(command: list[str]) -> subprocess.Popen[bytes]:
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_for_url(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(200):
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@pytest.mark.slow
async def test_the_dashboard_in_a_browser(tmp_path: Path) -> None:
    browser = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no chromium or chrome is installed")
    recording = tmp_path / "steps.jsonl"
    with StepRecorder(recording, HEADER) as recorder:
        for item in busy_items():
            if isinstance(item, StepEvent | StepResultEvent):
                recorder(item)
    port, debug_port = free_port(), free_port()
    server = start([sys.executable, "-m", "aioengine", "top", str(recording), "--web", "--port", str(port)])
    chrome = None
    try:
        await wait_for_url(f"http://localhost:{port}/")
        await _refused(port)
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,700"]
        chrome = start([browser, *options, f"--remote-debugging-port={debug_port}", "about:blank"])
        await wait_for_url(f"http://127.0.0.1:{debug_port}/json/version")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{debug_port}/json/list") as response:
                pages = await response.json(content_type=None)
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as connection:
                page = Page(connection)
                await page.send("Network.enable")
                await page.send("Page.navigate", url=f"http://localhost:{port}/")
                await page.wait_for(lambda text: "step 27" in text)
                await page.press_until("2", lambda text: "last 27 steps" in text)
    finally:
        for process in (chrome, server):
            if process is not None:
                process.terminate()
                process.wait(timeout=20)


async def _refused(port: int) -> None:
    """A page of another site is turned away before a dashboard is started for it."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as info:
            await session.ws_connect(f"http://localhost:{port}/ws?width=80&height=24", origin="https://example.com")
        assert info.value.status == 403


class Page:
    """A browser page over the DevTools protocol: commands out, the text of its WebSocket frames in."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._number = 0
        self.text = ""

    async def send(self, method: str, **params: Any) -> None:
        self._number += 1
        await self._connection.send_str(json.dumps({"id": self._number, "method": method, "params": params}))

    async def press_until(self, digit: str, condition: Callable[[str], bool]) -> None:
        """Press a key, again and again: the page takes keys a moment after it shows the first text."""
        key = {"key": digit, "code": f"Digit{digit}", "windowsVirtualKeyCode": ord(digit)}
        for _ in range(20):
            await self.send("Runtime.evaluate", expression="document.querySelector('.xterm-helper-textarea').focus()")
            await self.send("Input.dispatchKeyEvent", type="keyDown", text=digit, **key)
            await self.send("Input.dispatchKeyEvent", type="keyUp", **key)
            with contextlib.suppress(TimeoutError):
                await self.wait_for(condition, seconds=2)
                return
        raise AssertionError(f"the browser was sent {self.text[-3000:]!r}")

    async def wait_for(self, condition: Callable[[str], bool], *, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition(self.text):
                message = json.loads((await self._connection.receive()).data)
                if message.get("method") == "Network.webSocketFrameReceived":
                    frame = message["params"]["response"]
                    data = frame["payloadData"]
                    self.text += base64.b64decode(data).decode("utf-8", "replace") if frame["opcode"] == 2 else data
