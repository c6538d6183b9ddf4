"""The dashboard's state, without anything that draws."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.core.scheduler_output import SchedulerStats
from aioengine.events.recording.reader import read_recording
from aioengine.events.sources.base import Gap, SourceStatus
from aioengine.events.step_event import EngineSnapshot, Event, RequestSnapshot, StepEvent, StepResultEvent
from aioengine.events.wire import decode, encode
from aioengine_tui.model.rows import Shares
from aioengine_tui.model.state import SERIES, DashboardState
from aioengine_tui.model.state_json import state_to_json
from aioengine_tui.plain import render_plain
from tests.events.strategies import events as any_events
from tests.tui.runs import Run, make_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run() -> Run:
    """A run with everything that the tests are about."""
    run = make_run()
    assert is_varied(run), "the run should have preemptions, aborts, stops, evictions, chunks and clean-ups all together"
    return run


def is_varied(run: Run) -> bool:
    state = DashboardState(max_steps=100_000)
    for event in run.events:
        state.apply(event)
    return (
        {share.kind for record in state.steps for share in record.shares} == {"prefill", "chunk", "decode", "resumed"}
        and {row.finish_reason for row in state.finished.values()} == {"length", "stop", "abort"}
        and bool(state.since_attach.num_evicted_blocks)
        and any(snapshot.lingering for snapshot in run.snapshots)
    )


def fold(run: Run) -> DashboardState:
    state = DashboardState()
    state.apply(run.header)
    for event in run.events:
        state.apply(event)
    return state


# ---------------------------------------------------------------------------------------------------- it is the truth
def test_the_state_agrees_with_the_engines_own_counts_after_every_event(run: Run) -> None:
    check_agreement(run)


@pytest.mark.parametrize("layer_windows", [(None, 20, 20, 6), (11,), (5, 40)], ids=str)
def test_the_state_agrees_with_the_engine_in_every_kv_cache_group(layer_windows: tuple[int | None, ...]) -> None:
    run = make_run(layer_windows=layer_windows)
    assert any(0 in table for snapshot in run.snapshots for request in snapshot.requests for table in tables_of(request))
    check_agreement(run)


def tables_of(request: RequestSnapshot) -> list[list[int]]:
    return [request.block_ids, *request.other_block_ids]


def check_agreement(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        state.apply(event)
        stats = event.stats
        assert not state.out_of_sync
        assert state.blocks.num_used == stats.num_used_blocks
        assert state.blocks.num_cached == stats.num_cached_blocks
        rows = list(state.requests.values())
        assert sum(row.state == "running" for row in rows) == stats.num_running_reqs
        assert sum(row.state == "preempted" for row in rows) == stats.num_preempted_reqs
        assert sum(row.state == "waiting" for row in rows) == stats.num_waiting_reqs - stats.num_preempted_reqs
        gauges = state.gauges()
        assert gauges.num_waiting == sum(row.state == "waiting" for row in rows)
        assert gauges.num_preempted == sum(row.state == "preempted" for row in rows)
        assert gauges.num_running == sum(row.state == "running" for row in rows)
        assert {row.request_id: row.told_in_step or 0 for row in rows if row.state == "cleaning_up"} == snapshot.lingering
        for request in snapshot.requests:
            row = state.requests[request.request_id]
            assert row.tables == tables_of(request) or not any([*row.tables, *tables_of(request)])
            assert row.num_blocks == sum(block_id > 0 for table in row.tables for block_id in table)
            assert row.num_computed_tokens == request.num_computed_tokens
            assert row.num_output_tokens == request.num_output_tokens
            assert row.num_preemptions == request.num_preemptions
            assert row.text == (request.text or None)
            assert row.recompute_until == request.recompute_until
            assert (row.scheduled_time, row.first_token_time) == (request.scheduled_time, request.first_token_time)
        owners: dict[int, set[str]] = {}
        for request in snapshot.requests:
            for group_id, table in enumerate(tables_of(request)):
                for block_id in filter(None, table):
                    owners.setdefault(block_id, set()).add(request.request_id)
                    assert state.blocks.group_of(block_id) == group_id
        for block_id in range(1, state.blocks.num_blocks + 1):
            info = state.block(block_id)
            assert set(info.owners) == owners.get(block_id, set())
            assert info.ref_cnt == len(info.owners)
            assert info.is_cached == (block_id in snapshot.cached_block_ids)
            free = "free_cached" if info.is_cached else "empty"
            assert info.state == (free, "used", "shared")[min(info.ref_cnt, 2)]
            if info.is_cached:
                index = snapshot.cached_block_ids.index(block_id)
                assert info.block_hash == snapshot.cached_block_hashes[index]
                assert info.parent_hash == snapshot.cached_parent_hashes[index]
                assert info.group_id == (snapshot.cached_block_groups[index] if snapshot.cached_block_groups else 0)
        assert state.blocks.eviction_order() == snapshot.free_block_ids
        assert state.blocks.num_free == stats.num_free_blocks == gauges.num_free_cached_blocks + gauges.num_empty_blocks
        assert state.blocks.num_shared == sum(len(names) > 1 for names in owners.values())


def test_the_engines_totals_are_what_a_viewer_counts_that_saw_everything(run: Run) -> None:
    """Two ways of counting: the scheduler's counters, and the events one by one."""
    state = DashboardState()
    for event in run.events:
        state.apply(event)
        totals = dataclasses.asdict(state.totals)
        assert totals.pop("origin") == "engine"
        assert totals == dataclasses.asdict(state.since_attach)
    assert state.totals.num_recomputed_tokens > 0
    assert state.totals.num_cached_tokens > 0
    assert state.totals.num_evicted_blocks > 0


def test_totals_are_the_engines_for_a_fresh_viewer_and_after_a_gap(run: Run) -> None:
    fresh, lossy, whole = DashboardState(), DashboardState(), DashboardState()
    middle = len(run.events) // 2
    for index, event in enumerate(run.events):
        whole.apply(event)
        if index < middle - 30:
            lossy.apply(event)
        elif index == middle:
            lossy.apply(Gap(31))
            for late in (fresh, lossy):
                late.apply(decode(encode(run.snapshots[index])))
        elif index > middle:
            fresh.apply(event)
            lossy.apply(event)
        if index >= middle:
            assert fresh.totals == lossy.totals == whole.totals
    assert fresh.since_attach.num_finished < whole.totals.num_finished
    assert lossy.since_attach.num_output_tokens < whole.totals.num_output_tokens


def test_a_late_viewer_has_the_last_step_and_the_times_at_once(run: Run) -> None:
    """Also of an engine that is paused, from which nothing more comes."""
    whole = DashboardState()
    reasons = set()
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        whole.apply(event)
        late = DashboardState()
        late.apply(run.header)
        late.apply(decode(encode(dataclasses.replace(snapshot, paused=True))))
        assert late.current is not None
        assert whole.current is not None
        live = {request.request_id for request in snapshot.requests}
        assert late.admission_stop == whole.admission_stop == late.current.admission_stop
        # Of a request that has ended since, the late viewer has no table; how much it was given is in the frame.
        for ours, theirs in zip(late.current.shares, whole.current.shares, strict=True):
            if ours.request_id in live and whole.requests[ours.request_id].state == "running":
                assert ours == theirs
            assert ours[:1] + ours[2:4] + ours[5:] == theirs[:1] + theirs[2:4] + theirs[5:]
        assert dataclasses.replace(late.current, shares=Shares(None)) == dataclasses.replace(whole.current, shares=Shares(None))
        for row in whole.requests.values():
            if row.is_live:
                assert late.requests[row.request_id].ttft == row.ttft
                assert late.requests[row.request_id].queue_wait == row.queue_wait
                assert late.share_of(late.requests[row.request_id]) == whole.share_of(row)
        running = [row for row in late.requests.values() if row.ttft is not None]
        assert (late.gauges().ttft_p50 is not None) == bool(running)
        reasons.add(late.current.admission_stop)
    assert len(reasons) >= 3


def test_a_share_is_what_the_frame_says_and_its_table_is_the_engines(run: Run) -> None:
    state = DashboardState()
    before: dict[str, tuple[int, ...]] = {}
    num_replaced = 0
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        state.apply(event)
        if not isinstance(event, StepEvent):
            continue
        record, output = state.current, event.output
        assert record is not None
        tables = {request.request_id: tuple(request.block_ids) for request in snapshot.requests}
        cached = output.scheduled_cached_reqs
        new = {new.req_id: new for new in output.scheduled_new_reqs}
        for share in record.shares:
            assert share.block_ids == tables[share.request_id]
            if share.request_id in new:
                assert (share.start, share.num_output_tokens) == (new[share.request_id].num_computed_tokens, 0)
                assert share.new_block_ids == tuple(new[share.request_id].block_ids[0])
            else:
                index = cached.req_ids.index(share.request_id)
                told = cached.new_block_ids[index]
                assert share.new_block_ids == (tuple(told[0]) if told is not None else ())
                assert (share.start, share.num_output_tokens) == (cached.num_computed_tokens[index], cached.num_output_tokens[index])
            assert share.replaces_table == (share.request_id in new or share.request_id in cached.resumed_req_ids)
            if not share.replaces_table:
                assert share.blocks_before == before[share.request_id]
            num_replaced += share.replaces_table
        before |= {share.request_id: share.block_ids for share in record.shares}
        assert record.allocated_ids == tuple(event.block_changes.allocated)
        assert record.freed_ids == tuple(event.block_changes.freed)
        assert record.evicted_ids == tuple(event.block_changes.evicted)
        assert record.stopped_req_id == event.stopped_req_id
    assert num_replaced > len(state.finished)  # some were resumed


def test_why_a_request_waits_is_what_stopped_the_admission(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    reasons = set()
    for event in run.events:
        state.apply(event)
        if not isinstance(event, StepEvent):
            continue
        queue = state.queue()
        if event.admission_stop == "queue_empty":
            assert event.stopped_req_id is None
            continue
        assert queue[0].request_id == event.stopped_req_id, "admission stops at the next one"
        for position, row in enumerate(queue, 1):
            wait = state.wait_of(row)
            assert wait is not None
            assert (wait.position, wait.num_waiting, wait.reason) == (position, len(queue), event.admission_stop)
            assert wait.is_stopped == (position == 1)
            if wait.reason == "no_blocks":
                assert wait.num_blocks_needed is not None
                assert wait.num_blocks_needed > wait.num_free_blocks == event.stats.num_free_blocks
            else:
                assert wait.num_blocks_needed is None
        reasons.add(event.admission_stop)
    assert {"no_blocks", "max_num_seqs", "budget"} <= reasons


def test_hits_of_a_prefix_are_counted_at_its_nodes(run: Run) -> None:
    """Each block that served a prompt is one more hit of its node, for as long as it is cached."""
    state = DashboardState()
    state.apply(run.header)
    found = 0
    for event in run.events:
        num_hits = {node.block_hash: node.num_hits for node in state.blocks.prefix_nodes()}
        state.apply(event)
        nodes = state.blocks.prefix_nodes()
        by_hash = {node.block_hash: node for node in nodes}
        assert len(by_hash) == len(nodes) == state.blocks.num_cached
        if isinstance(event, StepEvent):
            for new in event.output.scheduled_new_reqs:
                parent = ""
                for block_id in new.block_ids[0][: new.num_computed_tokens // 4]:
                    node = next(node for node in nodes if node.block_id == block_id)
                    assert node.parent_hash == parent
                    assert node.num_hits > num_hits.get(node.block_hash, 0)
                    parent = node.block_hash
                    found += 1
    assert found * 4 == state.totals.num_cached_tokens > 0


def test_rates_are_over_the_time_since_the_viewer_attached(run: Run) -> None:
    """Also in the first seconds: a step each 20 ms is 50 a second from the start."""
    stats = SchedulerStats(0, 1, 0, 9, 5, 0, 0, 0, 0)
    state = DashboardState()
    state.apply(EngineSnapshot(7, 100.0, stats, [], []))
    step = next(event for event in run.events if isinstance(event, StepEvent))
    output = dataclasses.replace(step.output, scheduled_new_reqs=[], num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    for number in range(1, 500):
        time = 100.0 + number * 0.02
        state.apply(dataclasses.replace(step, step_id=7 + number, time=time, output=output, stats=stats, added=[]))
        state.tick(time + 0.01)
        assert state.gauges().steps_per_s == pytest.approx(50, rel=0.6 / number + 0.01)


def test_a_gap_is_spoken_of_for_a_minute(run: Run) -> None:
    state = fold(run)
    assert state.gap_words() is None
    state.apply(Gap(20))
    state.apply(run.snapshots[-1])
    state.tick(state.now + 12)
    assert state.gap_words() == "1 gap, 20 events lost, 12 s ago"
    state.tick(state.now + 50)
    assert state.gap_words() is None
    state.apply(Gap(1))
    state.tick(state.now + 100)
    words = state.gap_words()
    assert words == "2 gaps, 21 events lost, 100 s ago", "as long as nothing has mended it"


def test_the_engine_is_up_until_its_last_event(run: Run) -> None:
    state = fold(run)
    state.apply(SourceStatus("live"))
    up = state.gauges().uptime
    assert up is not None
    state.tick(state.now + 5)
    assert state.gauges().uptime == pytest.approx(up + 5)
    state.apply(SourceStatus("lost", "gone"))
    state.tick(state.now + 1000)
    assert state.gauges().uptime == pytest.approx(up)


def test_shares_are_the_steps_tokens_in_the_order_of_the_batch(run: Run) -> None:
    state = DashboardState()
    for event in run.events:
        state.apply(event)
        if isinstance(event, StepEvent):
            record = state.current
            assert record is not None
            assert {share.request_id: share.num_tokens for share in record.shares} == event.output.num_scheduled_tokens
            assert [share.request_id for share in record.shares] == list(event.output.num_scheduled_tokens)
            assert {*record.new_ids, *record.cached_ids, *record.resumed_ids} == event.output.num_scheduled_tokens.keys()
            assert record.in_flight
        elif isinstance(event, StepResultEvent):
            done = state.step(event.step_id)
            assert done is not None
            assert not done.in_flight
            assert done.num_new_tokens == sum(event.num_new_tokens.values())
            assert done.lanes.update == (event.update_start, event.update_end)
            assert done.lanes.execute == (event.execute_start, event.execute_end)


def test_a_request_ends_in_order_told_then_cleaned_up(run: Run) -> None:
    state = fold(run)
    for row in state.finished.values():
        kinds = [milestone.kind for milestone in row.timeline]
        assert kinds[0] == "queued"
        assert kinds[-3:] == ["finished", "told_worker", "cleaned_up"]
        times = [milestone.time for milestone in row.timeline]
        assert times == sorted(times)
        assert kinds.count("preempted") == kinds.count("resumed") + (row.block_ids != [] or row.num_preemptions > kinds.count("resumed"))
        assert row.ttft is None or row.ttft > 0
    words = [line.text for line in state.log.lines if line.kind == "preempted"]
    assert words
    assert all("because no block was free" in text for text in words)


def test_the_end_is_shown_before_the_worker_is_told(run: Run) -> None:
    """A request that ends leaves its blocks at once, then travels in finished_req_ids, then is gone."""
    state = DashboardState()
    seen: dict[str, list[tuple[str, bool]]] = {}
    for event in run.events:
        state.apply(event)
        for row in state.requests.values():
            if row.state == "cleaning_up":
                assert row.block_ids == []
                steps = seen.setdefault(row.request_id, [])
                if not steps or steps[-1] != (row.state, row.told_in_step is not None):
                    steps.append((row.state, row.told_in_step is not None))
    assert ("cleaning_up", False) in {stage for stages in seen.values() for stage in stages}
    assert all(stages[-1] == ("cleaning_up", True) for stages in seen.values())


# ---------------------------------------------------------------------------------------------------- replays
def test_a_recording_gives_an_equal_state_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    live_run = make_run(num_requests=12, record=path)
    recorded = read_recording(path)
    live, replayed = DashboardState(), DashboardState()
    live.apply(live_run.header)
    replayed.apply(recorded.header)
    for event, read in zip(live_run.events, recorded.events, strict=False):
        live.apply(event)
        replayed.apply(read)
        assert orjson.dumps(state_to_json(live, complete=True)) == orjson.dumps(state_to_json(replayed, complete=True))


def test_text_stays_at_home_unless_asked_for(run: Run) -> None:
    state = DashboardState()
    for event in run.events:
        state.apply(decode(encode(event)))
    assert all(row.text is None and row.prompt is None for row in state.finished.values())
    assert all(row.text for row in fold(run).finished.values() if row.finish_reason == "length")


def present(state: DashboardState) -> dict[str, Any]:
    """What is true of the engine now, as opposed to what the viewer remembers of the past."""
    gauges = dataclasses.asdict(state.gauges())
    return {
        "gauges": {name: gauges[name] for name in gauges if name.startswith(("num_", "kv_", "prefix_", "paused"))},
        "rows": {
            row.request_id: (
                row.state,
                row.num_prompt_tokens,
                max(0, row.num_cached_tokens),
                row.num_computed_tokens,
                row.num_output_tokens,
                row.num_preemptions,
                row.recompute_until,
                row.block_ids,
                row.told_in_step if row.state == "cleaning_up" else None,
                row.text,
                row.prompt,
                row.arrival_time,
                row.sampling_params if row.is_live and row.state != "waiting" else None,
            )
            for row in state.requests.values()
            if row.is_live
        },
        "leaving": {row.request_id: row.told_in_step for row in state.requests.values() if not row.is_live},
        "blocks": [(set(info.owners), info.is_cached) for info in map(state.block, range(1, state.blocks.num_blocks + 1))],
        "shares": state.current.shares if state.current is not None else None,
        "step": state.last_step_id,
    }


@pytest.mark.parametrize("every", [17])
def test_a_snapshot_and_the_later_events_equal_the_whole_history(run: Run, every: int) -> None:
    for start in range(0, len(run.events), every):
        full, late = DashboardState(), DashboardState()
        for event in run.events[: start + 1]:
            full.apply(event)
        late.apply(decode(encode(run.snapshots[start], include_prompts=True)))
        assert late.totals == full.totals
        assert not late.out_of_sync
        for event in run.events[start + 1 :]:
            full.apply(event)
            late.apply(event)
            expected, found = present(full), present(late)
            if late.current is None or late.current.step_id <= run.snapshots[start].step_id:
                expected["shares"] = found["shares"]  # those who have ended since leave no table
            assert found == expected, f"a snapshot after event {start}"


@pytest.mark.parametrize(("num_computed", "recompute_until"), [(4, 15), (13, 15), (14, 0), (15, 0)])
def test_a_late_viewer_tells_decoding_from_computing_again(num_computed: int, recompute_until: int) -> None:
    """12 prompt and 3 output tokens; one missing is decoding without a step in flight, as on a paused engine."""
    request = RequestSnapshot("a", "RUNNING", 12, 3, num_computed, 0, 50, 1.0, 1, 0, [1, 2, 3, 4])
    state = DashboardState()
    state.apply(EngineSnapshot(7, 2.0, SchedulerStats(0, 1, 0, 9, 5, 0, 1, 0, 0), [request], []))
    assert state.requests["a"].recompute_until == recompute_until


def test_a_snapshot_in_the_middle_changes_nothing_for_who_has_seen_it_all(run: Run) -> None:
    plain, with_snapshots = DashboardState(), DashboardState()
    for event, snapshot in zip(run.events, run.snapshots, strict=True):
        plain.apply(event)
        with_snapshots.apply(event)
        with_snapshots.apply(snapshot)
        assert present(with_snapshots) == present(plain)
    assert with_snapshots.totals == plain.totals
    assert with_snapshots.since_attach == plain.since_attach
    assert list(with_snapshots.finished) == list(plain.finished)


# ---------------------------------------------------------------------------------------------------- idle, lossy, long
def test_everything_is_zero_when_the_engine_is_idle(run: Run) -> None:
    state = fold(run)
    state.apply(SourceStatus("live"))
    assert state.requests == {}
    assert state.blocks.num_used == state.blocks.num_shared == 0
    gauges = state.gauges()
    assert (gauges.num_running, gauges.num_waiting, gauges.num_preempted, gauges.num_cleaning_up) == (0, 0, 0, 0)
    assert (gauges.kv_cache_usage, gauges.num_used_blocks, gauges.num_in_flight) == (0, 0, 0)
    assert gauges.steps_per_s > 0
    state.tick(state.now + 100)
    later = state.gauges()
    assert (later.steps_per_s, later.prefill_tokens_per_s, later.decode_tokens_per_s) == (0, 0, 0)
    assert later.ttft_p50 is later.itl_p95 is later.overlap_efficiency is None
    for series in SERIES:
        assert not any(state.history(series, 60)), series
    assert not later.stale


def test_lost_events_are_counted_and_a_snapshot_mends_them(run: Run) -> None:
    whole, lossy = DashboardState(), DashboardState()
    middle = len(run.events) // 2
    for index, event in enumerate(run.events):
        whole.apply(event)
        if index == middle:
            lossy.apply(Gap(20))
            assert lossy.is_stale
            lossy.apply(run.snapshots[index])
        elif not middle - 20 <= index < middle:
            lossy.apply(event)
    assert lossy.num_dropped == 20
    assert lossy.num_gaps == 1
    assert present(lossy)["rows"] == present(whole)["rows"]
    assert present(lossy)["blocks"] == present(whole)["blocks"]
    assert not lossy.out_of_sync


def test_a_lossy_recording_without_a_snapshot_is_marked_until_the_engine_is_idle(run: Run) -> None:
    state = DashboardState()
    for event in run.events[:20] + run.events[41:60]:
        state.apply(event)
    assert state.out_of_sync
    assert state.num_dropped > 0
    for event in run.events[60:]:
        state.apply(event)
    assert not state.out_of_sync
    assert state.requests == {}
    assert state.blocks.num_used == 0


@given(st.lists(any_events, max_size=6))
def test_nothing_that_arrives_makes_it_fail(items: list[Event]) -> None:
    state = DashboardState()
    for item in items:
        # Sizes beyond memory come only from a hostile stream; a viewer trusts its engine that far.
        if item.stats.num_total_blocks > 10_000:
            item = dataclasses.replace(item, stats=dataclasses.replace(item.stats, num_total_blocks=10_000))
        state.apply(item)
    state_to_json(state)
    render_plain(state)


def test_memory_is_bounded_over_a_long_run(run: Run) -> None:
    state = DashboardState(max_steps=50, max_finished=20, max_log_lines=100)
    num_rounds = 40
    last = max(event.step_id for event in run.events)
    length = run.events[-1].time - run.events[0].time + 1.0
    for number in range(num_rounds):
        for event in run.events:
            state.apply(shifted(event, steps=number * last, seconds=number * length))
    assert state.since_attach.num_finished == 30 * num_rounds
    assert len(state.finished) == 20
    assert len(state.steps) == 50
    assert len(state.log.lines) == 100
    assert state.requests == {}
    assert len(state.data.rates._entries) <= 8192
    assert len(state.blocks._recent) <= 8192
    assert not state.out_of_sync


def shifted(event: Event, *, steps: int, seconds: float) -> Event:
    if isinstance(event, StepEvent):
        output = dataclasses.replace(event.output, step_id=event.step_id + steps)
        return dataclasses.replace(event, step_id=event.step_id + steps, time=event.time + seconds, output=output)
    return dataclasses.replace(event, step_id=event.step_id + steps, time=event.time + seconds)


def test_another_engine_at_the_same_address_starts_over(run: Run) -> None:
    state = fold(run)
    state.apply(dataclasses.replace(run.header, perf_counter=run.header.perf_counter + 1000))
    assert state.last_step_id == 0
    assert state.finished == {}
    assert "another engine" in state.log.lines[-1].text


def test_pausing_the_engine_shows(run: Run) -> None:
    state = fold(run)
    idle = run.snapshots[-1]
    state.apply(dataclasses.replace(idle, paused=True))
    assert state.paused
    assert state.log.lines[-1].kind == "engine"
    state.apply(idle)
    assert not state.paused


# ---------------------------------------------------------------------------------------------------- copies and forms
def test_a_copy_does_not_change_with_the_original(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    middle = len(run.events) // 2
    for event in run.events[:middle]:
        state.apply(event)
    before = orjson.dumps(state_to_json(state, complete=True))
    aside = state.copy()
    for event in run.events[middle:]:
        state.apply(event)
    assert orjson.dumps(state_to_json(aside, complete=True)) == before
    for event in run.events[middle:]:
        aside.apply(event)
    assert orjson.dumps(state_to_json(aside, complete=True)) == orjson.dumps(state_to_json(state, complete=True))


def test_the_json_form_has_numbers_and_requests(run: Run) -> None:
    state = DashboardState()
    state.apply(run.header)
    for event in run.events[:40]:
        state.apply(event)
    value = orjson.loads(orjson.dumps(state_to_json(state)))
    assert value["version"] == 2
    assert value["model"] == "fake"
    assert value["gauges"]["num_running"] == len([row for row in value["requests"] if row["state"] == "running"])
    assert value["step"]["step_id"] == state.last_step_id


@pytest.mark.parametrize("width", [40, 80, 200])
def test_plain_text_fits_and_has_no_control_sequences(run: Run, width: int) -> None:
    state = DashboardState()
    state.apply(run.header)
    for event in run.events[:60]:
        state.apply(event)
        text = render_plain(state, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert text.isprintable() or set(filter(lambda char: not char.isprintable(), text)) == {"\n"}
    assert "running" in text or width < 80


def test_recent_block_changes_are_shown_for_a_while(run: Run) -> None:
    state = DashboardState()
    for event in run.events:
        state.apply(event)
        if isinstance(event, StepEvent) and event.block_changes.allocated:
            codes = state.block_codes(recent_steps=1)
            kept = [block_id for block_id in event.block_changes.allocated if state.blocks.owners(block_id)]
            assert {codes[block_id - 1] for block_id in kept} <= {4}
            assert 4 not in state.block_codes(recent_steps=0)


def test_the_state_needs_no_screen_and_no_event_loop() -> None:
    code = (
        "import sys, aioengine_tui.model.state, aioengine_tui.plain, aioengine_tui.model.state_json; "
        "print(*{'asyncio', 'torch', 'textual', 'rich', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"}
    )
    assert result.stdout.strip() == ""


def test_snapshots_without_new_fields_still_decode() -> None:
    """What an older engine of the same schema wrote."""
    stats = dataclasses.asdict(SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0))
    line = orjson.dumps({"type": "snapshot", "step_id": 3, "time": 1.0, "stats": stats, "requests": [], "cached_block_ids": []})
    snapshot = decode(line)
    assert isinstance(snapshot, EngineSnapshot)
    assert not snapshot.paused
