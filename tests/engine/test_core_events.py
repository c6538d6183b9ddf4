"""What the core tells observers: every event, whatever is in it; and what it tells of requests that leave no other trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams, StructuredOutputsParams
from aioengine.engine.loop import core_events, engine_snapshot
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.events import server as server_module
from aioengine.events import wire
from aioengine.events.params_form import build_unchecked
from aioengine.events.recording.reader import read_recording
from aioengine.events.sources.open import open_source
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent, StepResultEvent
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted
from aioengine_tui.model.state import DashboardState


async def run_to_end(engine: AsyncEngine, prompt: Any, params: SamplingParams | None = None, **options: Any) -> str | None:
    """The finish_reason; None if the request was refused."""
    reason = None
    with contextlib.suppress(InvalidRequestError):
        async for output in engine.generate(prompt, params, **options):
            reason = output.finish_reason
    return reason


async def attach(path: Path) -> DashboardState:
    """What a viewer that comes now knows when it has its first snapshot."""
    state = DashboardState()
    async with open_source(path, make_state=DashboardState) as source:
        async for item in source:
            state.apply(item)
            if state.stats is not None:
                return state
    raise AssertionError("no state came")


# ---------------------------------------------------------------------------------------------------- whatever is in it
def _params(**fields: Any) -> SamplingParams | None:
    try:
        return SamplingParams(max_tokens=3, **fields)
    except AioEngineError:  # the door does not let it in: then there is no event of it either
        return None


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {"priority": 2**70}),
        ({}, {"priority": -(10**400)}),
        ({"top_k": 10**30}, {}),
        ({"stop": "\ud800"}, {}),
        ({"stop_token_ids": [2**80]}, {}),
        ({"logit_bias": {1: 10**2 / 3}}, {"request_id": "esc\x1b[2J\n\u202e"}),
        ({"extra_args": {1: object()}}, {"cache_salt": "\x00"}),
    ],
)
async def test_a_request_of_odd_values_ends_neither_the_recording_nor_a_viewer(
    params: dict[str, Any], options: dict[str, Any], start_rig: Any, tmp_path: Path
) -> None:
    path, address = tmp_path / "steps.jsonl", tmp_path / "e.sock"
    async with start_rig(record=path, events=address, publish_text=True) as rig:
        built = _params(**params)
        rig.engine.pause()
        task = asyncio.create_task(run_to_end(rig.engine, "odd", built, **options)) if built is not None else None
        mate = asyncio.create_task(run_to_end(rig.engine, "mate", SamplingParams(max_tokens=3), request_id="mate"))
        await asyncio.sleep(0.02)
        state = await asyncio.wait_for(attach(address), 5)
        assert "mate" in state.requests
        rig.engine.resume()
        assert await mate == "length"
        if task is not None:
            assert await task in ("length", "stop", None)
        assert (await asyncio.wait_for(attach(address), 5)).stats == rig.engine.stats()
        await rig.settle()
    recording = read_recording(path)
    assert recording.events[-1].stats.num_running_reqs == 0
    finished = [info.request_id for event in recording.events if not isinstance(event, EngineSnapshot) for info in event.finished]
    assert "mate" in finished


async def test_a_schema_of_a_users_own_objects_is_recorded(start_rig: Any, tmp_path: Path) -> None:
    """Straight into the scheduler: what a grammar library makes of it is not the point here."""
    path = tmp_path / "steps.jsonl"
    schema: Any = {1: {"enum": [2**70, object()]}, "\ud800": {"a"}}
    async with start_rig(record=path) as rig:
        scheduler = rig.engine._life.started().core.scheduler
        rig.engine.pause()
        task = asyncio.create_task(run_to_end(rig.engine, [1, 2, 3], SamplingParams(max_tokens=2), request_id="odd"))
        await asyncio.sleep(0.02)
        unchecked = build_unchecked(StructuredOutputsParams, {"json": schema})  # today's door takes no such schema
        object.__setattr__(scheduler.requests["odd"].sampling_params, "structured_outputs", unchecked)
        rig.engine._life.started().core._publish_snapshot()
        object.__setattr__(scheduler.requests["odd"].sampling_params, "structured_outputs", None)
        rig.engine.resume()
        assert await task == "length"
        await rig.settle()
    snapshots = [event for event in read_recording(path).events if isinstance(event, EngineSnapshot) and event.approximate]
    assert len(snapshots) == 1
    written = snapshots[0].requests[0].sampling_params
    assert written is not None
    assert written.structured_outputs is not None
    assert written.structured_outputs.json == {"1": {"enum": [2**64 - 1, "<object>"]}, "\\ud800": ["a"]}


# ---------------------------------------------------------------------------------------------------- one that fails
async def test_an_event_that_cannot_be_built_ends_no_step_and_a_snapshot_follows(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For each kind of event: the third of it fails, and nobody is forgotten for ever."""
    for name in ("StepEvent", "StepResultEvent"):
        made = 0

        def fail(*args: Any, name: str = name, **fields: Any) -> Event:
            nonlocal made
            made += 1
            if made in (1, 3, 4):
                raise RuntimeError("one request's data")
            cls = StepEvent if name == "StepEvent" else StepResultEvent
            return cls(*args, **fields)

        caplog.clear()
        async with start_rig() as rig:
            events: list[Event] = []
            rig.engine.bus.add_observer(events.append)
            monkeypatch.setattr(core_events, name, fail)
            outputs = await rig.engine.generate_batch([[1, 2], [3]], SamplingParams(max_tokens=6))
            await rig.settle()
            monkeypatch.undo()
            assert [output.finish_reason for output in outputs] == ["length", "length"]
            assert made > 4
            news = [event for event in events if not isinstance(event, EngineSnapshot)]
            assert sum(len(event.added) for event in news) == 2, "who came is told once, with the next event"
            assert sum(len(event.finished) for event in news) == 2
            snapshots = [place for place, event in enumerate(events) if isinstance(event, EngineSnapshot)]
            assert snapshots, "for what else the event would have told"
            later = [event for event in events[snapshots[0] :] if isinstance(event, StepEvent)]
            assert len(later) > 1, "it comes with the next step, not when the engine has become idle"
            assert 1 <= caplog.text.count("an event could not be built") <= 3


async def test_text_of_one_request_that_fails_is_missing_in_a_snapshot_and_nothing_else(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_rig(publish_text=True) as rig:
        rig.engine.pause()
        tasks = [asyncio.create_task(run_to_end(rig.engine, name, request_id=name)) for name in ("good", "bad\x1b")]
        await asyncio.sleep(0.02)
        text_of = rig.engine._life.started().output.text_of

        def fail(request_id: str) -> tuple[str | None, str | None]:
            if request_id == "good":
                return text_of(request_id)  # type: ignore[no-any-return]
            raise RuntimeError("no text\x1b[2J")

        monkeypatch.setattr(rig.engine._life.started().output, "text_of", fail)
        snapshot = rig.engine.snapshot()
        assert {request.request_id: request.prompt for request in snapshot.requests} == {"good": "good", "bad\x1b": None}
        assert "is missing in a snapshot" in caplog.text
        assert "\x1b" not in caplog.text
        rig.engine.resume()
        assert await asyncio.gather(*tasks) == ["length", "length"]


async def test_a_snapshot_that_cannot_be_built_ends_neither_the_engine_nor_a_viewer(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = tmp_path / "e.sock"
    monkeypatch.setattr(server_module, "_GAP_INTERVAL_S", 0.01)
    async with start_rig(events=address) as rig:
        build = engine_snapshot.build_snapshot
        broken = True

        def fail(*args: Any, **options: Any) -> EngineSnapshot:
            if broken:
                raise RuntimeError("one request's data")
            return build(*args, **options)

        monkeypatch.setattr(core_events, "build_snapshot", fail)
        rig.engine.pause()
        rig.engine.resume()
        viewer = asyncio.create_task(attach(address))
        await asyncio.sleep(0.05)
        assert not viewer.done()
        broken = False
        assert (await asyncio.wait_for(viewer, 5)).stats == rig.engine.stats()
        assert await run_to_end(rig.engine, [1]) == "length"


async def test_an_event_that_cannot_be_encoded_costs_a_viewer_a_gap_and_a_snapshot(
    start_rig: Any, wait_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = tmp_path / "e.sock"
    async with start_rig(events=address, record=tmp_path / "steps.jsonl") as rig:
        state = DashboardState()

        async def watch() -> None:
            async with open_source(address, make_state=DashboardState, reconnect=False) as source:
                async for item in source:
                    state.apply(item)

        watching = asyncio.create_task(watch())
        await wait_for(lambda: state.stats is not None)

        to_line = wire._to_line

        def refuse(kind: type[Event], fields: Any) -> bytes:
            if kind is StepEvent:
                raise RuntimeError("one request's data")
            return to_line(kind, fields)

        with monkeypatch.context() as patch:
            patch.setattr(wire, "_to_line", refuse)
            assert await run_to_end(rig.engine, [1, 2, 3], request_id="first") == "length"
        assert await run_to_end(rig.engine, [4], request_id="second") == "length"
        await rig.settle()
        await wait_for(lambda: state.num_gaps >= 1 and not state.out_of_sync and state.stats == rig.engine.stats())
        assert not watching.done(), "the viewer was thrown out"
        assert caplog.text.count("an event could not be encoded for the viewers") == 1
        watching.cancel()
        await asyncio.wait([watching])
    recorded = read_recording(tmp_path / "steps.jsonl").events
    assert any(isinstance(event, StepEvent) and "second" in event.output.num_scheduled_tokens for event in recorded)


async def test_a_failure_is_logged_and_told_also_where_its_events_cannot_be_described(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(subject: object) -> str:
        raise ValueError("Exceeds the limit for integer string conversion")

    for name in ("describe_output", "describe_event"):
        monkeypatch.setattr(core_events, name, refuse)
    executor = FakeExecutor(num_blocks=65)
    executor.fail_at(2, exception=RuntimeError("device\x1b[2J lost\nforged"))
    engine = AsyncEngine(executor=executor, tokenizer=FakeTokenizer())
    async with engine:
        with caplog.at_level(logging.ERROR), pytest.raises(AioEngineError, match="device"):
            await engine.generate_batch([[1, 2, 3]])
    assert "the engine stops: RuntimeError: device·[2J lost·forged" in caplog.text
    assert "which cannot be described" in caplog.text
    assert "\x1b" not in caplog.text
    assert not any(line.startswith("forged") for line in caplog.text.splitlines())


# ---------------------------------------------------------------------------------------------------- what only they tell
async def test_a_request_that_comes_and_goes_without_a_step_is_told_in_a_snapshot(rig: Any) -> None:
    """No step follows that could tell of it: without a snapshot observers would go on showing it."""
    rig.engine.pause()
    events: list[Event] = []
    rig.engine.bus.add_observer(events.append)
    task = asyncio.create_task(run_to_end(rig.engine, [1, 2], request_id="passing"))
    await asyncio.sleep(0.02)
    assert [request.request_id for request in events[-1].requests] == ["passing"]  # type: ignore[union-attr]
    assert rig.engine.abort("passing")
    assert await task == "abort"
    await asyncio.sleep(0.02)
    assert all(isinstance(event, EngineSnapshot) for event in events)
    assert events[-1].requests == []  # type: ignore[union-attr]
    assert events[-1].stats.num_waiting_reqs == 0
    assert events[-1].stats.num_aborted_reqs == 1
    state = DashboardState()
    for event in events:
        state.apply(event)
    assert not state.requests
    assert state.totals.num_finished == 1
    rig.engine.resume()


@pytest.mark.parametrize(
    ("answer", "max_tokens", "stop", "expected"),
    [
        ("abc", 3, "c", ("stop", "c")),  # the last token that is allowed completes the stop string
        ("abc", 3, "z", ("length", None)),
        ("abc", 2, "c", ("length", None)),
        ("abc", 4, "c", ("stop", "c")),
        ("ab", 3, "z", ("stop", None)),  # the end-of-sequence token is the last one that is allowed
    ],
)
async def test_events_tell_the_reason_that_the_user_is_told(
    answer: str, max_tokens: int, stop: str, expected: tuple[str, str | None], start_rig: Any
) -> None:
    executor = FakeExecutor(num_blocks=65, block_size=4, max_num_seqs=8, next_token=scripted(answer))
    async with start_rig(executor) as rig:
        with rig.engine.events(maxlen=1000) as subscription:
            async for output in rig.engine.generate("q", SamplingParams(max_tokens=max_tokens, stop=(stop,))):
                last = output
            await rig.settle()
            told = [info for event in subscription.drain() if not isinstance(event, EngineSnapshot) for info in event.finished]
        assert (last.finish_reason, last.outputs[0].stop_reason) == expected
        assert [(info.finish_reason, info.stop_reason) for info in told] == [expected]
