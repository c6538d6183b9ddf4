"""The waterfall as it is seen: cells, axis, zoom, time, cursor, and what opens from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from aioengine.events.recording.writer import StepRecorder
from aioengine.events.sources.base import StreamItem
from aioengine.events.sources.file import FileSource
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.testing import in_virtual_time
from aioengine_tui.app import DashboardApp
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import CELLS, DECODE, DRAFT, PREEMPTED, PREFILL, Run, StepMark, WaterfallRow
from aioengine_tui.screens.request import RequestView
from aioengine_tui.screens.waterfall import WaterfallView
from aioengine_tui.widgets.text import line_text
from aioengine_tui.widgets.waterfall_grid import Scale, Window
from tests.tui.support import ListSource, busy_items
from tests.tui.test_app import press, running
from tests.tui.workloads import Arrival, Settings, fold_all, made_up_prompt, run_workload


def thrashing() -> list[StreamItem]:
    arrivals = [Arrival(f"load-{i}", i * 0.03, made_up_prompt(i, 24 + (i * 13) % 40), 30 + (i * 17) % 50) for i in range(30)]
    return run_workload(arrivals, Settings(num_kv_cache_blocks=100))


def view_of(app: DashboardApp) -> WaterfallView:
    view = app.view
    assert isinstance(view, WaterfallView)
    return view


# ---------------------------------------------------------------------------------------------------- the picture
@in_virtual_time
async def test_the_waterfall_at_80x24() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "6")
        lines = app.view.text.splitlines()
        assert lines[0] == "1 step a column  following  steps 1 to 27  8 requests  27 steps kept"
        rows = {line.split()[0]: line[len("epsilon ") :] for line in lines[2:11]}
        offset = 80 - len("epsilon ") - 27  # the latest step stands at the right edge
        cells = {name: row[offset:].ljust(27) for name, row in rows.items()}
        assert cells["stop"] == "   B" + cells["stop"][4:]
        assert cells["alpha"] == "█" + "▒" * 26
        assert cells["beta"] == " " * 3 + "█" + "▒" * 23
        assert cells["gamma"] == " " * 3 + "▓▓" + "▒" * 18 + "XXXX"[:1] + " " * 3
        assert cells["delta"].strip() == "B▓▓▒▒▒x"
        assert set(cells["theta"].strip()) == {"·"}


@in_virtual_time
async def test_each_row_of_a_thrashing_engine_is_what_the_frames_say() -> None:
    items = thrashing()
    state = fold_all(items)
    shown = 100
    window = Window(state.waterfall.marks, Scale(), last=state.last_step_id, width=shown)
    glyphs = {"prefill": "█", "chunk": "▓", "decode": "▒", "resumed": "▚"}
    wanted: dict[str, dict[int, str]] = {}
    every = DashboardState(max_steps=100_000)
    for item in items:
        every.apply(item)
    for record in list(every.steps)[-shown:]:
        for share in record.shares:
            wanted.setdefault(share.request_id, {})[record.step_id] = glyphs[share.kind]
        if record.stopped_req_id is not None and record.stopped_req_id not in record.preempted_ids:
            row = state.waterfall.row(record.stopped_req_id)
            run = row.at(record.step_id) if row is not None else None
            if run is not None and CELLS[run.cell] == "waiting":
                letter = {"no_blocks": "K", "max_num_seqs": "S", "budget": "B", "preempted": "P", "in_flight": "F"}[record.admission_stop]
                wanted.setdefault(record.stopped_req_id, {})[record.step_id] = letter
        for name in record.preempted_ids:
            wanted.setdefault(name, {})[record.step_id] = "!"
    assert {glyph for row in wanted.values() for glyph in row.values()} >= {"█", "▒", "▚", "!", "K"}
    for name, cells in wanted.items():
        row = state.waterfall.row(name)
        assert row is not None
        text = line_text(window.line(row))
        assert len(text) == shown
        for step_id, glyph in cells.items():
            assert text[step_id - window.first] == glyph, (name, step_id)


@pytest.mark.parametrize("size", [(40, 10), (60, 16), (80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
@in_virtual_time
async def test_it_fits_every_size_in_every_scale_with_and_without_a_cursor(size: tuple[int, int]) -> None:
    async with running(ListSource(thrashing()), size=size) as (app, pilot):
        await press(app, pilot, "6")
        for keys in ((), ("down", "left"), ("z",), ("m",), ("z", "z", "z"), ("home",), ("d",), ("end",)):
            await press(app, pilot, *keys)
            lines = app.view.text.splitlines()
            assert max(map(len, lines)) <= size[0]
            assert len(app.view.lines) <= app.view.size.height
            assert any(glyph in app.view.text for glyph in "█▒▓▚▌!·") or "d shows" in app.view.text


@in_virtual_time
async def test_before_the_first_step_it_says_so() -> None:
    async with running(ListSource()) as (app, pilot):
        await press(app, pilot, "w")
        assert "no step has been seen yet" in app.view.text


# ---------------------------------------------------------------------------------------------------- zoom and time
def marks_of(spans: Sequence[tuple[float, float]]) -> list[StepMark]:
    return [
        StepMark(step, start, "queue_empty", 4, 8, 1, 1, 0, 1, 10, 0, 0, 0, None, start=start, end=end, result_time=end)
        for step, (start, end) in enumerate(spans, 1)
    ]


def row_of(*runs: Run, last_share: int, end: int | None = None) -> WaterfallRow:
    row = WaterfallRow(1, "r", arrival_time=0.0)
    for index, run in enumerate(runs):
        row.add(run)
        row.last_share_step = runs[index + 1].start_step - 1 if index + 1 < len(runs) else last_share
    row.end_step = end
    return row


def test_several_steps_a_column_show_what_matters_most() -> None:
    marks = marks_of([(step, step + 1) for step in range(12)])
    row = row_of(Run(1, PREFILL, 3), Run(2, DECODE, 1), Run(6, PREEMPTED, 0), Run(7, DECODE, 1), last_share=12)
    window = Window(marks, Scale(per_column=2), last=6, width=7)
    # Columns hold the steps 0-1, 2-3, 4-5, 6-7, 8-9, 10-11, 12.
    assert line_text(window.line(row)) == "█▒▒!▒▒▒"
    window = Window(marks, Scale(per_column=5), last=2, width=3)
    assert line_text(window.line(row)) == "▌!▒"


def test_a_column_of_milliseconds_shows_steps_as_long_as_they_took() -> None:
    marks = marks_of([(0.0, 0.010), (0.010, 0.050), (0.070, 0.080)])
    row = row_of(Run(1, PREFILL, 3), Run(2, DECODE, 1), last_share=3)
    window = Window(marks, Scale("time", 10), last=7, width=8)
    assert line_text(window.line(row)) == "█▒▒▒▒--▒"  # nothing was computed between 50 and 70 ms
    assert line_text(window.steps_line()) == "||2    |"


def test_draft_cells_show_how_many_tokens_came() -> None:
    marks = marks_of([(step, step + 1) for step in range(4)])
    row = row_of(Run(1, PREFILL, 3), Run(2, DRAFT, 3), Run(3, DRAFT, 12), Run(4, DRAFT, 0), last_share=4)
    window = Window(marks, Scale(), last=4, width=4)
    assert line_text(window.line(row)) == "█392"


def test_the_axis_names_round_steps_and_the_cursors() -> None:
    marks = marks_of([(step, step + 1) for step in range(40)])
    window = Window(marks, Scale(), last=40, width=30)
    assert line_text(window.axis_line()).index("|20") == 20 - window.first
    line = window.axis_line(cursor=4)
    assert [part.text for part in line if part.role == "cursor"] == [str(window.first + 4)]
    for cursor in range(30):  # the cursor's label touches no other
        words = line_text(window.axis_line(cursor=cursor)).replace("|", " ").split()
        assert str(window.first + cursor) in words
        assert set(words) <= {"20", "30", "40", str(window.first + cursor)}


def test_the_time_axis_has_as_many_digits_as_it_needs() -> None:
    marks = marks_of([(step / 10, step / 10 + 0.1) for step in range(40)])
    labels = {ms: line_text(Window(marks, Scale("time", ms), last=30, width=31).axis_line()).split() for ms in (1, 10, 100, 1000)}
    assert labels == {
        1: ["|0.00s", "|0.01s", "|0.02s"],
        10: ["|0.0s", "|0.1s", "|0.2s"],
        100: ["|0s", "|1s", "|2s"],
        1000: ["|0s", "|10s", "|20s"],
    }


@in_virtual_time
async def test_zooming_keeps_the_cursor_on_its_step() -> None:
    async with running(ListSource(thrashing()), size=(120, 40)) as (app, pilot):
        await press(app, pilot, "6", "down", *["left"] * 30)
        view = view_of(app)
        before = view._step_id()
        assert before is not None
        for keys, distance in ((("z",), 1), (("z",), 4), (("Z", "Z"), 0), (("m",), 1), (("m",), 0)):
            await press(app, pilot, *keys)
            after = view._step_id()
            assert after is not None
            assert abs(after - before) <= distance
        await press(app, pilot, "end")
        assert view._step_id() == app.session.state.last_step_id


# ---------------------------------------------------------------------------------------------------- the cursor
@in_virtual_time
async def test_enter_opens_the_request_and_o_the_step_under_the_cursor() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "6", "down", "down", "left", "left")
        view = view_of(app)
        step_id = view._step_id()
        assert step_id == 25
        row = view._row()
        assert row is not None
        assert f"> {row.request_id} decodes: 1 token" in app.view.text
        await press(app, pilot, "enter")
        assert isinstance(app.view, RequestView)
        assert app.view.request_id == row.request_id
        await press(app, pilot, "escape")
        assert app.view.id == view.id
        await press(app, pilot, "o")
        assert app.view.text.splitlines()[0].startswith("─ step 25, field by field ─")


@in_virtual_time
async def test_above_the_rows_enter_opens_the_step() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "6", "left", "left", "left", "enter")
        assert app.view.text.splitlines()[0].startswith("─ step 24, field by field ─")


@in_virtual_time
async def test_a_cursor_stays_on_its_step_while_steps_come_and_end_follows_again() -> None:
    items = thrashing()
    source = ListSource(items[:200])
    async with running(source, size=(100, 30)) as (app, pilot):
        await press(app, pilot, "6", "down", "left", "left", "left")
        view = view_of(app)
        step_id, row = view._step_id(), view._row()
        before = app.view.text.splitlines()[1]
        source.push(*items[200:240])
        await press(app, pilot)
        assert view._step_id() == step_id
        assert view._row() is row or row is None
        assert app.view.text.splitlines()[1] == before
        await press(app, pilot, "end")
        assert view._step_id() == app.session.state.last_step_id


@in_virtual_time
async def test_the_words_of_a_waiting_request_say_why() -> None:
    async with running(ListSource(busy_items()), size=(120, 40)) as (app, pilot):
        await press(app, pilot, "6", *["down"] * 12)
        row = view_of(app)._row()
        assert row is not None
        assert row.request_id == "theta"
        text = " ".join(app.view.text.split())
        assert "> theta waits; 2nd of 2 in the queue, behind eta; no_blocks: it needs 8 KV blocks" in text
        assert "must end first" in text


@in_virtual_time
async def test_ended_requests_can_be_left_out() -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, "6")
        assert "delta" in app.view.text
        await press(app, pilot, "d")
        assert "delta" not in app.view.text
        assert "alpha" in app.view.text


@in_virtual_time
async def test_the_request_page_and_the_overview_say_why_too() -> None:
    async with running(ListSource(busy_items()), size=(120, 40)) as (app, pilot):
        assert "advice  " in app.view.text
        assert "num_kv_cache_blocks" in app.view.text
        app.query_one(RequestView).open("theta")
        app.action_show("request")
        await press(app, pilot)
        assert "2nd of 2 in the queue, behind eta" in app.view.text
        app.query_one(RequestView).open("alpha")
        await press(app, pilot)
        assert "slowest token" in app.view.text


# ---------------------------------------------------------------------------------------------------- recordings
@in_virtual_time
async def test_it_is_the_same_in_a_recording_wherever_one_goes(tmp_path: Path) -> None:
    header, _, *events = thrashing()
    assert isinstance(header, WireHeader)
    path = tmp_path / "run.jsonl"
    with StepRecorder(path, header) as recorder:
        for event in events:
            assert isinstance(event, StepEvent | StepResultEvent)
            recorder(event)
    source = FileSource(path, make_state=DashboardState, playing=False)
    app = DashboardApp(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await press(app, pilot, "6")
        await source.seek_step(150)
        for _ in range(5):
            await press(app, pilot)
        there = app.view.text
        live = DashboardState()
        for item in [header, *events]:
            live.apply(item)
            if isinstance(item, StepEvent) and item.step_id == 150:
                break
        view = view_of(app)
        assert app.session.state.last_step_id == 150
        rows = [row.request_id for row in view._rows]
        assert rows == [row.request_id for row in live.waterfall.rows(*view._window.step_range or (0, 0))]
        await source.seek_step(40)
        for _ in range(5):
            await press(app, pilot)
        assert app.session.state.last_step_id == 40
        await source.seek_step(150)
        for _ in range(5):
            await press(app, pilot)
        assert app.view.text == there
        # From a cell of long ago to its frame: the recording goes there.
        await press(app, pilot, "home", "o")
        for _ in range(5):
            await press(app, pilot)
        assert "step 1, field by field" in app.view.text.splitlines()[0]


def test_scales_say_what_a_column_is() -> None:
    assert [dataclasses.replace(Scale(), per_column=n).words() for n in (1, 5)] == ["1 step a column", "5 steps a column"]
    assert Scale("time", 20).words() == "20 ms a column"
