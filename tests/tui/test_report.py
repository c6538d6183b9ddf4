"""The report: one file that asks for nothing, holds other people's text harmlessly, and draws in a real browser."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from aioengine_tui.runs import report as report_module
from aioengine_tui.runs.reading import RunBuilder, read_run
from aioengine_tui.runs.report import render_report, report_data
from aioengine_tui.runs.run_log import Piece, RunLog, RunRequest
from tests.tui.browser import open_page, require_browser
from tests.tui.support import HEADER

NASTY = '</script><script>document.title="taken"</script><!--\x00\x1b[31m\u2028"\\\ud800&amp;\u202e'


class Page(HTMLParser):
    """What a browser's parser sees: elements, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in self.raw else ""
        if self._inside:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.raw[self._inside][-1] += data


@pytest.fixture(scope="module")
def log(path: Path) -> RunLog:
    return read_run(path)


def with_nasty_texts(log: RunLog) -> RunLog:
    requests = [dataclasses.replace(log.requests[0], request_id=NASTY, prompt=NASTY, text=NASTY, finish_reason="stop"), *log.requests[1:]]
    header = dataclasses.replace(log.header, model=NASTY, config={**log.header.config, NASTY.replace("\ud800", ""): NASTY})
    return dataclasses.replace(log, requests=requests, header=header)


def test_the_page_asks_for_nothing_from_anywhere(log: RunLog) -> None:
    page = Page(render_report(log, title="run.jsonl"))
    attributes = [(tag, name, value) for tag, attrs in page.elements for name, value in attrs.items()]
    assert not [entry for entry in attributes if entry[1] in ("src", "href", "srcset", "action", "style") or entry[1].startswith("on")]
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon", "".join(page.raw["style"] + page.raw["script"])
    )
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", "".join(page.raw["script"]))


def test_the_policy_allows_the_own_script_and_style_and_nothing_else(log: RunLog) -> None:
    page = Page(render_report(log, title="run.jsonl"))
    policy = next(attrs["content"] or "" for tag, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def hash_of(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == hash_of(page.raw["script"][1])
    assert rules["style-src"] == hash_of(page.raw["style"][0])
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy


def test_other_peoples_text_cannot_leave_its_place(log: RunLog) -> None:
    nasty = with_nasty_texts(log)
    text = render_report(nasty, title=NASTY)
    page = Page(text)
    assert len(page.raw["script"]) == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u202e\ud800-\udfff]", text)
    assert "<" not in page.raw["script"][0], "no parser can see a tag or a comment begin there"
    data = json.loads(page.raw["script"][0])
    assert data["requests"][0]["id"].startswith("</script><script>")
    assert data["requests"][0]["prompt"] == data["requests"][0]["text"]
    assert page.raw["title"][0].startswith("</script><script>"), "as text"


def test_the_data_is_the_run(log: RunLog) -> None:
    data = report_data(log)
    assert data["steps"]["n"] == log.steps["num_tokens"].tolist()
    assert [request["id"] for request in data["requests"]] == [request.request_id for request in log.requests]
    assert sum(data["stop_counts"]) == len(log.steps)
    assert data["percentiles"][0][1][1] == pytest.approx((log.latency("ttft").quantiles(0.95)[0] or 0) * 1e3, abs=1e-3)
    assert data["meta"]["notes"] == []


def test_a_long_run_is_thinned_out_and_says_so() -> None:
    log = made_up_log(num_steps=100_000, num_requests=30_000)
    text = render_report(log, title="long")
    assert len(text) < 12e6
    data = report_data(log)
    assert len(data["steps"]["id"]) <= report_module.MAX_STEPS
    assert len(data["requests"]) <= report_module.MAX_REQUESTS
    assert sum(len(request["p"]) for request in data["requests"]) <= report_module.MAX_PIECES
    notes = " ".join(data["meta"]["notes"])
    assert "Of 100000 steps every 5th" in notes
    assert "of 30000 requests" in notes


def made_up_log(*, num_steps: int, num_requests: int) -> RunLog:
    log = RunBuilder(HEADER).finish()
    log.num_total_blocks = 10_000
    for step_id in range(1, num_steps + 1):
        for name, column in log.steps.columns.items():
            column.append(step_id if name == "step_id" else 1 if column.typecode == "q" else HEADER.perf_counter + step_id * 0.02)
    for index in range(num_requests):
        first = 1 + index * (num_steps - 400) // num_requests
        start = HEADER.perf_counter + first * 0.02
        pieces = [
            Piece("waiting", first, first + 9, start, start + 0.2),
            Piece("chunk", first + 10, first + 12, start + 0.2, start + 0.26, [512, 512, 100]),
            Piece("decode", first + 13, first + 300, start + 0.26, start + 6.0),
        ]
        log.requests.append(RunRequest(f"request-{index}", start, pieces=pieces, finish_time=start + 6.0, finish_reason="stop"))
    log.end = HEADER.perf_counter + num_steps * 0.02
    return log


# ---------------------------------------------------------------------------------------------------- in a browser
WATERFALL = "document.getElementById('waterfall')"
DETAILS = "[document.getElementById('frame-title').textContent, document.getElementById('request-title').textContent]"


@pytest.mark.slow
async def test_the_page_draws_and_answers_clicks_in_a_browser_without_a_network(log: RunLog, tmp_path: Path) -> None:
    require_browser()
    file = tmp_path / "report.html"
    file.write_text(render_report(with_nasty_texts(log), title=NASTY), encoding="utf-8")
    async with open_page(tmp_path / "profile", "--proxy-server=127.0.0.1:1") as page:
        await page.send("Network.enable")
        await page.send("Page.navigate", url=file.as_uri())
        await page.wait_until("document.readyState === 'complete' && document.querySelectorAll('#summary .card').length > 5")
        assert await page.evaluate("document.title") != "taken"
        box: dict[str, float] = await page.evaluate(
            "JSON.parse(JSON.stringify(document.getElementById('waterfall').getBoundingClientRect()))"
        )
        assert await _num_colors(page) > 5
        await page.click(box["x"] + box["width"] / 2, box["y"] + 100)
        step, request = await page.evaluate(DETAILS)
        assert re.fullmatch(r"Step \d+", step)
        assert request.startswith("Request ")
        await page.evaluate(
            "document.getElementById('find').value = '77'; document.getElementById('find').dispatchEvent(new Event('change'))"
        )
        assert (await page.evaluate(DETAILS))[0] == "Step 77"
        shown: str = await page.evaluate("document.getElementById('frame').innerText")
        index = log.steps["step_id"].index(77)
        assert f"{log.steps['num_tokens'][index]} of a budget of" in shown
        before = await _picture(page)
        await page.evaluate("document.getElementById('zoom-in').click()")
        assert await _picture(page) != before
        await page.evaluate("document.getElementById('theme').click()")
        assert page.errors() == []
        assert [url for url in page.requests() if not url.startswith("file:")] == []


async def _num_colors(page: Any) -> int:
    script = f"""(() => {{
        const c = {WATERFALL}, d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
        for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return seen.size;
    }})()"""
    return int(await page.evaluate(script))


async def _picture(page: Any) -> str:
    await asyncio.sleep(0.05)
    return str(await page.evaluate(f"{WATERFALL}.toDataURL()"))
