"""Folds the items of a stream into `StateData`, in the order in which the parts of an item depend on each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import repeat

from aioengine.core.scheduler_output import BlockChanges, SchedulerOutput, SchedulerStats
from aioengine.events.sources.base import Gap, SourceStatus
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine_tui.model.log import name_some, plural
from aioengine_tui.model.metrics import OverlapMeter
from aioengine_tui.model.rows import Lanes, Shares, StepRecord
from aioengine_tui.model.snapshots import fold_snapshot_requests, shares_of_told_step
from aioengine_tui.model.state_data import GapNote, StateData
from aioengine_tui.model.transitions import fold_result_requests, fold_step_requests, lists_agree, note_unseen_end


def fold(data: StateData, item: WireHeader | Event | Gap | SourceStatus) -> None:
    """Never raises because of what a lossy stream left out."""
    match item:
        case StepEvent():
            _note_time(data, item)
            _fold_step(data, item)
        case StepResultEvent():
            _note_time(data, item)
            _fold_result(data, item)
        case EngineSnapshot():
            _note_time(data, item)
            _fold_snapshot(data, item)
        case WireHeader():
            data.set_header(item)
            data.now = max(data.now, item.perf_counter)
        case Gap():
            _note_gap(data, item.num_dropped, item.reason)
        case SourceStatus():
            _fold_status(data, item)


def _note_time(data: StateData, event: Event) -> None:
    data.num_events += 1
    time = event.time
    if data.attach_time is None:
        started = data.header.perf_counter if data.header is not None else time
        _note_attached(data, min(time, started) if isinstance(event, StepEvent) and event.step_id == 1 else time)
    data.last_event_time = time
    data.now = max(data.now, time)


def _note_attached(data: StateData, time: float) -> None:
    """From here on this viewer sees everything, so its rates are over the time since."""
    data.attach_time = time
    data.rates.start(time)
    data.overlap.start(time)


def _note_gap(data: StateData, num_dropped: int, reason: str) -> None:
    """Events are missing: what is shown may be wrong until a snapshot comes."""
    data.num_gaps += 1
    data.num_dropped += num_dropped
    data.last_gap = GapNote(data.now, num_dropped, reason)
    data.out_of_sync = True
    data.blocks.lose_free_queue()
    data.overlap_meter = OverlapMeter()
    count = f"{num_dropped} events" if num_dropped else "an unknown number of events"
    data.log.add(data.now, data.last_step_id or None, "stream", None, f"{count} missing: {reason}")


def _fold_status(data: StateData, status: SourceStatus) -> None:
    if status.state != data.status.state and status.state in ("lost", "ended"):
        data.log.add(data.now, None, "stream", None, f"{status.state}: {status.detail}" if status.detail else status.state)
    data.status = status


# ---------------------------------------------------------------------------------------------------- a step was scheduled


def _fold_step(data: StateData, event: StepEvent) -> None:
    step_id, output = event.step_id, event.output
    if step_id <= data.last_step_id:
        return  # a snapshot already told more
    _check_sequence(data, step_id)
    if step_id == 1 and not data.blocks.num_blocks:
        data.blocks.start_free_queue(event.stats.num_total_blocks)
    data.last_step_id = step_id
    data.num_in_flight = event.queue_depth
    data.admission_stop = event.admission_stop
    data.since_attach.num_steps += 1
    if not lists_agree(output.scheduled_cached_reqs):
        _note_gap(data, 0, f"step {step_id} came damaged")
    shares = fold_step_requests(data, event)
    _note_block_changes(data, event.block_changes, time=event.time, step_id=step_id)
    _note_hits(data, event)
    _note_gauges(data, event.stats, time=event.time)
    num_prompt, num_recomputed = _measure(data, event, shares)
    data.steps.append(_make_record(event, shares))
    data.waterfall.note_step(event, shares, data.requests, num_prompt_tokens=num_prompt, num_recomputed_tokens=num_recomputed)


def _note_hits(data: StateData, event: StepEvent) -> None:
    """Count what the prefix cache served, once this step's own blocks are known: it may serve those at once."""
    block_size, cached = data.block_size, event.output.scheduled_cached_reqs
    if not block_size:
        return
    for new in event.output.scheduled_new_reqs:
        _note_group_hits(data, new.block_ids, new.num_computed_tokens // block_size)
    if cached.resumed_req_ids and lists_agree(cached):
        for req_id, start, block_ids in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids and block_ids:
                _note_group_hits(data, block_ids, start // block_size)


def _note_group_hits(data: StateData, tables: Sequence[list[int]], num_hits: int) -> None:
    """Hits are counted by content, which is the same in all groups: the first one tells them."""
    if tables:
        data.blocks.note_hits(tables[0][:num_hits])


def _check_sequence(data: StateData, step_id: int) -> None:
    if data.out_of_sync:
        return
    num_missing = step_id - data.last_step_id - 1
    if num_missing > 0:
        if data.last_step_id:
            _note_gap(data, num_missing, f"steps {data.last_step_id + 1} to {step_id - 1} were not seen")
        elif data.stats is None:
            _note_gap(data, 0, f"the stream begins at step {step_id}, without a snapshot")


def _measure(data: StateData, event: StepEvent, shares: Shares) -> tuple[int, int]:
    """Returns the prompt tokens of the step, and those that a preemption made necessary again."""
    num_prompt = num_recomputed = 0
    for share in shares.others:
        if share.kind == "resumed":
            row = data.requests.get(share.request_id)
            lost_end, prompt_end = (row.recompute_until, row.num_prompt_tokens) if row is not None else (share.end, 0)
            num_lost = max(0, min(share.end, lost_end) - share.start)
            num_recomputed += num_lost
            num_prompt += max(0, min(share.end, prompt_end) - share.start - num_lost)
        elif share.kind != "decode":
            num_prompt += share.num_tokens
    data.since_attach.num_prompt_tokens_computed += num_prompt
    data.since_attach.num_recomputed_tokens += num_recomputed
    data.rates.add(event.time, 1, num_prompt, 0)
    bucket = data.histories.at(event.time)
    bucket.steps += 1
    bucket.prefill_tokens += num_prompt
    data.overlap_meter.add_host(event.schedule_start, event.schedule_end)
    return num_prompt, num_recomputed


def _make_record(event: StepEvent, shares: Shares) -> StepRecord:
    output: SchedulerOutput = event.output
    cached, changes = output.scheduled_cached_reqs, event.block_changes
    resumed = cached.resumed_req_ids
    return StepRecord(
        step_id=event.step_id,
        time=event.time,
        token_budget=event.token_budget,
        num_tokens=output.total_num_scheduled_tokens,
        admission_stop=event.admission_stop,
        shares=shares,
        new_ids=tuple(new.req_id for new in output.scheduled_new_reqs),
        cached_ids=tuple(req_id for req_id in cached.req_ids if req_id not in resumed) if resumed else tuple(cached.req_ids),
        resumed_ids=tuple(req_id for req_id in cached.req_ids if req_id in resumed) if resumed else (),
        preempted_ids=tuple(sorted(output.preempted_req_ids)),
        finished_ids=tuple(sorted(output.finished_req_ids)),
        allocated_ids=tuple(changes.allocated),
        freed_ids=tuple(changes.freed),
        evicted_ids=tuple(changes.evicted),
        queue_depth=event.queue_depth,
        stats=event.stats,
        lanes=Lanes(schedule=(event.schedule_start, event.schedule_end)),
        zeroed_ids=tuple(output.new_block_ids_to_zero),
        stopped_req_id=event.stopped_req_id,
        num_blocks_needed=event.num_blocks_needed,
    )


# ---------------------------------------------------------------------------------------------------- its tokens are back


def _fold_result(data: StateData, event: StepResultEvent) -> None:
    data.num_in_flight = event.queue_depth
    data.since_attach.num_draft_tokens += event.num_draft_tokens
    data.since_attach.num_accepted_tokens += event.num_accepted_tokens
    fold_result_requests(data, event)
    # What changes now shows beside the step that was scheduled last: that is the present.
    _note_block_changes(data, event.block_changes, time=event.time, step_id=data.last_step_id or event.step_id)
    _note_gauges(data, event.stats, time=event.time)
    _measure_overlap(data, event)
    _complete_record(data, event)
    data.waterfall.note_result(event, data.requests, last_step_id=data.last_step_id or event.step_id)


def _measure_overlap(data: StateData, event: StepResultEvent) -> None:
    data.overlap_meter.add_host(event.update_start, event.update_end)
    start = event.execute_start if event.execute_start is not None else event.sample_start
    end = event.sample_end if event.sample_end is not None else event.execute_end
    if start is None or end is None:
        return
    host, hidden = data.overlap_meter.add_worker(start, end)
    data.overlap.add(event.time, host, hidden)
    bucket = data.histories.at(event.time)
    bucket.host += host
    bucket.hidden += hidden


def _complete_record(data: StateData, event: StepResultEvent) -> None:
    steps, num_new = data.steps, event.num_new_tokens.get
    for index in range(len(steps) - 1, -1, -1):  # it is one of the latest
        record = steps[index]
        if record.step_id == event.step_id:
            steps[index] = dataclasses.replace(
                record,
                num_new_tokens=sum(event.num_new_tokens.values()),
                ended_ids=tuple(info.request_id for info in event.finished),
                result_time=event.time,
                num_draft_tokens=event.num_draft_tokens,
                num_accepted_tokens=event.num_accepted_tokens,
                sampled=tuple(map(num_new, record.shares.request_ids, repeat(0))),
                lanes=Lanes(
                    schedule=record.lanes.schedule,
                    execute=_span(event.execute_start, event.execute_end),
                    sample=_span(event.sample_start, event.sample_end),
                    update=(event.update_start, event.update_end),
                    grammar=_span(event.grammar_start, event.grammar_end),
                ),
            )
            return
        if record.step_id < event.step_id:
            return


def _span(start: float | None, end: float | None) -> tuple[float, float] | None:
    return None if start is None or end is None else (start, end)


# ---------------------------------------------------------------------------------------------------- the whole truth between two events


def _fold_snapshot(data: StateData, snapshot: EngineSnapshot) -> None:
    is_first, was_out_of_sync = data.num_events == 1, data.out_of_sync
    data.out_of_sync = False
    data.last_step_id = max(data.last_step_id, snapshot.step_id)
    data.num_in_flight = snapshot.num_in_flight
    _note_paused(data, snapshot)
    fold_snapshot_requests(data, snapshot, in_sync=not was_out_of_sync)
    data.blocks.replace_all(snapshot)
    _note_last_step(data, snapshot)
    _note_gauges(data, snapshot.stats, time=snapshot.time)
    data.waterfall.note_all(data.requests, last_step_id=data.last_step_id)
    if is_first and snapshot.step_id:
        text = f"this begins with a snapshot after step {snapshot.step_id}: what was before is not known"
        data.log.add(snapshot.time, snapshot.step_id, "stream", None, text)
    elif was_out_of_sync and not is_first:
        data.log.add(snapshot.time, snapshot.step_id, "stream", None, "in step with the engine again, by a snapshot")


def _note_last_step(data: StateData, snapshot: EngineSnapshot) -> None:
    """Take over the last step, and what came of it, where they were not seen."""
    event, result = snapshot.last_step, snapshot.last_result
    if event is None or not lists_agree(event.output.scheduled_cached_reqs):
        return
    data.admission_stop = event.admission_stop
    if not data.steps or data.steps[-1].step_id < event.step_id:
        shares = shares_of_told_step(data, event)
        data.steps.append(_make_record(event, shares))
        _note_told_step(data, event, shares)
    record = data.steps[-1]
    if result is not None and result.step_id == record.step_id and record.in_flight:
        _complete_record(data, result)
        data.waterfall.note_result(result, data.requests, last_step_id=data.last_step_id)


def _note_told_step(data: StateData, event: StepEvent, shares: Shares) -> None:
    """The waterfall begins with it."""
    tokens = {kind: sum(share.num_tokens for share in shares if share.kind == kind) for kind in ("chunk", "prefill", "resumed")}
    num_prompt = tokens["chunk"] + tokens["prefill"]
    data.waterfall.note_step(event, shares, data.requests, num_prompt_tokens=num_prompt, num_recomputed_tokens=tokens["resumed"])


def _note_paused(data: StateData, snapshot: EngineSnapshot) -> None:
    if snapshot.paused != data.paused:
        data.paused = snapshot.paused
        text = "the engine is paused: no further step is scheduled" if snapshot.paused else "the engine goes on"
        data.log.add(snapshot.time, snapshot.step_id, "engine", None, text)


# ---------------------------------------------------------------------------------------------------- what every event carries


def _note_block_changes(data: StateData, changes: BlockChanges, *, time: float, step_id: int) -> None:
    data.blocks.note_changes(changes, step_id=step_id)
    if changes.evicted:
        data.since_attach.num_evicted_blocks += len(changes.evicted)
        text = f"{plural(len(changes.evicted), 'cached block')} evicted: {name_some(changes.evicted)}"
        data.log.add(time, step_id, "evicted", None, text)


def _note_gauges(data: StateData, stats: SchedulerStats, *, time: float) -> None:
    """Absolute numbers, which every event carries. They also end rows that a lossy stream left behind."""
    before, data.stats = data.stats, stats
    data.blocks.resize(stats.num_total_blocks)
    bucket = data.histories.at(time)
    bucket.kv_usage = stats.kv_cache_usage
    bucket.running = stats.num_running_reqs
    bucket.waiting = stats.num_waiting_reqs - stats.num_preempted_reqs
    bucket.preempted = stats.num_preempted_reqs
    if before is not None:
        bucket.queries += max(0, stats.prefix_cache_queries - before.prefix_cache_queries)
        bucket.hits += max(0, stats.prefix_cache_hits - before.prefix_cache_hits)
    if data.out_of_sync and not stats.num_running_reqs and not stats.num_waiting_reqs:
        for row in [row for row in data.requests.values() if row.is_live]:
            note_unseen_end(data, row, time=time, step_id=data.last_step_id)
        data.waterfall.note_all(data.requests, last_step_id=data.last_step_id)
        data.out_of_sync = False  # nothing lives, so nothing can be wrong
