"""The dashboard as a whole: keys, screens, sizes, pauses, exports. The engine is made up, the clock stands still."""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from aioengine.events.sources.base import Gap, SourceStatus
from aioengine.testing import in_virtual_time
from aioengine_tui.app import DashboardApp
from aioengine_tui.messages import OpenRequest
from aioengine_tui.screens.batch import BatchView
from aioengine_tui.screens.blocks import BlocksView
from aioengine_tui.widgets.line_view import LineView
from tests.tui.runs import Run, make_run
from tests.tui.support import ListSource, MadeUpEngine, busy_items

SIZES = [(80, 24), (60, 16), (160, 48), (40, 10)]
SCREENS = {"1": "overview", "2": "step", "3": "batch", "4": "blocks", "5": "log", "6": "waterfall"}

Running = Callable[..., AbstractAsyncContextManager[tuple[DashboardApp, Pilot[None]]]]


@asynccontextmanager
async def running(
    source: ListSource, *, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[DashboardApp, Pilot[None]]]:
    app = DashboardApp(source, **options)
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        yield app, pilot


async def settle(app: DashboardApp, pilot: Pilot[None]) -> None:
    """Draw as the timer does; twice, because a line that comes or goes changes the height of the others."""
    await pilot.pause()
    app.draw()
    await pilot.pause()


async def press(app: DashboardApp, pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settle(app, pilot)


def read_texts(folder: Path, pattern: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob(pattern))]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def text_of(app: DashboardApp, selector: str) -> str:
    return app.query_one(selector, LineView).text


# ---------------------------------------------------------------------------------------------------- screens
@in_virtual_time
async def test_the_step_screen_at_80x24() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "2", "up", "up", "up")
        assert text_of(app, "#title").split() == ["aioengine", "top", "test", "*", "live"]
        assert text_of(app, "#tabs").split() == [
            "1",
            "Overview",
            "2",
            "Step",
            "3",
            "Batch",
            "4",
            "KV",
            "blocks",
            "5",
            "Log",
            "6",
            "Waterfall",
            "step",
            "27",
        ]
        lines = app.view.text.splitlines()
        assert lines[0].startswith("─ step 24 ───")
        assert lines[0].endswith("latency 20.0ms, 3 new tokens 20.0ms after the step before")
        assert lines[1] == "budget     32/32 " + "▓" * 33 + "▒" * 4 + "▚" * 26
        assert lines[2] == "█ prefill 0   ▓ chunk 17 in 1   ▒ decode 2 in 2   ▚ resumed 13 in 1"
        assert lines[3] == "admission stopped by budget: the token budget is used up"
        assert lines[4] == "+ new 1 zeta                            ~ resumed 1 epsilon"
        assert lines[5] == "! preempted 0                           x ended 1 gamma"
        assert lines[6] == "tokens alpha 1d  beta 1d  epsilon 13r  zeta 17c"
        assert lines[14].endswith("end: follow")
        await press(app, pilot, "end")
        assert app.view.text.splitlines()[14].endswith("following")


@in_virtual_time
async def test_the_batch_screen_at_80x24() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "3")
        assert app.view.text == (
            "6 live  2 ended  by arrival  follow  ░ cached █ computed - to do ▒ output\n"
            "request    state        step tokens        prompt   comp   out  blk    age tok/s\n"
            "alpha      R running      1d ████▒▒▒▒▒▒···     20     46    27   12  540ms  50.0\n"
            "beta       R running      1d ░░░░░█▒▒▒▒▒▒·     24     47    24   12  480ms  50.0\n"
            "epsilon    R running      1d ███████▒▒▒···     30     40    11   10  320ms  35.7\n"
            "zeta       R running      1d ███████▒·····     30     32     3    8  320ms  50.0\n"
            "eta        W waiting       · -------······     30      0     0    0  320ms     -\n"
            "theta      W waiting       · -------······     30      0     0    0  320ms     -\n"
            "gamma      F abort         · █████████▒▒▒▒     50     68    19    0  400ms  50.0\n"
            "delta      F length        · █████████▒▒▒▒      8     11     4    0  120ms  50.0"
        )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@in_virtual_time
async def test_every_screen_fits_every_size_and_can_be_saved_as_a_picture(size: tuple[int, int], tmp_path: Path) -> None:
    async with running(ListSource(busy_items()), size=size, folder=tmp_path) as (app, pilot):
        for key, name in SCREENS.items():
            await press(app, pilot, key)
            assert app.view.id == name
            assert app.view.size.height >= size[1] - 5
            assert app.view.text.strip()
            assert max(map(len, app.view.text.splitlines())) <= size[0]
            assert len(app.view.lines) <= app.view.size.height
            await press(app, pilot, "ctrl+s")
        await press(app, pilot, "3", "enter")
        assert "request alpha" in app.view.text
        await press(app, pilot, "question_mark")
        assert app.view.text.startswith("─ the words on the screen")
        for _ in range(40):
            if "everywhere" in app.view.text:
                break
            await press(app, pilot, "pagedown")
        assert "everywhere" in app.view.text
    pictures = read_texts(tmp_path, "*.svg")
    assert len(pictures) == 6
    assert all("</svg>" in picture for picture in pictures)


@in_virtual_time
async def test_a_terminal_that_is_too_small_is_told_so_and_recovers() -> None:
    async with running(ListSource(busy_items()), size=(30, 8)) as (app, pilot):
        assert "30x8 is too small" in text_of(app, "#too-small")
        assert app.query_one("#too-small").display
        assert not app.query_one("#views").display
        await pilot.resize_terminal(80, 24)
        await settle(app, pilot)
        assert app.query_one("#views").display
        assert "running 4" in app.view.text


@pytest.mark.parametrize("size", [(40, 10), (80, 24), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("num_items", [0, 2])
@in_virtual_time
async def test_nothing_has_arrived_yet(size: tuple[int, int], num_items: int) -> None:
    async with running(ListSource(busy_items()[:num_items]), size=size) as (app, pilot):
        for key in SCREENS:
            await press(app, pilot, key)
        assert ("* live" if num_items else "~ connecting") in text_of(app, "#title")


@in_virtual_time
async def test_tab_goes_round_and_escape_comes_back() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "shift+tab")
        assert app.view.id == "waterfall"
        await press(app, pilot, "tab", "tab", "tab")
        assert app.view.id == "batch"
        await press(app, pilot, "down", "enter")
        assert app.view.id == "request"
        assert "request beta" in app.view.text
        await press(app, pilot, "f1", "escape", "escape")
        assert app.view.id == "batch"


# ---------------------------------------------------------------------------------------------------- pause, filter, sort
@in_virtual_time
async def test_a_paused_view_stands_still_while_events_are_taken_in() -> None:
    engine = MadeUpEngine()
    engine.add("one", num_prompt_tokens=8, max_tokens=40)
    items = busy_items()[:2]
    source = ListSource([*items, *engine.run(5)])
    async with running(source) as (app, pilot):
        await press(app, pilot, "2", "p")
        before = app.view.text
        source.push(*engine.run(4))
        await settle(app, pilot)
        assert app.view.text == before
        assert app.session.live.last_step_id == 9
        assert "VIEW PAUSED, 8 events behind" in text_of(app, "#warnings")
        await press(app, pilot, "up")  # it can still be looked around in
        assert "step 4" in app.view.text.splitlines()[0]
        await press(app, pilot, "end", "space")
        assert "step 9" in app.view.text.splitlines()[0]
        assert app.query_one("#warnings").has_class("off")


@in_virtual_time
async def test_filter_sort_reverse_and_follow() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "3", "slash", *"eta")
        assert [line.split()[0] for line in app.view.text.splitlines()[2:]] == ["beta", "zeta", "eta", "theta"]
        await press(app, pilot, "enter", "escape")
        assert len(app.view.text.splitlines()) == 10
        view = app.view
        assert isinstance(view, BatchView)
        await press(app, pilot, "home", "down", "down")
        assert app.session.selected == "epsilon"
        for _ in range(12):
            await press(app, pilot, "right")
            if view.sort == "output":
                break
        assert view.text.splitlines()[1].count("↓") == 1  # numbers begin with the largest
        outputs = [int(line.split()[7]) for line in view.text.splitlines()[2:]]
        assert outputs == sorted(outputs, reverse=True)
        assert app.session.selected == "epsilon"  # the cursor went with its request
        await press(app, pilot, "r")
        assert view.text.splitlines()[1].count("↑") == 1
        outputs = [int(line.split()[7]) for line in view.text.splitlines()[2:]]
        assert outputs == sorted(outputs)
        await press(app, pilot, "s", *"pro", "enter")
        assert (view.sort, view.reverse) == ("prompt", True)
        await press(app, pilot, "s", *"nothing", "enter")
        assert "no column here begins with 'nothing'" in text_of(app, "#warnings")
        await press(app, pilot, "d")
        assert "gamma" not in view.text


@in_virtual_time
async def test_words_typed_into_the_filter_are_no_commands() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "5", "f", *"q 1 preempted", "enter")
        assert app.view.id == "log"
        assert app.is_running
        await press(app, pilot, "escape", "slash", *"preempted", "enter")
        assert any("! epsilon" in line for line in app.view.text.splitlines())


@in_virtual_time
async def test_blocks_of_a_request_are_lit_and_their_owner_is_a_key_away() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "4")
        assert "block 1 shared   ref_cnt 2   owners alpha, beta" in app.view.text
        assert not any("#" in line for line in app.view.text.splitlines()[2:-4])
        await press(app, pilot, "n")
        lit = app.session.selected
        assert lit == "alpha"
        assert sum(line.count("#") for line in app.view.text.splitlines()[2:-4]) == 12
        await press(app, pilot, "c")
        assert not any("#" in line for line in app.view.text.splitlines()[2:-4])
        await press(app, pilot, "right", "enter")
        assert app.view.id == "request"
        assert "block table" in app.view.text


@pytest.fixture(scope="module")
def group_run() -> Run:
    return make_run(layer_windows=(None, 12, 12, 6))


@in_virtual_time
async def test_the_blocks_of_a_kv_cache_group_are_counted_and_lit(group_run: Run) -> None:
    run = group_run
    index = max(range(len(run.events)), key=lambda index: run.events[index].stats.num_used_blocks)
    tables = [[request.block_ids, *request.other_block_ids] for request in run.snapshots[index].requests]
    held = [len({block_id for table in tables for block_id in table[group_id] if block_id}) for group_id in range(4)]
    assert held[0] > held[2] == held[3] > held[1] > 0
    items = [run.header, SourceStatus("live", "test"), *run.events[: index + 1]]
    async with running(ListSource(items), size=(130, 40)) as (app, pilot):
        await press(app, pilot, "4")
        text = app.view.text
        assert f"by group {' '.join(map(str, held))}" in text
        words = ["0 sees all, 1 layer", "1 window 6, 1 layer", "2 window 12, 1 layer", "3 window 12, 1 layer"]
        assert all(f"{count} {group}" in text for count, group in zip(held, words, strict=True))
        view = app.view
        assert isinstance(view, BlocksView)
        for group_id in (0, 1, 2, 3, 0):
            await press(app, pilot, "g")
            assert view.lit_group == group_id
            assert f"# KV-cache group {group_id} " in app.view.text
            assert view._lit_blocks(app.session.state) == {block_id for table in tables for block_id in table[group_id] if block_id}
        await press(app, pilot, "G")
        assert view.lit_group == 3
        await press(app, pilot, "c")
        assert not view._lit_blocks(app.session.state)
        assert "# KV-cache group" not in app.view.text
        holder = max(app.session.state.requests.values(), key=lambda row: row.num_blocks)
        await press(app, pilot, "2", "enter")
        assert "tables of KV-cache group 0" in app.view.text
        app.post_message(OpenRequest(holder.request_id))
        await settle(app, pilot)
        assert all(f"KV-cache group {group_id}: " in app.view.text for group_id in range(4))
        assert "behind its window" in app.view.text


# ---------------------------------------------------------------------------------------------------- truth
@in_virtual_time
async def test_lost_events_and_a_lost_engine_are_said() -> None:
    source = ListSource(busy_items())
    async with running(source) as (app, pilot):
        source.push(Gap(12), SourceStatus("lost", "connection reset"))
        await settle(app, pilot)
        warnings = text_of(app, "#warnings")
        assert "STALE" in warnings
        assert "connection reset" in warnings
        assert "! lost, reconnecting" in text_of(app, "#title")
        assert "~4 stale" in app.view.text
        await press(app, pilot, "2")
        source.push(SourceStatus("ended", "the engine was shut down"))
        await settle(app, pilot)
        assert "= ended" in text_of(app, "#title")
        assert "12 lost" in text_of(app, "#warnings") or "12 events lost" in text_of(app, "#warnings")


@in_virtual_time
async def test_control_characters_in_a_request_id_do_not_reach_the_terminal() -> None:
    engine = MadeUpEngine()
    engine.add("evil\x1b[2J\nid", num_prompt_tokens=8, max_tokens=9)
    async with running(ListSource([*busy_items()[:2], *engine.run(3)])) as (app, pilot):
        for key in (*SCREENS, "3", "enter"):
            await press(app, pilot, key)
            assert "\x1b" not in app.view.text
            assert len(app.view.lines) <= app.view.size.height


# ---------------------------------------------------------------------------------------------------- files
@in_virtual_time
async def test_what_is_shown_is_saved_as_csv_and_json(tmp_path: Path) -> None:
    async with running(ListSource(busy_items()), folder=tmp_path) as (app, pilot):
        for key in SCREENS:
            await press(app, pilot, key, "e", "E")
        await press(app, pilot, "3", "slash", *"waiting", "enter", "e")
    rows = read_csv(tmp_path / "aioengine-batch-step27.csv")
    assert [row["request"] for row in rows] == ["alpha", "beta", "epsilon", "zeta", "eta", "theta", "gamma", "delta"]
    assert rows[0]["output"] == "27"
    filtered = read_csv(tmp_path / "aioengine-batch-step27-2.csv")
    assert [row["request"] for row in filtered] == ["eta", "theta"]
    steps = json.loads((tmp_path / "aioengine-step-step27.json").read_text(encoding="utf-8"))
    assert [step["step_id"] for step in steps] == list(range(1, 28))
    blocks = json.loads((tmp_path / "aioengine-blocks-step27.json").read_text(encoding="utf-8"))
    assert len(blocks) == 40
    assert blocks[0]["owners"] == "alpha beta"
    assert json.loads((tmp_path / "aioengine-overview-step27.json").read_text(encoding="utf-8"))


@in_virtual_time
async def test_a_folder_that_cannot_be_written_is_a_note_not_a_crash(tmp_path: Path) -> None:
    async with running(ListSource(busy_items()), folder=tmp_path / "missing") as (app, pilot):
        await press(app, pilot, "3", "e")
        assert "cannot save to" in text_of(app, "#warnings")


# ---------------------------------------------------------------------------------------------------- themes
@pytest.mark.parametrize("theme", ["dark", "light", "high-contrast", "colour-blind", "ansi"])
@pytest.mark.parametrize("no_color", [False, True])
@in_virtual_time
async def test_no_cell_is_drawn_in_the_colour_of_its_ground(theme: str, no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual 8.2.8 draws black on black with NO_COLOR and an ansi theme, unless one does something about it."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    async with running(ListSource(busy_items()), theme=theme) as (app, pilot):
        for key in SCREENS:
            await press(app, pilot, key)
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    if style is None or not segment.text.strip():
                        continue
                    color, ground = style.color, style.bgcolor
                    if no_color:
                        assert color is None or color.is_default
                        assert ground is None or ground.is_default
                    elif color is not None and ground is not None and not (color.is_default and ground.is_default):
                        assert color != ground, segment


@in_virtual_time
async def test_t_goes_through_all_themes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    async with running(ListSource(busy_items())) as (app, pilot):
        seen = []
        for _ in range(5):
            await press(app, pilot, "t")
            seen.append(app.theme)
        assert len(set(seen)) == 5
        assert seen[-1] == "aioengine-dark"


# ---------------------------------------------------------------------------------------------------- cost
@in_virtual_time
async def test_only_rows_that_changed_are_repainted() -> None:
    source = ListSource(busy_items())
    async with running(source) as (app, pilot):
        await press(app, pilot, "3")
        before = app.view.num_repainted_lines
        app.draw()
        app.draw()
        await pilot.pause()
        assert app.view.num_repainted_lines == before
        await press(app, pilot, "down")
        assert app.view.num_repainted_lines == before + 2  # the row that lost the cursor, and the one that got it


@in_virtual_time
async def test_a_log_that_is_full_lets_go_of_its_oldest_lines_and_the_cursor_stays_on_its_own() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        log = app.session.live.log
        await press(app, pilot, "5", "up", "up")
        view = app.view
        for number in range(log.lines.maxlen or 0):
            if number == 10:
                await settle(app, pilot)
                assert view.text.splitlines()[0].startswith("42 lines of 42")
            log.add(1001.0, 30, "engine", None, f"line {number}")
        await settle(app, pilot)
        assert view.text.splitlines()[0].startswith("20000 lines of 20032")
        await press(app, pilot, "end")
        assert view.text.splitlines()[-1].endswith("line 19999")
        await press(app, pilot, "home")
        assert view.text.splitlines()[1].endswith("line 0")
        await press(app, pilot, "slash", *"line", "space", *"7777", "enter")
        assert all("7777" in line for line in view.text.splitlines()[1:])
