"""The history behind the waterfall: it says of every request in every step what the engine's own books said, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.events.sources.base import Gap, StreamItem
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent, StepResultEvent
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import CELLS, CHUNK, COMPUTES, DECODE, MAX_RUNS, Waterfall
from aioengine_tui.model.waterfall import Run as CellRun
from aioengine_tui.model.waterfall_json import waterfall_to_json
from tests.tui.runs import Run, make_run
from tests.tui.support import busy_items, folded
from tests.tui.workloads import Arrival, Settings, WorkloadEngine, fold_all, made_up_prompt, run_workload


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


def cells_in(waterfall: Waterfall, step_id: int) -> dict[str, str]:
    """What each request that was there did in a step."""
    return {row.request_id: CELLS[run.cell] for row in waterfall.rows(step_id, step_id) if (run := row.at(step_id)) is not None}


# ---------------------------------------------------------------------------------------------------- it is the truth
def test_every_cell_is_what_the_engines_books_say_of_that_step(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    for event in run.events:
        state.apply(event)
    seen: set[str] = set()
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        if not isinstance(event, StepEvent):
            continue
        cells = cells_in(state.waterfall, event.step_id)
        seen.update(cells.values())
        tokens = {request_id: share.num_tokens for request_id, share in state.waterfall.company(event.step_id)}
        assert tokens == event.output.num_scheduled_tokens
        for request in snapshot.requests:
            cell = cells[request.request_id]
            if request.request_id in event.output.num_scheduled_tokens:
                assert cell in {CELLS[code] for code in COMPUTES}
            else:
                assert cell == {"WAITING": "waiting", "PREEMPTED": "preempted", "RUNNING": "idle"}[request.status], request
        # Everybody else is one whom this step tells the worker to forget, or will be told of later.
        others = cells.keys() - {request.request_id for request in snapshot.requests}
        assert all(cells[request_id] in ("ended", "aborted") for request_id in others)
        assert {
            request_id for request_id in others if event.output.finished_req_ids and request_id in event.output.finished_req_ids
        } == set(event.output.finished_req_ids)
    assert seen == set(CELLS) - {"none", "draft", "mixed"}, "the run should have everything"


def test_the_kinds_are_those_of_the_steps_shares(run: Run) -> None:
    state = DashboardState(max_steps=100_000)
    for event in run.events:
        state.apply(event)
    for record in state.steps:
        company = dict(state.waterfall.company(record.step_id))
        assert {share.request_id: share.kind for share in record.shares} == {name: CELLS[cell.cell] for name, cell in company.items()}
        mark = state.waterfall.mark(record.step_id)
        assert mark is not None
        assert mark.num_tokens == record.num_tokens
        assert mark.stop == record.admission_stop
        assert mark.stopped_req_id == record.stopped_req_id
        assert mark.num_preempted == len(record.preempted_ids)
        assert mark.result_time == record.result_time
    # The engine's own totals.
    marks, stats = state.waterfall.marks, run.events[-1].stats
    assert sum(mark.num_recomputed_tokens for mark in marks) == stats.num_recomputed_tokens
    assert sum(mark.num_prompt_tokens for mark in marks) == stats.num_prompt_tokens_computed
    assert sum(mark.num_preempted for mark in marks) == stats.num_preemptions


async def test_draft_cells_hold_what_the_step_gave() -> None:
    state = DashboardState()
    events: list[Event] = []
    executor = FakeExecutor(next_token=scripted("la la la li " * 8))
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), num_speculative_tokens=4) as engine:
        state.apply(engine.wire_header)
        engine.bus.add_observer(state.apply)
        engine.bus.add_observer(events.append)
        await engine.generate_batch(["sing"], SamplingParams(temperature=0, max_tokens=90), progress=False)
    given = {event.step_id: event.num_new_tokens for event in events if isinstance(event, StepResultEvent) and event.num_draft_tokens}
    assert max(sum(tokens.values()) for tokens in given.values()) > 1
    for step_id, num_new in given.items():
        (name,) = num_new
        row = state.waterfall.row(name)
        assert row is not None
        run = row.at(step_id)
        assert run is not None
        assert (CELLS[run.cell], run.num_tokens) == ("draft", num_new[name])


def test_who_gets_no_token_for_a_while_is_idle_meanwhile() -> None:
    """A more urgent request with a long prompt takes the whole budget of some steps."""
    engine = WorkloadEngine(Settings(max_num_seqs=8, max_num_batched_tokens=8, options={"policy": "priority"}))
    items: list[StreamItem] = [engine.header]
    engine.add_with_priority("calm", 2, num_prompt_tokens=4, max_tokens=40)
    items += engine.run(4)
    engine.add_with_priority("urgent", 1, num_prompt_tokens=60, max_tokens=4)
    items += engine.run(60)
    engine.executor.shutdown()
    waterfall = fold_all(items).waterfall
    resumes = 0
    for event in items:
        if isinstance(event, StepEvent):
            cells = cells_in(waterfall, event.step_id)
            computing = {name for name, cell in cells.items() if cell in {CELLS[code] for code in COMPUTES}}
            assert computing == event.output.num_scheduled_tokens.keys()
    for row in waterfall.rows(1, waterfall.marks[-1].step_id):
        cells_of_row = [CELLS[run.cell] for run in row.runs]
        resumes += sum(a == "idle" and b == "decode" for a, b in itertools.pairwise(cells_of_row))
    assert resumes, "somebody should have gone on after a pause"


def test_who_ends_before_its_first_token_leaves_in_that_step() -> None:
    engine = WorkloadEngine(Settings(max_num_seqs=1))
    items: list[StreamItem] = [engine.header]
    for name in ("runs", "waits"):
        engine.add(name, num_prompt_tokens=4, max_tokens=30, prompt=list(made_up_prompt(len(name), 4)))
    items += engine.run(5)
    engine.abort("waits")
    items += engine.run(5)
    engine.executor.shutdown()
    waterfall = fold_all(items).waterfall
    row = waterfall.row("waits")
    assert row is not None
    assert [CELLS[run.cell] for run in row.runs] == ["waiting", "aborted"]
    assert row.end_step == 6
    assert "waits" not in cells_in(waterfall, 7)


def test_a_name_that_is_used_again_has_a_row_of_its_own() -> None:
    arrivals = [Arrival("same", 0.0, made_up_prompt(1, 9), 5)]
    engine = WorkloadEngine(Settings())
    items: list[StreamItem] = [engine.header]
    for arrival in arrivals * 2:
        engine.add("same", num_prompt_tokens=9, max_tokens=arrival.max_tokens, prompt=list(arrival.prompt))
        items += engine.run(20)
    engine.executor.shutdown()
    waterfall = fold_all(items).waterfall
    rows = waterfall.rows(1, waterfall.marks[-1].step_id)
    assert [row.request_id for row in rows] == ["same", "same"]
    first, second = rows
    assert first.end_step is not None
    assert second.first_step is not None
    assert first.end_step < second.first_step
    assert waterfall.row("same") is second


# ---------------------------------------------------------------------------------------------------- lossy streams, copies, seeks
def test_a_late_viewer_begins_with_the_snapshot_and_agrees_from_there(run: Run) -> None:
    for start in range(0, len(run.events) - 1, 7):
        late = DashboardState()
        late.apply(run.header)
        late.apply(run.snapshots[start])
        for event in run.events[start + 1 : start + 12]:
            late.apply(event)
        for event in run.events[start + 1 : start + 12]:
            if isinstance(event, StepEvent):
                tokens = {name: share.num_tokens for name, share in late.waterfall.company(event.step_id)}
                assert tokens == event.output.num_scheduled_tokens


def test_after_a_gap_the_snapshot_sets_it_right(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    middle = len(run.events) // 2
    for event in run.events[: middle - 40]:
        state.apply(event)
    state.apply(Gap(40))
    state.apply(run.snapshots[middle])
    live = {request.request_id for request in run.snapshots[middle].requests}
    rest = iter(run.events[middle + 1 :])
    for event in rest:
        state.apply(event)
        if isinstance(event, StepEvent):
            cells = cells_in(state.waterfall, event.step_id)
            assert live <= cells.keys()
            gone = {name for name, cell in cells.items() if cell not in ("ended", "aborted")} - live
            assert gone <= {info.request_id for info in event.added}
            break
    for event in rest:
        state.apply(event)
    marks = state.waterfall.marks
    assert [mark.step_id for mark in marks if mark.after_gap] == [
        later.step_id for earlier, later in itertools.pairwise(marks) if later.step_id != earlier.step_id + 1
    ]
    assert not state.requests
    assert all(row.end_step is not None for row in state.waterfall.rows(1, marks[-1].step_id))


def test_a_copy_stands_still_while_the_original_goes_on(run: Run) -> None:
    state = DashboardState()
    copies = []
    for index, event in enumerate(run.events):
        state.apply(event)
        if index % 20 == 0:
            copies.append((state.copy(), waterfall_to_json(state.waterfall)))
    for copy, value in copies:
        assert waterfall_to_json(copy.waterfall) == value


# ---------------------------------------------------------------------------------------------------- bounded
def long_stream(num_steps: int) -> Iterator[StreamItem]:
    """Requests that come and go for ever, in an engine that often preempts."""
    engine = WorkloadEngine(Settings(num_kv_cache_blocks=24, max_num_seqs=6, max_num_batched_tokens=64))
    yield engine.header
    done = 0
    for number in itertools.count():
        if done >= num_steps:
            break
        if number % 3 == 0:
            engine.add(f"r{number}", num_prompt_tokens=10, max_tokens=24, prompt=list(made_up_prompt(number, 10)))
        events = engine.run(1)
        done += len(events) // 2
        yield from events
    engine.executor.shutdown()


def test_memory_is_bounded_whatever_the_length_of_the_run() -> None:
    waterfall = Waterfall(max_steps=200, max_ended_rows=50)
    state = DashboardState()
    state.data.waterfall = waterfall
    sizes = []
    for item in long_stream(1600):
        state.apply(item)
        if isinstance(item, StepResultEvent) and item.step_id % 400 == 0:
            rows = waterfall.rows(0, item.step_id + 1)
            sizes.append((len(waterfall.marks), len(rows), sum(len(row.runs) for row in rows)))
            kept = waterfall.marks[0].step_id
            assert all(row.end_step is None or row.end_step >= kept for row in rows)
    assert [marks for marks, _, _ in sizes] == [200] * 4
    live = len(state.requests)
    assert all(rows <= 50 + live for _, rows, _ in sizes)


def test_the_runs_of_one_row_are_bounded() -> None:
    waterfall = fold_all(run_workload([Arrival("one", 0.0, made_up_prompt(1, 8), 4)], Settings())).waterfall
    row = waterfall.row("one")
    assert row is not None
    before = len(row.runs)
    for step in range(100, 100 + 4 * MAX_RUNS):
        row.add(CellRun(step, CHUNK if step % 2 else DECODE, 1))
    assert before < len(row.runs) <= MAX_RUNS
    assert row.num_runs_dropped >= 3 * MAX_RUNS


def test_steady_decoding_is_one_run_however_long() -> None:
    items = run_workload([Arrival("long", 0.0, made_up_prompt(1, 8), 500)], Settings(num_kv_cache_blocks=200))
    row = fold_all(items).waterfall.row("long")
    assert row is not None
    assert [CELLS[run.cell] for run in row.runs] == ["prefill", "decode", "ended"]


def test_snapshots_between_steps_change_nothing() -> None:
    """An engine writes one into its recording every 2000 steps; where nothing was missed it tells nothing new."""
    items = busy_items()
    plain = waterfall_to_json(folded(items).waterfall)
    run = make_run()
    state, other = DashboardState(), DashboardState()
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        state.apply(event)
        other.apply(event)
        if isinstance(event, StepResultEvent) and event.step_id % 5 == 0:
            assert isinstance(snapshot, EngineSnapshot)
            other.apply(snapshot)
    assert waterfall_to_json(state.waterfall) == waterfall_to_json(other.waterfall)
    assert plain["rows"]
