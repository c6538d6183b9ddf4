"""The painted screen against the model, after random keys, events, notes, gaps, resizes, clicks and themes."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from aioengine.events.sources.base import Gap, SourceStatus, StreamItem
from aioengine.testing import in_virtual_time
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.batch import BatchView
from aioengine_tui.screens.blocks import BlocksView
from aioengine_tui.screens.frame import FrameView
from aioengine_tui.screens.help import HelpView
from aioengine_tui.screens.log import LogView
from aioengine_tui.screens.overview import OverviewView
from aioengine_tui.screens.prefix import PrefixView
from aioengine_tui.screens.request import RequestView
from aioengine_tui.screens.step import StepView
from aioengine_tui.screens.waterfall import WaterfallView
from aioengine_tui.session import Session
from aioengine_tui.themes import THEMES, Palette
from aioengine_tui.widgets.chrome import tabs_line, title_line, warnings_line
from aioengine_tui.widgets.text import fit_line, line_text
from tests.tui.painted import CUT_NUMBER, PaintedApp, faults_of
from tests.tui.support import HEADER, ListSource, MadeUpEngine, busy_items, busy_state
from tests.tui.test_app import settle

SIZES = [(40, 10), (47, 13), (60, 16), (80, 24), (93, 31), (120, 40), (154, 20), (200, 60), (30, 8)]
KEYS = [
    *"123456", "z", "Z", "m", "o", "T", "v", "w", "question_mark", "escape", "p", "t", "up", "down", "pageup", "pagedown", "home",
    "end", "left",
    "right", "enter", "s", "r", "F", "d", "l", "n", "N", "c", "slash", "e",
    "tab", "shift+tab", "plus", "minus", "P", "full_stop", "x", "S", "exclamation_mark",
]  # fmt: skip


@pytest.fixture(autouse=True)
def exports_land_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def painted(source: ListSource, *, size: tuple[int, int] = (80, 24), **options: Any) -> AsyncIterator[tuple[PaintedApp, Pilot[None]]]:
    app = PaintedApp(source, **options)
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        yield app, pilot


def traffic(seed: int) -> Iterator[list[StreamItem]]:
    """The events of a busy engine without an end, a few steps at a time."""
    rng = random.Random(seed)
    engine = MadeUpEngine(num_blocks=rng.choice([25, 41, 700]), max_num_seqs=rng.choice([3, 8]))
    for number in itertools.count():
        if len(engine.scheduler.requests) < 14:
            for index in range(rng.randint(0, 4)):
                name = rng.choice(["load", "a-very-long-name-of-a-request", "r", "名前"]) + f"-{number}-{index}"
                engine.add(name, num_prompt_tokens=rng.randint(1, 60), max_tokens=rng.randint(1, 20))
        if rng.random() < 0.2 and engine.scheduler.running:
            engine.abort(engine.scheduler.running[0].request_id)
        yield engine.run(rng.randint(1, 4))


async def random_walk(seed: int, *, num_actions: int) -> None:
    rng = random.Random(seed)
    source, events = ListSource([HEADER, SourceStatus("live", "test")]), traffic(seed)
    async with painted(source, size=rng.choice(SIZES)) as (app, pilot):
        history: list[str] = []
        for _ in range(num_actions):
            history.append(await one_action(app, pilot, source, events, rng))
            await settle(app, pilot)
            faults = faults_of(app)
            assert not faults, f"seed {seed} at {app.size}, after {history}:\n" + "\n".join(faults[:6])


async def one_action(
    app: PaintedApp, pilot: Pilot[None], source: ListSource, events: Iterator[list[StreamItem]], rng: random.Random
) -> str:
    kind: str = rng.choices(
        ["key", "events", "note", "end of note", "gap", "status", "size", "click", "wheel", "typing"], [12, 8, 2, 3, 1, 1, 3, 3, 1, 1]
    )[0]
    match kind:
        case "key":
            key: str = rng.choice(KEYS)
            await pilot.press(key)
            return key
        case "events":
            source.push(*next(events))
            return "events"
        case "note":
            app.say(rng.choice(["a note", "a note that is longer than the screen is wide " * 5]))
            return "note"
        case "end of note":
            app._note_until = time.monotonic() - 1
            return "end of note"
        case "gap":
            source.push(Gap(rng.choice([0, 3, 12345])))
            return "gap"
        case "status":
            status = rng.choice(
                [SourceStatus("lost", "connection reset by peer"), SourceStatus("live", "test"), SourceStatus("live", "test")]
            )
            source.push(status)
            return f"{status.state}"
        case "size":
            size = rng.choice(SIZES)
            await pilot.resize_terminal(*size)
            return f"{size}"
        case "click":
            x, y = rng.randrange(app.size.width), rng.randrange(app.size.height)
            await pilot.click(offset=(x, y))
            return f"click {x},{y}"
        case "wheel":
            await pilot.press(rng.choice(["down", "up"]))
            return "wheel"
        case _:
            await pilot.press("slash", *rng.choice(["load", "r", "zz", "1"]), "enter")
            return "typing"


@pytest.mark.parametrize("seed", range(4))
@in_virtual_time
async def test_what_is_painted_is_the_state_and_nothing_else(seed: int) -> None:
    await random_walk(seed, num_actions=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.ci) if seed < 108 else seed for seed in range(100, 140)])
@in_virtual_time
async def test_what_is_painted_is_the_state_after_a_long_walk(seed: int) -> None:
    await random_walk(seed, num_actions=80)


# ---------------------------------------------------------------------------------------------------- what was once wrong
@in_virtual_time
async def test_a_row_that_left_while_a_note_was_shown_does_not_stay_painted() -> None:
    source = ListSource(busy_items())
    async with painted(source) as (app, pilot):
        await pilot.press("3")
        for index in range(30):
            row = app.session.live.requests["alpha"].copy()
            row.request_id = f"ghost-{index}"
            app.session.live.requests[row.request_id] = row
        await settle(app, pilot)
        assert "ghost" in app.terminal.texts[-2]
        app.say("a note")
        await settle(app, pilot)
        for name in [name for name in app.session.live.requests if name.startswith("ghost")]:
            del app.session.live.requests[name]
        await settle(app, pilot)
        app._note_until = time.monotonic() - 1
        await settle(app, pilot)
        assert faults_of(app) == []
        assert "ghost" not in "\n".join(app.terminal.texts)


# ---------------------------------------------------------------------------------------------------- every width
def large_state() -> DashboardState:
    """Counts of weeks: seven and more digits wherever the engine has them."""
    state = busy_state()
    stats = state.stats
    assert stats is not None
    grown = {field.name: 12_345_678 for field in dataclasses.fields(stats) if getattr(stats, field.name) is not None}
    grown["num_total_blocks"] = 98_765_432
    state.data.stats = dataclasses.replace(stats, **grown)
    state.data.last_step_id = 23_456_789
    for row in state.requests.values():
        row.num_computed_tokens, row.num_output_tokens, row.num_prompt_tokens = 1_234_567, 987_654, 246_913
    return state


def test_no_number_is_cut_at_any_width() -> None:
    session, palette = Session(large_state()), Palette(THEMES["dark"])
    session.selected = "alpha"
    request = RequestView(palette, session, id="request")
    request.open("alpha")
    views = [
        kind(palette, session, id="view")
        for kind in (OverviewView, StepView, BatchView, BlocksView, LogView, HelpView, WaterfallView, FrameView, PrefixView)
    ]
    for width in range(40, 201):
        for view in [*views, request]:
            for height in (24,) if width % 7 else (7, 16, 57):
                lines = view.compose_lines(session.state, width, height)
                assert len(lines) <= height
                for line in lines:
                    text = line_text(fit_line(line, width))
                    assert not CUT_NUMBER.search(text), f"{type(view).__name__} {width}x{height}: {text!r}"
        tabs = [("overview", "Overview"), ("step", "Step"), ("batch", "Batch"), ("blocks", "KV blocks"), ("log", "Log")]
        chrome = [title_line(session.state, "/tmp/engine-12345.sock", width), tabs_line(tabs, "batch", session.state, width)]
        chrome += [warnings_line(session, width, note=note) or [] for note in ("", "saved to /home/me/aioengine-batch-step12345.csv")]
        for line in chrome:
            assert not CUT_NUMBER.search(line_text(fit_line(line, width)))
