"""What a click does, where the cursor of a list goes by itself, and what the screens put first."""

from __future__ import annotations

from typing import Any

from aioengine.testing import in_virtual_time
from aioengine_tui.app import DashboardApp
from aioengine_tui.screens.batch import BatchView
from aioengine_tui.screens.step import StepView
from tests.tui.support import ListSource, MadeUpEngine, busy_items
from tests.tui.test_app import press, running, settle


async def click(app: DashboardApp, pilot: Any, words: str, *, times: int = 1, selector: str = "") -> None:
    """Click on the middle of words of a widget (of the shown view if no selector is given)."""
    widget = app.query_one(selector) if selector else app.view
    lines = widget.text.splitlines()  # type: ignore[attr-defined]
    y = next(index for index, line in enumerate(lines) if words in line)
    await pilot.click(widget, offset=(lines[y].index(words) + len(words) // 2, y), times=times)
    await settle(app, pilot)


# ---------------------------------------------------------------------------------------------------- the mouse
@in_virtual_time
async def test_tabs_keys_and_headings_are_clicked() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await click(app, pilot, "Batch", selector="#tabs")
        assert app.view.id == "batch"
        await click(app, pilot, "help", selector="#keys")
        assert app.view.id == "help"
        await click(app, pilot, "back", selector="#keys")
        assert app.view.id == "batch"
        await click(app, pilot, "Overview", selector="#tabs")
        await click(app, pilot, "KV blocks in use")
        assert app.view.id == "blocks"
        await press(app, pilot, "2")
        await click(app, pilot, "zeta")  # the name of a request, wherever it stands
        assert app.view.id == "request"
        assert "request zeta" in app.view.text


@in_virtual_time
async def test_column_titles_sort_and_turn_round() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "3")
        view = app.view
        assert isinstance(view, BatchView)
        await click(app, pilot, "  out")
        assert (view.sort, view.reverse) == ("output", True)
        assert view.text.splitlines()[2].startswith("alpha")
        await click(app, pilot, "out↓")
        assert (view.sort, view.reverse) == ("output", False)
        await click(app, pilot, "request")
        assert (view.sort, view.reverse) == ("request", False)
        assert [line.split()[0] for line in view.text.splitlines()[2:5]] == ["alpha", "beta", "delta"]


@in_virtual_time
async def test_a_click_chooses_a_row_and_two_open_it() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "3")
        await click(app, pilot, "epsilon")
        assert app.view.id == "batch"
        assert app.session.selected == "epsilon"
        await click(app, pilot, "epsilon", times=2)
        assert app.view.id == "request"
        assert "request epsilon" in app.view.text


@in_virtual_time
async def test_a_paused_view_goes_on_by_a_click_on_the_warning() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "p")
        await click(app, pilot, "VIEW PAUSED", selector="#warnings")
        assert not app.session.is_frozen


# ---------------------------------------------------------------------------------------------------- lists
@in_virtual_time
async def test_the_batch_shows_who_runs_and_does_not_run_after_those_that_ended() -> None:
    engine = MadeUpEngine(num_blocks=400)
    for number in range(40):
        engine.add(f"load-{number:02}", num_prompt_tokens=4, max_tokens=2 + number % 5)
    source = ListSource([*busy_items()[:2], *engine.run(3)])
    async with running(source) as (app, pilot):
        await press(app, pilot, "3")
        for _ in range(12):
            source.push(*engine.run(2))
            await settle(app, pilot)
            states = [line.split()[2] for line in app.view.text.splitlines()[2:] if line]
            running_now = sum(row.state == "running" for row in app.session.live.requests.values())
            assert states[:running_now] == ["running"] * running_now, app.view.text
            row = app.session.live.row(app.session.selected or "")
            assert row is not None
            assert row.is_live or not any(row.is_live for row in app.session.live.requests.values())
        assert len(app.session.live.finished) > 20


@in_virtual_time
async def test_the_cursor_stays_on_an_ended_request_that_was_chosen() -> None:
    source = ListSource(busy_items())
    async with running(source) as (app, pilot):
        await press(app, pilot, "3", "end")
        assert app.session.selected == "delta"
        engine = MadeUpEngine()
        engine.add("later", num_prompt_tokens=8, max_tokens=9)
        await settle(app, pilot)
        assert app.session.selected == "delta"


@in_virtual_time
async def test_the_log_cuts_no_reason() -> None:
    reason = "preempted because no block was free and a-rather-long-name needed one more: 12 blocks given back, 31 computed tokens lost"
    async with running(ListSource(busy_items()), size=(60, 16)) as (app, pilot):
        await press(app, pilot, "5")
        app.session.live.log.add(1001.0, 27, "preempted", "epsilon", reason)
        await settle(app, pilot)
        assert reason.replace(" ", "") in app.view.text.replace("\n", "").replace(" ", "")
        await press(app, pilot, "up", "down", "home", "end")
        assert reason.replace(" ", "") in app.view.text.replace("\n", "").replace(" ", "")
        await click(app, pilot, "computed tokens lost", times=1)  # a row below the first one is the same entry
        assert app.view.scroll_state.cursor == len(app.session.live.log.lines) - 1  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------- what comes first
@in_virtual_time
async def test_the_page_of_a_request_begins_with_its_text_and_folds_the_defaults() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        row = app.session.live.requests["alpha"]
        row.prompt, row.text = "What is a prime number?", "A number with two divisors."
        await press(app, pilot, "3", "home", "enter")
        text = app.view.text
        assert text.index("What is a prime") < text.index("A number with two") < text.index("timeline") < text.index("sampling parameters")
        assert "top_k=" not in text
        await press(app, pilot, "o", "end")
        assert "top_k=" in app.view.text.replace("\n", "") or "defaults:" in app.view.text


@in_virtual_time
async def test_the_lanes_are_zoomed_and_name_their_steps() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "2")
        view = app.view
        assert isinstance(view, StepView)
        (names,) = [line for line in view.text.splitlines() if line.startswith("step   ") and "27" in line and "budget" not in line]
        assert names.split()[1:] == ["22", "23", "24", "25", "26", "27"]
        await press(app, pilot, "z", "z")
        assert any(line.split() == ["step", "26", "27"] for line in view.text.splitlines())
        await press(app, pilot, *["Z"] * 9)
        assert view.lane_steps == 48
        await press(app, pilot, *["z"] * 9)
        assert any(line.split() == ["step", "27"] for line in view.text.splitlines())
