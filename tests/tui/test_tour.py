"""The tour: scenes of the real engine, and words that come when what they are about happens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from aioengine.commands.tour_recording import Cue, StepClock, place_cues, record_scene
from aioengine.commands.tour_scenes import SCENES
from aioengine.events.recording.cursor import RecordingCursor
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.testing import in_virtual_time
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.frame import FrameView
from aioengine_tui.tour import Scene, TourApp, TourSource, tour_text
from tests.tui.test_app import press, settle


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[Scene]:
    folder = tmp_path_factory.mktemp("tour")
    return [record_scene(script, folder) for script in SCENES]


def events_of(scene: Scene) -> list[Event]:
    cursor = RecordingCursor(scene.path, make_state=DashboardState)
    events: list[Event] = []
    while (event := cursor.next_event()) is not None:
        events.append(event)
    cursor.close()
    return events


# ---------------------------------------------------------------------------------------------------- the recordings
def test_there_are_ten_scenes_of_what_an_engine_does(scenes: list[Scene]) -> None:
    assert [scene.title for scene in scenes] == [
        "continuous batching",
        "chunked prefill",
        "prefix-cache hit",
        "preempt and resume",
        "the end of a request",
        "overlap",
        "guesses (draft tokens)",
        "grammar masks",
        "priorities",
        "abort",
    ]
    assert all(len(scene.captions) >= 4 for scene in scenes)


def test_a_scene_is_the_same_every_time(scenes: list[Scene], tmp_path: Path) -> None:
    for script, scene in zip(SCENES, scenes, strict=True):
        again = record_scene(script, tmp_path)
        assert again.captions == scene.captions
        lines = [path.read_bytes().splitlines()[1:] for path in (scene.path, again.path)]  # the header has the versions of this machine
        assert lines[0] == lines[1]


def test_each_scene_shows_what_it_is_about(scenes: list[Scene]) -> None:
    steps = {
        script.name: [event for event in events_of(scene) if isinstance(event, StepEvent)]
        for script, scene in zip(SCENES, scenes, strict=True)
    }
    outputs = {name: [event.output for event in events] for name, events in steps.items()}
    assert max(len(output.num_scheduled_tokens) for output in outputs["batching"]) == 3
    assert {output.num_scheduled_tokens.get("chat") for output in outputs["chunks"][5:8]} == {1}
    assert [new.num_computed_tokens for output in outputs["prefix"] for new in output.scheduled_new_reqs] == [0, 32, 32, 48]
    assert any(output.preempted_req_ids for output in outputs["preemption"])
    assert outputs["cleanup"][-1].is_cleanup_only
    assert max(event.queue_depth for event in steps["overlap"]) == 2
    assert any(output.scheduled_spec_decode_tokens for output in outputs["guesses"])
    assert any(output.structured_output_request_ids == {"json"} for output in outputs["masks"])
    assert any("backup" in output.preempted_req_ids for output in outputs["priority"])
    assert any("leaves" in output.finished_req_ids for output in outputs["abort"])


def test_the_masked_request_writes_what_its_words_say(scenes: list[Scene]) -> None:
    state = DashboardState()
    for event in events_of(scenes[7]):
        state.apply(event)
    row = state.row("json")
    assert row is not None
    assert row.text is not None
    assert row.text.startswith('{"n": ')
    assert row.text[6:9].isdigit()
    assert len(row.text) == 10


def test_words_about_what_never_happens_are_an_error() -> None:
    script = dataclasses.replace(SCENES[0], cues=(Cue(lambda event: event.step_id == 10_000, "never"),))
    with pytest.raises(ValueError, match="no step is what these words are about: 'never'"):
        place_cues(script, [])


def test_the_clock_of_a_scene_lets_nothing_be_in_two_places(scenes: list[Scene]) -> None:
    """The host and the worker each do one thing at a time, a step's phases follow each other, and two steps do overlap."""
    for scene in scenes:
        events = events_of(scene)
        host = [
            (e.schedule_start, e.schedule_end) if isinstance(e, StepEvent) else (e.update_start, e.update_end)
            for e in events
            if not hasattr(e, "requests")
        ]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(host))
        results = [event for event in events if isinstance(event, StepResultEvent)]
        spans = [(event.execute_start or 0.0, event.sample_end or 0.0) for event in results]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
        assert [event.time for event in events] == sorted(event.time for event in events)
    scheduled = {event.step_id: event for event in events_of(scenes[5]) if isinstance(event, StepEvent)}
    back = {event.step_id: event for event in events_of(scenes[5]) if isinstance(event, StepResultEvent)}
    assert any(scheduled[step + 1].schedule_end < (back[step].sample_end or 0.0) for step in list(back)[1:-1])
    assert StepClock(0.0).retime([]) == []


def test_the_words_can_be_read_without_a_terminal(scenes: list[Scene]) -> None:
    text = tour_text(scenes)
    assert text.startswith("1. continuous batching\n   A language model writes one token (a piece of a word) at a time")
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("\n\n") == 9


# ---------------------------------------------------------------------------------------------------- the screen
@asynccontextmanager
async def touring(scenes: list[Scene], size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[TourApp, Pilot[None]]]:
    app = TourApp(TourSource(scenes, make_state=DashboardState))
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        yield app, pilot


def words_of(app: TourApp) -> str:
    return " ".join(" ".join(line.split()) for line in app.query_one("#tour").text.splitlines()[1:-1])  # type: ignore[attr-defined]


async def go_to_step(app: TourApp, pilot: Pilot[None], step_id: int) -> None:
    app.source.playback.pause()
    await app.source.playback.seek_step(step_id)
    for _ in range(3):
        await settle(app, pilot)


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
@in_virtual_time
async def test_every_scene_can_be_followed_and_all_its_words_be_read(size: tuple[int, int], scenes: list[Scene]) -> None:
    async with touring(scenes, size) as (app, pilot):
        for number, scene in enumerate(scenes, 1):
            assert app.view.id == scene.screen
            for caption in scene.captions:
                if caption.step_id:
                    await go_to_step(app, pilot, caption.step_id)
                assert f"tour {number}/10" in app.query_one("#tour").text  # type: ignore[attr-defined]
                assert " ".join(words_of(app).split()) == " ".join(caption.text.split())
                assert app.view.size.height >= 5
                if caption.field is not None:
                    assert isinstance(app.view, FrameView)
                    assert [part.text for line in app.view.lines for part in line if part.role == "cursor"] == [caption.field]
            await press(app, pilot, "n")
            await settle(app, pilot)


@in_virtual_time
async def test_scenes_are_gone_through_by_keys(scenes: list[Scene]) -> None:
    async with touring(scenes) as (app, pilot):
        await press(app, pilot, "b")
        assert "this is the first scene" in app.query_one("#warnings").text  # type: ignore[attr-defined]
        await press(app, pilot, "n", "n")
        assert app.view.id == "blocks"
        await go_to_step(app, pilot, 20)
        assert app.session.live.last_step_id == 20
        await press(app, pilot, "r")
        await settle(app, pilot)
        assert app.session.live.last_step_id < 20
        assert app.session.live.num_gaps == 0
        await press(app, pilot, "b")
        assert app.view.id == "step"
        await press(app, pilot, "3", "slash", *"nbr")  # letters that are typed are no commands
        assert app.source.index == 1
        await press(app, pilot, "escape", *"nnnnnnnnn")
        assert app.source.index == 9
        assert "this is the last scene" in app.query_one("#warnings").text  # type: ignore[attr-defined]


@in_virtual_time
async def test_a_scene_waits_while_new_words_are_read_and_goes_on_by_itself(scenes: list[Scene]) -> None:
    async with touring(scenes) as (app, pilot):
        playback = app.source.playback
        assert not playback.playing  # the first words
        app._go_on_at = 0.0  # they have been read
        await settle(app, pilot)
        assert playback.playing
        await press(app, pilot, "space")
        assert not playback.playing
        await settle(app, pilot)
        assert not playback.playing  # the reader has stopped it: it waits for the reader
