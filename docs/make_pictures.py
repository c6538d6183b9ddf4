"""Makes the pictures of README.md and docs/ from a recording of a busy engine, one for each screen of the dashboard.

    python docs/make_pictures.py                      # records for 90 s first: the machine should have nothing else to do
    python docs/make_pictures.py --recording FILE     # of one that was made before (with --keep FILE)

Every screen is drawn twice, for dark and for light pages. The moment is the busiest step of the recording; the picture of the
README plays the steps around it. A screen that is new in the dashboard gets its picture without a change here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from rich.terminal_theme import TerminalTheme
from terminal_svg import Row, playing, still
from textual.color import Color

from aioengine.commands.demo_workload import Workload
from aioengine.commands.options import DEMO_SETTINGS
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.events.recording.reader import read_recording
from aioengine.events.sources.file import FileSource
from aioengine.events.step_event import StepEvent
from aioengine_tui.app import TABS, DashboardApp
from aioengine_tui.messages import OpenRequest
from aioengine_tui.model.state import DashboardState
from aioengine_tui.themes import THEMES

FOLDER = Path(__file__).with_name("pictures")
DASHBOARD_PAGE = Path(__file__).with_name("dashboard.md")
SCREENS = re.compile(r"(<!-- screens -->\n).*?(<!-- /screens -->)", re.DOTALL)
TOUR = Path(__file__).with_name("tour.jsonl")
TOUR_STEPS, TOUR_SIZE = (1, 5, 25), (100, 18)
SIZE = (120, 34)
RECORDED_S = 90.0
PLAYED = ("waterfall", "step")  # of these the README plays the first that the dashboard has
PLAYED_SIZE, NUM_FRAMES, FRAME_S, STEPS_A_FRAME = (110, 30), 20, 0.5, 3
BEFORE, AFTER = 60, 40  # the steps that count for how busy a moment is
SETTLE_S = 0.3  # longer than it takes to draw what was folded


async def record(path: Path, seconds: float) -> None:
    """The traffic of `aioengine top --demo`, with the model, for so long."""
    config = EngineConfig.from_options("smollm2", dict(DEMO_SETTINGS))
    async with AsyncEngine(config, record=path, publish_text=True) as engine:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(Workload(engine, seed=7).run(), timeout=seconds)


def busiest_step(path: Path) -> int:
    """The step around which the most happens: many requests, new ones and preemptions, in the steps before it and after it."""
    steps = [event for event in read_recording(path).events if isinstance(event, StepEvent)]
    happens = [_how_much_happens(event) for event in steps]
    best = max(range(BEFORE, len(steps) - AFTER), key=lambda i: sum(happens[i - BEFORE : i + AFTER]))
    return steps[best].step_id


def _how_much_happens(event: StepEvent) -> int:
    output, stats = event.output, event.stats
    num_changes = len(output.scheduled_new_reqs) + len(output.preempted_req_ids)
    return min(stats.num_running_reqs + stats.num_waiting_reqs, 24) + 4 * num_changes


@contextlib.asynccontextmanager
async def dashboard(path: Path, step_id: int, *, theme: str, size: tuple[int, int]) -> AsyncIterator[DashboardApp]:
    """A dashboard that replays `path` and stands at that step."""
    source = FileSource(path, make_state=DashboardState, playing=False)
    app = DashboardApp(source, theme=theme)
    async with app.run_test(size=size) as pilot:
        while app.session.live.header is None:  # it is opened in a thread
            assert app.failure is None, app.failure
            await pilot.pause(0.05)
        source.address = "tour.jsonl" if path == TOUR else "demo.jsonl"  # which is shown
        await source.seek_step(step_id)
        await pilot.pause(SETTLE_S)
        yield app


def rows_of(app: DashboardApp) -> list[Row]:
    return [list(strip) for strip in app.screen._compositor.render_strips()]


def terminal_theme(theme: str) -> TerminalTheme:
    colours = THEMES[theme]
    assert colours.background is not None
    assert colours.foreground is not None
    background, foreground = (Color.parse(text).rgb for text in (colours.background, colours.foreground))
    return TerminalTheme(background, foreground, [(0, 0, 0)] * 8, [(255, 255, 255)] * 8)


async def draw_screens(path: Path, step_id: int) -> None:
    """Every tab, the keys, and the page of the request that comes first in the step."""
    steps = (event for event in read_recording(path).events if isinstance(event, StepEvent))
    request_id = next(iter(next(event for event in steps if event.step_id == step_id).output.num_scheduled_tokens))
    for theme in ("dark", "light"):
        async with dashboard(path, step_id, theme=theme, size=SIZE) as app:
            for name in (*TABS, "help"):
                app.action_show(name)
                await asyncio.sleep(SETTLE_S)
                app.draw()
                await asyncio.sleep(SETTLE_S)
                save(f"{name}-{theme}", still(rows_of(app), theme=terminal_theme(theme)))
            app.on_open_request(OpenRequest(request_id))
            await asyncio.sleep(2 * SETTLE_S)
            save(f"request-{theme}", still(rows_of(app), theme=terminal_theme(theme)))


async def draw_played(path: Path, step_id: int) -> None:
    view = next(name for name in PLAYED if name in TABS)
    for theme in ("dark", "light"):
        frames = []
        async with dashboard(path, step_id - NUM_FRAMES * STEPS_A_FRAME // 2, theme=theme, size=PLAYED_SIZE) as app:
            app.action_show(view)
            for _ in range(NUM_FRAMES):
                await asyncio.sleep(SETTLE_S)
                app.draw()
                await asyncio.sleep(SETTLE_S)
                frames.append(rows_of(app))
                assert app.source.playback is not None
                await app.source.playback.step(STEPS_A_FRAME)
        save(f"playing-{theme}", playing(frames, seconds=FRAME_S, theme=terminal_theme(theme)))


async def draw_tour() -> None:
    for theme in ("dark", "light"):
        for step_id in TOUR_STEPS:
            async with dashboard(TOUR, step_id, theme=theme, size=TOUR_SIZE) as app:
                app.action_show("step")
                await asyncio.sleep(SETTLE_S)
                app.draw()
                await asyncio.sleep(SETTLE_S)
                save(f"tour-{step_id}-{theme}", still(rows_of(app), theme=terminal_theme(theme)))


def list_screens() -> None:
    """Every screen in the page of the dashboard, but the one that stands above the list."""
    pictures = "\n".join(picture(name, f"The screen {name}") for name in (*TABS, "request") if name != "step")
    page = DASHBOARD_PAGE.read_text(encoding="utf-8")
    DASHBOARD_PAGE.write_text(SCREENS.sub(lambda found: found[1] + pictures + "\n" + found[2], page), encoding="utf-8")


def picture(name: str, description: str) -> str:
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="pictures/{name}-dark.svg">'
    return f'<picture>{dark}<img alt="{description}" src="pictures/{name}-light.svg"></picture>'


def save(name: str, svg: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.svg"
    path.write_text(svg, encoding="utf-8")
    print(f"{path.name}: {len(svg) / 1000:.0f} kB", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recording", type=Path, metavar="FILE", help="draw this one (default: make one)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the recording that is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.recording or args.keep or Path(folder) / "demo.jsonl"
        if args.recording is None:
            asyncio.run(record(path, RECORDED_S))
        step_id = busiest_step(path)
        asyncio.run(draw_screens(path, step_id))
        asyncio.run(draw_played(path, step_id))
    asyncio.run(draw_tour())
    list_screens()


if __name__ == "__main__":
    main()
