"""A real headless browser, driven over the DevTools protocol; nothing but aiohttp is needed for it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed (aioengine[web])")

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def require_browser() -> str:
    """Its path; skips the test if there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium or chrome is installed")
    return found


@asynccontextmanager
async def open_page(profile: Path, *options: str) -> AsyncIterator[BrowserPage]:
    """A browser of its own, and its one page."""
    command = [require_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command += [f"--user-data-dir={profile}", "--window-size=1200,1600", "--remote-debugging-port=0", *options, "about:blank"]
    process = _start(command)
    try:
        port = await _port_of(profile)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = await response.json(content_type=None)
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as connection:
                page = BrowserPage(connection)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
    finally:
        process.terminate()
        process.wait(timeout=20)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def _port_of(profile: Path) -> int:
    """The browser writes it into its profile as soon as it listens."""
    file = profile / "DevToolsActivePort"
    for _ in range(300):
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise AssertionError("the browser does not start")


class BrowserPage:
    """Commands out; what the page does comes in as `events`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._connection.send_str(json.dumps({"id": self._number, "method": method, "params": params}))
        async with asyncio.timeout(60):
            while True:
                message = json.loads((await self._connection.receive()).data)
                if message.get("id") == self._number:
                    assert "error" not in message, f"{method}: {message}"
                    return dict(message["result"])
                self.events.append(message)

    async def evaluate(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_until(self, expression: str, *, seconds: float = 60) -> None:
        for _ in range(round(seconds / 0.05)):
            if await self.evaluate(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {expression}")

    async def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """As keys, into whatever has the focus."""
        for char in text:
            code = f"Digit{char}" if char.isdigit() else f"Key{char.upper()}"
            key = {"key": char, "code": code, "windowsVirtualKeyCode": ord(char.upper())}
            await self.send("Input.dispatchKeyEvent", type="keyDown", text=char, **key)
            await self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    async def picture(self) -> bytes:
        """A PNG."""
        return base64.b64decode((await self.send("Page.captureScreenshot", format="png"))["data"])

    def errors(self) -> list[str]:
        """Exceptions, and what the page's policy forbade."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method") == "Runtime.exceptionThrown"
            or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error")
        ]

    def requests(self) -> list[str]:
        """What was asked for, if Network is enabled."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def received_text(self) -> str:
        """Of WebSockets, if Network is enabled."""
        text = ""
        for event in self.events:
            if event.get("method") == "Network.webSocketFrameReceived":
                frame = event["params"]["response"]
                data = frame["payloadData"]
                text += base64.b64decode(data).decode("utf-8", "replace") if frame["opcode"] == 2 else data
        return text
