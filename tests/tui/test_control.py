"""The keys that act on a recording's playback and on an engine that allows control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioengine.events.recording.writer import StepRecorder
from aioengine.events.sources.base import ControlError
from aioengine.events.sources.open import open_source
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.testing import in_virtual_time
from aioengine_tui.app import DashboardApp
from aioengine_tui.model.state import DashboardState
from tests.tui.support import HEADER, ListSource, busy_items
from tests.tui.test_app import press, running, settle, text_of


class RecordingEngine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = False
        self.num_reads = 0

    def _take(self, *call: Any) -> None:
        if self.refuses:
            raise ControlError("the engine is busy")
        self.calls.append(call)

    async def pause(self) -> None:
        self._take("pause")

    async def resume(self) -> None:
        self._take("resume")

    async def step(self) -> int | None:
        self._take("step")
        return 28

    async def abort(self, request_id: str) -> bool:
        self._take("abort", request_id)
        return True

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, chat: bool = False) -> str:
        self._take("submit", prompt, chat)
        return "req-9"

    async def read(self, request_id: str) -> tuple[str, bool] | None:
        self.num_reads += 1
        return "An answer." if self.num_reads > 1 else "An", self.num_reads > 1


@in_virtual_time
async def test_the_engine_is_paused_stepped_and_resumed() -> None:
    engine = RecordingEngine()
    async with running(ListSource(busy_items(), engine=engine)) as (app, pilot):
        await press(app, pilot, "full_stop")
        assert "P pauses it first" in text_of(app, "#warnings")
        await press(app, pilot, "P")
        assert engine.calls == []
        assert "P again pauses the engine itself" in text_of(app, "#warnings")
        await press(app, pilot, "P")
        app.session.live.data.paused = True
        await press(app, pilot, "full_stop", "right_square_bracket")
        assert "ENGINE PAUSED" in text_of(app, "#warnings")
        await press(app, pilot, "P")
    assert engine.calls == [("pause",), ("step",), ("step",), ("resume",)]


@in_virtual_time
async def test_an_abort_asks_once_more() -> None:
    engine = RecordingEngine()
    async with running(ListSource(busy_items(), engine=engine)) as (app, pilot):
        await press(app, pilot, "3", "x")
        assert engine.calls == []
        assert "x again aborts alpha" in text_of(app, "#warnings")
        await press(app, pilot, "down", "x")  # another request: it is asked for that one
        assert engine.calls == []
        assert "x again aborts beta" in text_of(app, "#warnings")
        await press(app, pilot, "x")
        assert engine.calls == [("abort", "beta")]
        await press(app, pilot, "end", "x")
        assert "choose a live request" in text_of(app, "#warnings")


@in_virtual_time
async def test_a_prompt_is_sent_and_a_refusal_is_shown() -> None:
    engine = RecordingEngine()
    async with running(ListSource(busy_items(), engine=engine)) as (app, pilot):
        await press(app, pilot, "a", *"hi q?", "enter")
        assert engine.calls == [("submit", "hi q?", True)]
        assert app.session.selected == "req-9"
        assert app.view.id == "request"
        await pilot.pause(1.0)
        await settle(app, pilot)
        assert app.view.text.splitlines()[0].startswith("─ prompt ─")  # before any event shows the request
        assert app.view.text.splitlines()[1] == "hi q?"
        assert app.view.text.splitlines()[3] == "An answer."
        engine.refuses = True
        await press(app, pilot, "P", "P")
        assert "the engine is busy" in text_of(app, "#warnings")


@pytest.mark.parametrize("key", ["P", "full_stop", "x", "a", "left_square_bracket", "S", "exclamation_mark", "right_curly_bracket"])
@in_virtual_time
async def test_what_the_source_cannot_do_is_said(key: str) -> None:
    async with running(ListSource(busy_items())) as (app, pilot):
        await press(app, pilot, key)
        assert any(words in text_of(app, "#warnings") for words in ("does not allow control", "only a recording"))


# ---------------------------------------------------------------------------------------------------- recordings
@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    with StepRecorder(path, HEADER) as recorder:
        for item in busy_items():
            if isinstance(item, StepEvent | StepResultEvent):
                recorder(item)
    return path


async def wait_for_step(app: DashboardApp, pilot: Any, step_id: int) -> None:
    for _ in range(100):
        await pilot.pause(0.01)
        if app.session.live.last_step_id == step_id:
            break
    await settle(app, pilot)
    assert app.session.live.last_step_id == step_id


async def test_a_recording_is_stepped_searched_and_played(recording: Path) -> None:
    app = DashboardApp(open_source(recording, make_state=DashboardState))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.05)
        if app.source.playback is not None and app.source.playback.playing:
            await pilot.press("space")
        await press(app, pilot, "2", "S", *"12", "enter")
        await wait_for_step(app, pilot, 12)
        assert "x1" in text_of(app, "#replay")
        await press(app, pilot, "right_square_bracket")
        await wait_for_step(app, pilot, 13)
        await press(app, pilot, "left_square_bracket", "left_square_bracket")
        await wait_for_step(app, pilot, 11)
        await press(app, pilot, "exclamation_mark")
        await wait_for_step(app, pilot, 20)
        assert "! preempted 1 epsilon" in app.view.text
        await press(app, pilot, "plus")
        assert "x2" in text_of(app, "#replay")
        await press(app, pilot, "S", *"nonsense", "enter")
        assert "is not a step" in text_of(app, "#warnings")
        await press(app, pilot, "S", *"100%", "enter")
        await wait_for_step(app, pilot, 27)
        await press(app, pilot, "exclamation_mark")
        assert "no preemption after this place" in text_of(app, "#warnings")
        await press(app, pilot, "S", *"12", "enter")
        await wait_for_step(app, pilot, 12)
        await press(app, pilot, "exclamation_mark")
        await wait_for_step(app, pilot, 20)
        assert app.query_one("#warnings").has_class("off"), "it is not true of the jump that succeeded"
        await press(app, pilot, "S", *"0", "%", "enter", "plus", "plus", "plus", "space")
        await wait_for_step(app, pilot, 27)


async def test_the_same_events_look_the_same_from_a_recording(recording: Path) -> None:
    """Only the frame around the screen tells a recording from an engine."""
    app = DashboardApp(open_source(recording, make_state=DashboardState))
    async with app.run_test(size=(80, 24)) as pilot:
        await press(app, pilot, "S", *"100%", "enter")
        await wait_for_step(app, pilot, 27)
        replayed = {}
        for key in "345":
            await press(app, pilot, key)
            replayed[key] = app.view.text.splitlines()[:15]
    items = busy_items()
    assert sum(isinstance(item, StepEvent) for item in items) == 27
    async with running(ListSource(items), size=(80, 23)) as (live, pilot):
        for key in "345":
            await press(live, pilot, key)
            assert live.view.text.splitlines()[:15] == replayed[key]
