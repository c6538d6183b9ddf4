"""`aioengine top --web`: who may connect, and the dashboard in a real headless browser."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aioengine.events.recording.writer import StepRecorder
from aioengine.events.step_event import StepEvent, StepResultEvent
from tests.tui.browser import BrowserPage, open_page, require_browser
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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[int]:
    """A recording as a web page; the port."""
    recording = tmp_path / "steps.jsonl"
    with StepRecorder(recording, HEADER) as recorder:
        for item in busy_items():
            if isinstance(item, StepEvent | StepResultEvent):
                recorder(item)
    port = free_port()
    server = start([sys.executable, "-m", "aioengine", "top", str(recording), "--web", "--port", str(port)])
    try:
        yield port
    finally:
        server.terminate()
        server.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_dashboard_in_a_browser(served: int, tmp_path: Path, host: str) -> None:
    """It has a title and the focus, asks no foreign host, and what is saved goes to the browser."""
    require_browser()
    await wait_for_url(f"http://localhost:{served}/")
    await _refused(served)
    downloads = tmp_path / "downloads"
    async with open_page(tmp_path / "profile") as page:
        await page.send("Network.enable")
        await page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(downloads))
        await page.send("Page.navigate", url=f"http://{host}:{served}/")
        await shown(page, "step 27")
        assert await page.evaluate("document.title") == f"aioengine top {tmp_path / 'steps.jsonl'}"
        await page.type("3")  # nothing was clicked: the page has the focus
        await shown(page, "theta")
        await page.evaluate("document.querySelector('.xterm-helper-textarea').blur(); window.dispatchEvent(new Event('focus'))")
        await page.type("e")
        await shown(page, "sent to the browser")
        saved = await downloaded(downloads, "*.csv")
        assert saved.read_text().startswith("request")
        assert list(Path.cwd().glob("aioengine-batch-*")) == [], "nothing is left where the server runs"
        hosts = {urlsplit(url).netloc for url in page.requests()}
        assert hosts <= {f"{host}:{served}", ""}, hosts
        assert page.errors() == []


@pytest.mark.slow
async def test_two_browsers_at_once_have_a_dashboard_each(served: int, tmp_path: Path) -> None:
    require_browser()
    await wait_for_url(f"http://localhost:{served}/")
    async with open_page(tmp_path / "one") as one, open_page(tmp_path / "other") as other:
        for page in (one, other):
            await page.send("Network.enable")
            await page.send("Page.navigate", url=f"http://localhost:{served}/")
            await shown(page, "step 27")
        await one.type("3")
        await other.type("4")
        await shown(one, "theta")
        await shown(other, "owners")
        assert "owners" not in one.received_text()


async def shown(page: BrowserPage, text: str, *, seconds: float = 60) -> None:
    """Until the page was sent that text to draw."""
    for _ in range(round(seconds / 0.1)):
        await page.evaluate("1")  # takes in what has happened
        if text in page.received_text():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{text!r} is not in {page.received_text()[-3000:]!r}")


async def downloaded(folder: Path, pattern: str) -> Path:
    for _ in range(200):
        found = list(folder.glob(pattern))  # noqa: ASYNC240
        if found:
            return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError(f"no {pattern} came to {folder}")


async def _refused(port: int) -> None:
    """A page of another site is turned away before a dashboard is started for it."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as info:
            await session.ws_connect(f"http://localhost:{port}/ws?width=80&height=24", origin="https://example.com")
        assert info.value.status == 403
