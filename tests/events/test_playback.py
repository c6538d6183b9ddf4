"""Going about in a recording."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from aioengine.core.scheduler_output import BlockChanges, CachedRequestData, NewRequestData, SchedulerOutput, SchedulerStats
from aioengine.events.recording.cursor import RecordingCursor
from aioengine.events.recording.index import LANDMARKS, STRIDE, RecordingIndex
from aioengine.events.recording.reader import read_recording
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.sources.base import Restored, StreamItem
from aioengine.events.sources.file import FileSource
from aioengine.events.step_event import EngineSnapshot, FinishedInfo, StepEvent, StepResultEvent
from aioengine.events.wire import WireError, WireHeader
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import state_to_json
from tests.tui.runs import make_run
from tests.waiting import until


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    make_run(num_requests=60, record=path)
    return path


def as_bytes(state: DashboardState) -> bytes:
    return orjson.dumps(state_to_json(state, complete=True))


# ---------------------------------------------------------------------------------------------------- the index
def test_names_that_look_like_fields_mislead_nobody(tmp_path: Path) -> None:
    """Request ids and the properties of a JSON schema are keys of the lines too."""
    schema = {
        "schedule_start": 1.0,
        "preempted_req_ids": [],
        "finished": [{"request_id": "x", "finish_reason": "abort", "num_output_tokens": 1}],
        "enum": ["finish_reason", "abort"],
    }
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    stats, names = SchedulerStats(0, 1, 0, 10, 9, 0, 0, 0, 0), ["schedule_start", "update_end", "preempted_req_ids", "finish_reason"]
    path = tmp_path / "names.jsonl"
    with StepRecorder(path, WireHeader.create("tiny", include_prompts=True)) as recorder:
        for step_id, duration in enumerate((0.5, 4.0, 1.0), start=1):
            start = 100.0 * step_id
            output = SchedulerOutput(
                step_id,
                [NewRequestData(names[step_id], [1], params, ([1],), 0)],
                CachedRequestData(),
                dict.fromkeys(names, 1),
                len(names),
                preempted_req_ids=frozenset({"p"} if step_id == 2 else ()),
            )
            recorder(
                StepEvent(step_id, start, output, stats, "budget", 8, BlockChanges(), 1, start, start, [], [FinishedInfo("q", "stop", 1)])
            )
            times = (start, start, start, start, start, start + duration)
            told = [FinishedInfo("finish_reason", "abort" if step_id == 3 else "stop", 1)]
            text = {"finish_reason": "abort", "update_end": "7"}
            recorder(StepResultEvent(step_id, start, dict.fromkeys(names, 1), stats, BlockChanges(), 0, *times, told, new_text=text))
    index = RecordingIndex(path)
    assert index.scan()
    assert [index.next_landmark("preemption", 0), index.next_landmark("preemption", 3)] == [3, None]
    assert [index.next_landmark("abort", 0), index.next_landmark("abort", 6)] == [6, None]
    slowest = [index.next_landmark("slowest", 0)]
    slowest += [index.next_landmark("slowest", slowest[0] or 0)]
    assert slowest == [3, 5], "4 s, then 1 s"


def test_the_index_finds_every_step_and_landmark(path: Path) -> None:
    events = read_recording(path).events
    index = RecordingIndex(path)
    while not index.scan(budget_s=0.001):
        pass
    assert index.num_events == len(events) > 3 * STRIDE
    steps = [(position + 1, event) for position, event in enumerate(events) if isinstance(event, StepEvent)]
    for position, event in steps:
        assert index.position_of_step(event.step_id) == position
    assert index.position_of_step(10**6) == len(events)
    preempting = [position for position, event in steps if event.output.preempted_req_ids]
    assert preempting
    position, found = 0, []
    while (following := index.next_landmark("preemption", position)) is not None:
        position = following
        found.append(position)
    assert found == preempting
    assert index.next_landmark("preemption", len(events), backwards=True) == preempting[-1]
    assert index.next_landmark("preemption", preempting[0], backwards=True) is None
    aborting = [
        position + 1
        for position, event in enumerate(events)
        if isinstance(event, (StepEvent, StepResultEvent)) and any(info.finish_reason == "abort" for info in event.finished)
    ]
    assert index.next_landmark("abort", 0) == aborting[0]
    starts = {event.step_id: (event.schedule_start, position) for position, event in steps}
    durations = {
        event.update_end - starts[event.step_id][0]: starts[event.step_id][1] for event in events if isinstance(event, StepResultEvent)
    }
    slowest = [durations[seconds] for seconds in sorted(durations, reverse=True)]
    assert index.next_landmark("slowest", 0) == slowest[0]
    assert index.next_landmark("slowest", slowest[0]) == slowest[1]
    assert index.next_landmark("slowest", slowest[1], backwards=True) == slowest[0]


def test_times_and_steps_are_counted_from_any_place(path: Path) -> None:
    events = read_recording(path).events
    index = RecordingIndex(path)
    index.scan()
    behind = [position + 1 for position, event in enumerate(events) if isinstance(event, StepEvent)]
    for start in (0, 1, behind[5], behind[5] + 1, len(events)):
        for count in (1, 2, 40):
            later = [position for position in behind if position > start]
            earlier = [position for position in behind if position < start]
            assert index.position_of_steps_from(start, count) == (later[count - 1] if len(later) >= count else len(events))
            assert index.position_of_steps_from(start, -count) == (earlier[-count] if len(earlier) >= count else 0)
    middle = events[len(events) // 2].time - index.first_time
    place = index.position_of_time(middle)
    assert events[place - 1].time - index.first_time <= middle < events[place].time - index.first_time
    assert index.position_of_time(-1) == 0
    assert index.position_of_time(1e9) == len(events)


def test_a_growing_file_with_a_torn_line(path: Path, tmp_path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    copy = tmp_path / "growing.jsonl"
    copy.write_bytes(b"".join(lines[:10]) + lines[10][:20])
    player = RecordingCursor(copy, make_state=DashboardState)
    assert player.index.scan()
    assert player.index.num_events == 9
    while player.next_event() is not None:
        pass
    assert player.position == 9
    with copy.open("ab") as file:
        file.write(lines[10][20:] + lines[11])
    assert player.index.scan()
    assert player.index.num_events == 11
    assert player.next_event() is not None
    assert player.position == 10
    player.close()


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="cannot read"):
        RecordingIndex(tmp_path / "absent")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("hello\n")
    with pytest.raises(WireError, match="line 1"):
        RecordingIndex(bad)


# ---------------------------------------------------------------------------------------------------- the player
def test_every_place_has_the_state_of_having_come_there_step_by_step(path: Path) -> None:
    recording = read_recording(path)
    length = len(recording.events)
    places = (length, length - 1, length - 2, 5, 100, 99, 0, length // 2, length // 2 - 1, 3, length)
    expected: dict[int, bytes] = {}
    state = DashboardState()
    state.apply(recording.header)
    for position, event in enumerate([*recording.events, None]):
        if position in places:
            expected[position] = as_bytes(state)
        if event is not None:
            state.apply(event)
    player = RecordingCursor(path, make_state=DashboardState, whole_history=True)
    for place in places:
        player.seek(place)
        assert player.position == place
        assert as_bytes(player.state) == expected[place], place
    player.close()


def test_the_states_that_are_kept_are_a_bounded_number(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.events.recording.cursor._FIRST_INTERVAL", 4)
    monkeypatch.setattr("aioengine.events.recording.cursor._MAX_CHECKPOINTS", 10)
    player = RecordingCursor(path, make_state=DashboardState, whole_history=True)
    for _ in player.seek_in_parts(10**9, part=1):
        assert len(player._checkpoints) <= 10
        assert len(player._near) <= 8
    assert len(player._checkpoints) >= 5
    end = player.position
    player.seek(end - 1)
    assert player.position == end - 1
    player.close()


def test_stepping_back_folds_few_events(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player = RecordingCursor(path, make_state=DashboardState, whole_history=True)
    player.seek(10**9)
    player.seek(player.position - 1)
    folded = 0
    real = DashboardState.apply

    def counting(self: DashboardState, item: StreamItem) -> None:
        nonlocal folded
        folded += 1
        real(self, item)

    monkeypatch.setattr(DashboardState, "apply", counting)
    for _ in range(20):
        player.seek(player.position - 1)
    assert folded <= 20 * 40
    player.close()


def test_playing_folds_nothing_and_takes_copies_for_going_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.events.recording.cursor._FIRST_INTERVAL", 64)
    player = RecordingCursor(path, make_state=DashboardState, whole_history=True)
    viewer = DashboardState()
    viewer.apply(player.index.header)
    states: list[bytes] = [as_bytes(viewer)]
    while (event := player.next_event()) is not None:
        viewer.apply(event)
        states.append(as_bytes(viewer))
        if player.wants_state:
            player.put_aside(player.position, viewer.copy())
    assert player._state.num_events == 0
    player.index.scan()
    for place in (len(states) - 2, 130, 129, 64, 3, 200):
        player.seek(place)
        assert as_bytes(player.state) == states[place], place
        event = player.next_event()
        assert event is not None
        assert event.time == player.last_time
    player.close()


def test_a_far_seek_begins_at_a_snapshot(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.engine.loop.core_events.SNAPSHOT_INTERVAL", 10)
    monkeypatch.setattr("aioengine.events.recording.cursor._MAX_FOLDED", 40)
    make_run(num_requests=60, record=tmp_path / "run.jsonl")
    events = read_recording(tmp_path / "run.jsonl").events
    snapshots = [place for place, event in enumerate(events) if isinstance(event, EngineSnapshot) and event.requests]
    assert len(snapshots) > 5
    target = len(events) - 30
    far, whole = (RecordingCursor(tmp_path / "run.jsonl", make_state=DashboardState, whole_history=whole) for whole in (False, True))
    for player in (far, whole):
        player.seek(target)
        assert player.position == target
    base = max(place for place in snapshots if place < target)
    assert far.state.num_events == target - base
    assert whole.state.num_events == target
    assert far.state.block_codes() == whole.state.block_codes()
    assert far.state.requests.keys() == whole.state.requests.keys()
    assert far.state.stats == whole.state.stats
    assert "begins with a snapshot" in far.state.log.lines[0].text
    far.seek(30)
    assert far.state.num_events == 30  # near enough to the beginning for all of it
    far.close()
    whole.close()


def test_the_totals_at_a_place_are_the_same_by_any_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far seeks begin at snapshots, and what this viewer saw itself is then less; the engine's own counts are not."""
    monkeypatch.setattr("aioengine.engine.loop.core_events.SNAPSHOT_INTERVAL", 10)
    monkeypatch.setattr("aioengine.events.recording.cursor._MAX_FOLDED", 40)
    make_run(num_requests=60, record=tmp_path / "run.jsonl")
    states, state = [], DashboardState()
    for event in read_recording(tmp_path / "run.jsonl").events:
        states.append(state.totals)
        state.apply(event)
    rng, num_less = random.Random(0), 0
    player = RecordingCursor(tmp_path / "run.jsonl", make_state=DashboardState)
    for _ in range(40):
        player.seek(rng.randrange(1, len(states)))
        totals = player.state.totals
        assert totals == states[player.position]
        assert totals.origin == "engine"
        num_less += player.state.since_attach.num_output_tokens < totals.num_output_tokens
        assert player.last_time == pytest.approx(player.state.last_event_time)
    assert num_less > 10
    player.close()


# ---------------------------------------------------------------------------------------------------- the source
@contextlib.asynccontextmanager
async def watching(source: FileSource, state: DashboardState) -> AsyncIterator[None]:
    async def consume() -> None:
        async for item in source:
            state.apply(item)

    async with source:
        task = asyncio.create_task(consume())
        yield
        assert not task.done() or task.exception() is None
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.alone
async def test_it_plays_to_the_end_at_its_speed(path: Path) -> None:
    state = DashboardState()
    source = FileSource(path, make_state=DashboardState)
    start = time.monotonic()
    async with watching(source, state):
        source.set_speed(2.0)
        await until(lambda: state.status.state == "playing")
        await until(lambda: not source.playing)
        await until(lambda: state.num_events == source.length)
        took = time.monotonic() - start
        assert source.duration / 2 * 0.8 < took < source.duration / 2 + 2
        assert state.status.position == state.status.length == source.length
        assert state.requests == {}
        assert source.elapsed == pytest.approx(source.duration)


async def test_during_a_jump_the_time_and_the_place_are_those_of_what_is_shown(path: Path) -> None:
    state = DashboardState()
    source = FileSource(path, make_state=DashboardState, playing=False)
    async with watching(source, state):
        await source.seek_step(5)
        await until(lambda: state.last_step_id == 5)
        before = (source.now(), source.position, source.elapsed)
        assert before[0] == state.now
        seeking = asyncio.create_task(source.seek_fraction(0.9))
        num_looks = 0
        while state.last_step_id == 5:
            assert (source.now(), source.position, source.elapsed) == before, "the old step stands beside its own time"
            assert state.status.position == before[1] or state.status.position is None
            num_looks += source.seeking
            await asyncio.sleep(0)
        await seeking
        assert num_looks > 2
        await until(lambda: not source.seeking)
        assert source.now() == state.now > before[0]
        assert source.position == state.num_events
        await source.seek_fraction(0.0)
        await until(lambda: state.num_events == 0)
        assert source.now() == state.now
        assert (source.position, source.elapsed) == (0, 0.0)


async def test_pause_step_seek_and_jump(path: Path) -> None:
    state = DashboardState()
    source = FileSource(path, make_state=DashboardState, playing=False)
    async with watching(source, state):
        await until(lambda: state.header is not None)
        assert state.last_step_id == 0
        for expected in (1, 2, 3):
            await source.step()
            await until(lambda: state.last_step_id == expected)  # noqa: B023
        await source.step(-1)
        await until(lambda: state.last_step_id == 2)
        await source.step(10)
        await until(lambda: state.last_step_id == 12)
        await source.seek_step(40)
        await until(lambda: state.last_step_id == 40)
        assert state.current is not None
        assert state.current.in_flight
        assert await source.jump("preemption")
        await until(lambda: not source.seeking and state.num_events == source.position)
        assert state.current.preempted_ids
        before = state.last_step_id
        assert before > 40
        moved = await source.jump("preemption", backwards=True)
        await until(lambda: not source.seeking and state.num_events == source.position)
        assert (state.last_step_id < before) == moved
        assert await source.jump("slowest")
        await source.seek_fraction(1.0)
        await until(lambda: state.status.position == source.length and state.requests == {})
        assert not await source.jump("preemption")
        await source.seek_time(0.0)
        await until(lambda: state.num_events <= 2)
        assert state.status.state == "paused"
        source.play()
        await until(lambda: state.num_events > 10)
        source.toggle()
        await until(lambda: state.status.state == "paused")
        shown = state.num_events
        await asyncio.sleep(0.05)
        assert state.num_events == shown
        now = source.now()
        await asyncio.sleep(0.02)
        assert source.now() == now


@pytest.mark.parametrize(("asked", "given"), [(0.0, 0.01), (-3.0, 0.01), (1e9, 1000.0), (2.5, 2.5)])
async def test_the_speed_keeps_to_its_limits(path: Path, asked: float, given: float) -> None:
    source = FileSource(path, make_state=DashboardState, playing=False)
    async with source:
        source.set_speed(asked)
        assert source.speed == given


async def test_a_viewer_is_asked_for_copies_while_it_plays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.events.recording.cursor._FIRST_INTERVAL", 32)
    state = DashboardState()
    source = FileSource(path, make_state=DashboardState)
    async with watching(source, state):
        source.set_speed(100.0)
        await until(lambda: not source.playing and state.num_events == source.length)
        cursor = source._cursor
        assert cursor is not None
        kept = dict(cursor._checkpoints)
        assert [kept[place].num_events for place in kept] == list(kept) != []
        await source.step(-1)
        await until(lambda: not source.seeking and state.num_events == source.position)


@pytest.fixture
def damaged(path: Path, tmp_path: Path) -> Path:
    lines = path.read_bytes().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join([*lines[:5], b"garbage\n", *lines[5:]]))
    return bad


async def test_a_damaged_line_stops_the_replay_and_says_where(damaged: Path) -> None:
    state = DashboardState()
    source = FileSource(damaged, make_state=DashboardState)
    async with watching(source, state):
        await until(lambda: "line 6" in state.status.detail)
        assert state.num_events == 4


def test_a_far_jump_shows_its_place_first_and_its_history_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.engine.loop.core_events.SNAPSHOT_INTERVAL", 10)
    monkeypatch.setattr("aioengine.events.recording.cursor._MAX_FOLDED", 20)
    monkeypatch.setattr("aioengine.events.recording.cursor.HISTORY_EVENTS", 200)
    monkeypatch.setattr("aioengine.events.sources.file.HISTORY_EVENTS", 200)
    make_run(num_requests=60, record=tmp_path / "run.jsonl")
    first, second = asyncio.run(_two_states_of_a_jump(tmp_path / "run.jsonl"))
    assert first.num_events < 40
    assert 200 <= second.num_events < 300
    assert first.last_step_id == second.last_step_id
    assert first.block_codes() == second.block_codes()
    assert first.requests.keys() == second.requests.keys()
    assert len(second.steps) > len(first.steps)


async def _two_states_of_a_jump(path: Path) -> list[DashboardState]:
    restored: list[DashboardState] = []
    async with FileSource(path, make_state=DashboardState, playing=False) as source:
        await source.seek_fraction(0.9)
        async for item in source:
            if isinstance(item, Restored):
                restored.append(item.state)
                if len(restored) == 2:
                    break
    return restored


def test_the_marks_of_the_bar_are_the_landmarks(path: Path) -> None:
    index = RecordingIndex(path)
    index.scan()
    for kind in LANDMARKS:
        num_cells = 37
        marked = [cell for cell, on in enumerate(index.marks(kind, num_cells)) if on]
        places: set[int] = set()
        place = index.next_landmark(kind, 0)
        while place is not None and place not in places:
            places.add(place)
            place = index.next_landmark(kind, place)
        assert marked == sorted({next(c for c in range(num_cells) if p <= round(index.num_events * (c + 1) / num_cells)) for p in places})


def test_snapshots_come_as_often_as_a_reader_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the work that folding what lies between them is, not by steps alone."""
    monkeypatch.setattr("aioengine.engine.loop.core_events.SNAPSHOT_WORK", 500)
    make_run(num_requests=60, record=tmp_path / "run.jsonl")
    events = read_recording(tmp_path / "run.jsonl").events
    work, most = 0, 0
    for event in events:
        if isinstance(event, EngineSnapshot):
            work = 0
        elif isinstance(event, StepEvent):
            work += 30 + len(event.output.num_scheduled_tokens)
            most = max(most, work)
    assert 500 <= most < 800
