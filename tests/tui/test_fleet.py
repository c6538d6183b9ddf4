"""Several engines at once: what is added up, what is listed, and what happens when one goes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from aioengine.events.sources.base import ConnectionFailed, SourceStatus, StepSource, StreamItem
from aioengine_tui.fleet.app import FleetApp
from aioengine_tui.fleet.lines import fleet_lines, fleet_to_json
from aioengine_tui.fleet.members import Fleet, Member, add_up
from aioengine_tui.model.metrics import quantiles_of
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import line_text, lines_text, width_of
from tests.tui.support import HEADER, ListSource, MadeUpEngine, busy_items

ROOT = Path(__file__).resolve().parents[2]


def member(address: str, *, num_steps: int = 0) -> Member:
    """An engine that was seen for so many steps; 0: the busy one."""
    one = Member(address)
    items: list[StreamItem] = busy_items() if not num_steps else [HEADER, SourceStatus("live", address), *_quiet_items(num_steps)]
    for item in items:
        one.state.apply(item)
    return one


def _quiet_items(num_steps: int) -> list[StreamItem]:
    engine = MadeUpEngine()
    engine.add("only", num_prompt_tokens=8, max_tokens=50)
    return engine.run(num_steps)


# ---------------------------------------------------------------------------------------------------- totals
def test_totals_are_sums_and_percentiles_of_all_samples_together() -> None:
    members = [member("/run/a.sock"), member("/run/b.sock", num_steps=20)]
    one, other = (m.state for m in members)
    totals = add_up(members)
    assert one.stats is not None
    assert other.stats is not None
    assert totals.num_running == one.stats.num_running_reqs + other.stats.num_running_reqs > 1
    assert totals.num_used_blocks == one.stats.num_used_blocks + other.stats.num_used_blocks
    assert totals.kv_cache_usage == totals.num_used_blocks / (one.stats.num_total_blocks + other.stats.num_total_blocks)
    samples = [*one.data.itls.recent(one.now), *other.data.itls.recent(other.now)]
    assert [totals.itl_p50, totals.itl_p95] == quantiles_of(samples, 0.5, 0.95)
    ttfts = sorted(value for value, _ in [*one.data.ttfts.recent(one.now), *other.data.ttfts.recent(other.now)])
    assert totals.ttft_p50 == ttfts[(len(ttfts) + 1) // 2 - 1]


def test_an_engine_that_cannot_be_reached_is_not_in_the_totals() -> None:
    gone = member("/run/gone.sock")
    gone.problem = "no engine answers at /run/gone.sock: Connection refused"
    alive = member("/run/a.sock")
    assert add_up([gone, alive]).num_running == add_up([alive]).num_running
    assert (add_up([gone, alive]).num_engines, add_up([gone, alive]).num_reached) == (2, 1)
    text = lines_text(fleet_lines([gone, alive], width=120, height=10, cursor=None))
    assert "Connection refused" in text
    assert "all 1 of 2" in text
    value = fleet_to_json([gone, alive])
    assert [engine["reached"] for engine in value["engines"]] == [False, True]
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_list_fits_every_width_and_cuts_no_number(width: int) -> None:
    members = [member("/run/user/1000/aioengine/" + "long" * 20 + ".sock"), member("/b\x1b[2J.sock", num_steps=5)]
    lines = [line_text(line) for line in fleet_lines(members, width=width, height=20, cursor=1)]
    assert all(width_of(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    titles = lines[0].split()[1:]
    assert len(lines[1].split()) >= len(titles), "every column that has a title has its whole number"
    assert not any(column.endswith("…") for line in lines[1:3] for column in line.split()[2:])


def test_the_cursor_stays_on_the_screen() -> None:
    members = [member(f"/run/{index}.sock", num_steps=3) for index in range(30)]
    for cursor in range(30):
        text = lines_text(fleet_lines(members, width=80, height=12, cursor=cursor))
        assert f"/run/{cursor}.sock" in text


# ---------------------------------------------------------------------------------------------------- following
async def test_a_fleet_follows_who_comes_and_leaves_who_goes() -> None:
    opened: dict[str, ListSource] = {}

    def open_source(address: str) -> StepSource:
        if address == "nobody":
            raise ConnectionFailed("no engine answers at nobody")
        opened[address] = ListSource(busy_items())
        return opened[address]

    fleet = Fleet(open_source)
    fleet.follow(["a", "nobody", "a"])
    await fleet.wait_until_reached(5)
    assert [(m.address, m.is_reached, m.problem) for m in fleet.members] == [
        ("a", True, None),
        ("nobody", False, "no engine answers at nobody"),
    ]
    fleet.follow(["nobody", "b"])
    await fleet.wait_until_reached(5)
    assert [m.address for m in fleet.members] == ["nobody", "b"]
    await asyncio.sleep(0)
    assert not opened["a"].is_open
    await fleet.close()
    assert not opened["b"].is_open


async def test_enter_opens_the_engine_under_the_cursor() -> None:
    app = FleetApp(lambda: ["a", "b", "c"], lambda address: ListSource(busy_items()))
    async with app.run_test(size=(100, 20)) as pilot:
        await _until_shown(pilot, app, "all 3")
        await pilot.press("down", "enter")
    assert app.return_value == "b"


async def test_a_click_chooses_and_a_second_one_opens() -> None:
    app = FleetApp(lambda: ["a", "b", "c"], lambda address: ListSource(busy_items()), start_at="b")
    async with app.run_test(size=(100, 20)) as pilot:
        await _until_shown(pilot, app, "all 3")
        assert app.cursor == 1
        await pilot.click("#lines", offset=(5, 3))
        assert app.cursor == 2
        assert app.return_value is None
        await pilot.click("#lines", offset=(5, 3))
    assert app.return_value == "c"


async def _until_shown(pilot: Pilot[str], app: FleetApp, text: str) -> None:
    for _ in range(200):
        await pilot.pause(0.02)
        app.draw()
        if text in app.query_one("#lines", LineView).text:
            return
    raise AssertionError(app.query_one("#lines", LineView).text)


# ---------------------------------------------------------------------------------------------------- end to end
@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two engine processes with traffic, which nobody is told the addresses of."""
    monkeypatch.setenv("AIOENGINE_RUNTIME_DIR", str(tmp_path / "run"))
    command = [sys.executable, "-m", "tests.tui.traffic", "auto"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    yield processes
    for process in processes:
        process.kill()
        process.wait(timeout=20)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aioengine", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT)


def test_top_without_an_address_finds_all_one_or_none(engines: list[subprocess.Popen[bytes]]) -> None:
    both = json.loads(top("--once", "--json").stdout)
    assert {engine["address"].rpartition("/")[2] for engine in both["engines"]} == {f"{process.pid}.sock" for process in engines}
    assert both["totals"]["num_reached"] == 2
    assert both["totals"]["steps_per_s"] > 10
    engines[0].kill()
    engines[0].wait()
    one = json.loads(top("--once", "--json").stdout)
    assert one["last_step_id"] > 0, "one engine is shown at once"
    assert engines[1].stdin is not None
    engines[1].stdin.close()
    engines[1].wait(timeout=20)
    none = top("--once")
    assert none.returncode == 1
    assert "no engine of yours publishes its events" in none.stderr
