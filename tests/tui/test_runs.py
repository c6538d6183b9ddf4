"""A whole recording as data, against what the engine said of itself and against the waterfall's own rules."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from aioengine.core.scheduler_output import CachedRequestData
from aioengine.events.recording.reader import Recording, read_recording
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine_tui.model.state import DashboardState
from aioengine_tui.runs import trace as trace_module
from aioengine_tui.runs.compare import Comparison, along, compare, comparison_to_json
from aioengine_tui.runs.compare_lines import compare_lines
from aioengine_tui.runs.reading import RunBuilder, read_run
from aioengine_tui.runs.run_log import RunLog
from aioengine_tui.runs.summary import latency_figures, summarize
from aioengine_tui.runs.trace import trace_lines
from aioengine_tui.widgets.text import line_text, width_of
from tests.tui.chrome_trace import faults_of
from tests.tui.runs import make_run
from tests.tui.support import HEADER, MadeUpEngine


@pytest.fixture(scope="module")
def recording(path: Path) -> Recording:
    return read_recording(path)


@pytest.fixture(scope="module")
def log(path: Path) -> RunLog:
    return read_run(path)


# ---------------------------------------------------------------------------------------------------- the data
def test_the_columns_are_the_steps(log: RunLog, recording: Recording) -> None:
    steps = [event for event in recording.events if isinstance(event, StepEvent)]
    results = {event.step_id: event for event in recording.events if isinstance(event, StepResultEvent)}
    assert len(log.steps) == len(steps) > 100
    for index, event in enumerate(steps):
        assert log.steps["step_id"][index] == event.step_id
        assert log.steps["num_tokens"][index] == event.output.total_num_scheduled_tokens
        assert log.steps["num_requests"][index] == len(event.output.num_scheduled_tokens)
        assert log.steps["num_preempting"][index] == len(event.output.preempted_req_ids)
        assert log.steps["num_used_blocks"][index] == event.stats.num_used_blocks
        assert log.steps["num_new_tokens"][index] == sum(results[event.step_id].num_new_tokens.values())
        assert log.steps.span("update", index) == (results[event.step_id].update_start, results[event.step_id].update_end)


def test_the_pieces_of_the_requests_are_the_batches(log: RunLog, recording: Recording) -> None:
    """Added up again, step by step, they give what the scheduler scheduled."""
    rebuilt: dict[int, dict[str, int]] = {}
    for request in log.requests:
        for before, after in zip(request.pieces, request.pieces[1:], strict=False):
            assert after.first_step == before.last_step + 1 or not before.is_scheduled, "no step twice, none left out"
            assert after.first_step > before.last_step
            assert before.start <= before.end
        for piece in request.pieces:
            for index in range(piece.num_steps if piece.is_scheduled else 0):
                rebuilt.setdefault(piece.first_step + index, {})[request.request_id] = piece.tokens[index] if piece.tokens else 1
    scheduled = {
        event.step_id: event.output.num_scheduled_tokens
        for event in recording.events
        if isinstance(event, StepEvent) and event.output.num_scheduled_tokens
    }
    assert rebuilt == scheduled


def test_ends_and_latencies_are_those_of_the_events(log: RunLog, recording: Recording) -> None:
    finished = {info.request_id: info for event in recording.events for info in getattr(event, "finished", ())}
    assert {r.request_id: (r.finish_reason, r.num_output_tokens) for r in log.requests} == {
        name: (info.finish_reason, info.num_output_tokens) for name, info in finished.items()
    }
    first_tokens: dict[str, float] = {}
    for event in recording.events:
        for name, count in event.num_new_tokens.items() if isinstance(event, StepResultEvent) else ():
            if count:
                first_tokens.setdefault(name, event.time)
    assert {r.request_id: r.first_token_time for r in log.requests if r.first_token_time is not None} == first_tokens
    assert Counter(r.num_preemptions for r in log.requests)[0] < len(log.requests)
    assert sum(r.num_preemptions for r in log.requests) == sum(log.steps["num_preempting"])


def test_latencies_between_tokens_and_totals_are_those_of_the_dashboard(log: RunLog, recording: Recording) -> None:
    state = DashboardState()
    state.apply(recording.header)
    for event in recording.events:
        state.apply(event)
    assert sorted(log.itls.items()) == sorted(state.data.itls.recent(state.now))
    assert sum(log.steps["num_prompt_tokens"]) == state.totals.num_prompt_tokens_computed
    assert sum(log.steps["num_recomputed_tokens"]) == state.totals.num_recomputed_tokens > 0
    assert sum(log.steps["num_new_tokens"]) == state.totals.num_output_tokens


def test_a_recording_that_begins_in_the_middle_still_reads(recording: Recording) -> None:
    builder = RunBuilder(recording.header)
    for event in recording.events[100:]:
        builder.add(event)
    log = builder.finish()
    assert len(log.steps) > 50
    assert all(request.pieces for request in log.requests)


def test_a_step_without_a_request_and_a_result_without_a_token_are_told_apart() -> None:
    engine = MadeUpEngine()
    engine.add("only", num_prompt_tokens=8, max_tokens=20)
    builder = RunBuilder(HEADER)
    for item in engine.run(10):
        if isinstance(item, StepEvent) and item.step_id == 5:
            output = dataclasses.replace(item.output, scheduled_cached_reqs=CachedRequestData(), num_scheduled_tokens={})
            builder.add(dataclasses.replace(item, output=dataclasses.replace(output, total_num_scheduled_tokens=0)))
        elif isinstance(item, StepResultEvent) and item.step_id in (5, 8):
            builder.add(dataclasses.replace(item, num_new_tokens={"only": 0} if item.step_id == 8 else {}))
        else:
            assert isinstance(item, StepEvent | StepResultEvent)
            builder.add(item)
    (request,) = builder.finish().requests
    pieces = [(piece.kind, piece.first_step, piece.last_step) for piece in request.pieces if piece.num_steps]
    assert pieces == [("prefill", 1, 1), ("decode", 2, 4), ("idle", 5, 5), ("decode", 6, 10)]
    gaps = sorted((round(gap, 3), count) for gap, count in builder.log.itls.items())
    assert gaps == [(0.02, 1)] * 5 + [(0.04, 1)] * 2


# ---------------------------------------------------------------------------------------------------- the trace
def test_the_trace_keeps_the_rules_of_its_format(log: RunLog) -> None:
    data = b"".join(trace_lines(log))
    assert faults_of(data) == []
    events = json.loads(data)["traceEvents"]
    slices = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert slices["request"] == len(log.requests)
    assert slices["step"] == 4 * len(log.steps)
    assert slices["preempted"] and slices["resumed"] and slices["waiting"] and slices["decode"]  # noqa: PT018
    shown = {event["args"]["used"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"}
    assert shown == set(log.steps["num_used_blocks"])


def test_the_checker_of_traces_finds_faults(log: RunLog) -> None:
    trace = json.loads(b"".join(trace_lines(log)))
    index, one = next((i, event) for i, event in enumerate(trace["traceEvents"]) if event["ph"] == "X" and event["dur"] > 10)
    for change in ({"tid": "r1"}, {"dur": -1}, {"ts": None}, {"ph": "Y"}):
        events = [*trace["traceEvents"]]
        events[index] = {**one, **change}
        assert faults_of(json.dumps({**trace, "traceEvents": events}).encode()), change
    overlapping = [*trace["traceEvents"], {**one, "ts": one["ts"] + 1}]
    assert any("overlaps" in fault for fault in faults_of(json.dumps({**trace, "traceEvents": overlapping}).encode()))


def test_many_requests_share_tracks_and_still_nest(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MAX_OWN_TRACKS", 10)
    data = b"".join(trace_lines(log))
    assert faults_of(data) == []
    tracks = {event["tid"] for event in json.loads(data)["traceEvents"] if event["ph"] == "X" and event["pid"] == 2}
    assert len(tracks) < len(log.requests)


# ---------------------------------------------------------------------------------------------------- two runs
def _compare(log: RunLog, other: RunLog) -> Comparison:
    return compare(log, other)


def test_a_run_beside_itself_differs_in_nothing(log: RunLog) -> None:
    comparison = _compare(log, log)
    assert comparison.parting is None
    assert comparison.settings == ()
    assert {d.verdict for d in comparison.differences} <= {"same", "neither"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    """The first 100 events, the rest of another run: it parts from the first one at a known step."""
    path = tmp_path_factory.mktemp("other") / "run.jsonl"
    make_run(num_requests=20, record=path)
    return read_run(path)


def test_two_runs_and_their_differences(log: RunLog, other: RunLog) -> None:
    comparison = _compare(log, other)
    by_name = {d.first.name: d for d in comparison.differences}
    for first, second in zip(summarize(log), summarize(other), strict=True):
        assert by_name[first.name].change == (None if None in (first.value, second.value) else second.value - first.value)  # type: ignore[operator]
    preemptions = by_name["num_preemptions"]
    assert preemptions.first.value is not None
    assert preemptions.second.value is not None
    assert preemptions.second.value < preemptions.first.value
    assert preemptions.verdict == "better"
    ttft = by_name["ttft_p95"]
    assert ttft.first.value == pytest.approx((log.latency("ttft").quantiles(0.95)[0] or 0) * 1e3)
    assert comparison.parting is not None
    value = comparison_to_json(comparison)
    assert value["figures"]["num_preemptions"]["verdict"] == "better"
    assert json.loads(json.dumps(value)) == value


def test_where_frames_part_is_the_first_step_that_differs(recording: Recording, log: RunLog) -> None:
    builder = RunBuilder(recording.header)
    for event in recording.events:
        builder.add(event)
    changed = builder.finish()
    changed.steps["num_used_blocks"][77] += 1
    parting = _compare(log, changed).parting
    assert parting is not None
    assert (parting.step_id, parting.column) == (log.steps["step_id"][77], "num_used_blocks")
    for column in changed.steps.columns.values():
        del column[50:]
    parting = _compare(log, changed).parting
    assert parting is not None
    assert (parting.column, parting.first, parting.second) == ("end", log.steps["step_id"][50], None)


@pytest.mark.parametrize("axis", ["step", "time"])
def test_the_graph_of_a_run_has_its_peak_and_ends_with_it(log: RunLog, axis: str) -> None:
    extent = 2 * (len(log.steps) if axis == "step" else log.duration)
    cells = along(log, "num_used_blocks", axis=axis, extent=extent, num_cells=80)  # type: ignore[arg-type]
    assert max(value for value in cells if value is not None) == max(log.steps["num_used_blocks"])
    assert all(value is not None for value in cells[:40])
    assert all(value is None for value in cells[41:])


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("axis", ["step", "time"])
def test_the_lines_of_a_comparison_fit_and_cut_no_number(log: RunLog, other: RunLog, width: int, axis: str) -> None:
    names = ("/a/very/long/path/" * 5 + "before.jsonl", "after\x1b[2J.jsonl")
    lines = compare_lines(_compare(log, other), names, width=width, axis=axis)  # type: ignore[arg-type]
    texts = [line_text(line) for line in lines]
    assert all(width_of(text) <= width for text in texts)
    assert not any("\x1b" in text for text in texts)
    figures = [*latency_figures(log), *summarize(log)]
    for text, figure in zip(texts[3:], figures, strict=False):
        assert figure.value is None or f"{figure.value:,.{figure.digits}f}" in text, figure.name
