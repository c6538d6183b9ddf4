"""Folds a `StepEvent`: a step was scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.core.scheduler_output import NewRequestData, SchedulerOutput
from aioengine.events.step_event import StepEvent
from aioengine_tui.model.lifecycle import (
    find_or_make_row,
    name_some,
    note_arrival,
    note_block_changes,
    note_finished,
    note_told,
    plural,
    release_blocks,
    take_blocks,
    take_gauges,
)
from aioengine_tui.model.rows import Lanes, RequestRow, Share, ShareKind, StepRecord

if TYPE_CHECKING:
    from aioengine_tui.state import DashboardState


def fold_step(state: DashboardState, event: StepEvent) -> None:
    step_id, output = event.step_id, event.output
    if step_id <= state.last_step_id:
        return  # a snapshot already told more
    _check_sequence(state, step_id)
    state.last_step_id = step_id
    state.num_in_flight = event.queue_depth
    state.admission_stop = event.admission_stop
    state.totals.num_steps += 1
    for info in event.added:
        note_arrival(state, info)
    for finished in event.finished:
        note_finished(state, finished, time=event.schedule_start, step_id=step_id)
    if output.preempted_req_ids:
        _preempt(state, event)
    shares = _fold_scheduled(state, event)
    finished_ids = tuple(sorted(output.finished_req_ids))
    note_told(state, finished_ids, time=event.time, step_id=step_id)
    note_block_changes(state, event.block_changes, time=event.time, step_id=step_id)
    take_gauges(state, event.stats, time=event.time)
    _measure(state, event, shares)
    state.steps.append(_make_record(event, shares, finished_ids))


def _check_sequence(state: DashboardState, step_id: int) -> None:
    if state.out_of_sync:
        return
    num_missing = step_id - state.last_step_id - 1
    if num_missing > 0:
        if state.last_step_id:
            state.note_gap(num_missing, f"steps {state.last_step_id + 1} to {step_id - 1} were not seen")
        elif state.stats is None:
            state.note_gap(0, f"the stream begins at step {step_id}, without a snapshot")


# ---------------------------------------------------------------------------------------------------- preemption
def _preempt(state: DashboardState, event: StepEvent) -> None:
    cached = event.output.scheduled_cached_reqs
    takers = [req_id for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=False) if block_ids is not None]
    admitted = [new.req_id for new in event.output.scheduled_new_reqs] + sorted(cached.resumed_req_ids)
    was_reset = bool(event.output.preempted_req_ids & cached.resumed_req_ids)  # nobody took its place: it is back in the same step
    if was_reset or (not admitted and event.admission_stop != "preempted"):  # nor did this step lack blocks
        why = "the prefix cache was reset"
    elif admitted:  # a step that preempts for lack of blocks admits nobody
        why = f"the more urgent {name_some(admitted, 3)} took its place"
    elif takers:
        why = f"no block was free and {name_some(takers, 3)} needed {'more' if len(takers) > 1 else 'one more'}"
    else:
        why = "no block was free for its own next token"
    for req_id in sorted(event.output.preempted_req_ids):
        row = find_or_make_row(state, req_id, time=event.time)
        if row.state == "preempted":
            continue  # between two steps, and a snapshot came before the step that tells the worker
        num_computed, row.num_computed_tokens = row.num_computed_tokens, 0
        num_blocks = release_blocks(state, row, step_id=event.step_id)
        row.state = "preempted"
        row.num_preemptions += 1
        state.totals.num_preemptions += 1
        row.add_milestone(event.time, event.step_id, "preempted", f"{why}; it gave {plural(num_blocks, 'block')}")
        text = f"preempted because {why}: {plural(num_blocks, 'block')} given back, {num_computed} computed tokens lost"
        state.log.add(event.time, event.step_id, "preempted", req_id, text)


# ---------------------------------------------------------------------------------------------------- who is scheduled
def _fold_scheduled(state: DashboardState, event: StepEvent) -> tuple[Share, ...]:
    """Move the rows on; returns the shares in the order of the batch."""
    output = event.output
    shares = _fold_cached(state, event)
    if not output.scheduled_new_reqs and not output.scheduled_cached_reqs.resumed_req_ids:
        return tuple(shares)  # the common case: already in order
    shares += [_admit(state, new, event) for new in output.scheduled_new_reqs]
    by_id = {share.request_id: share for share in shares}
    return tuple(by_id[req_id] for req_id in output.num_scheduled_tokens if req_id in by_id)


def _fold_cached(state: DashboardState, event: StepEvent) -> list[Share]:
    cached, step_id = event.output.scheduled_cached_reqs, event.step_id
    rows, num_scheduled, starts = state.requests, event.output.num_scheduled_tokens, cached.num_computed_tokens
    shares: list[Share] = []
    kind: ShareKind
    if not len(cached.req_ids) == len(starts) == len(cached.new_block_ids):
        state.note_gap(0, f"step {step_id} came damaged")  # the lists are parallel in anything that an engine sends
        return shares
    for index, req_id in enumerate(cached.req_ids):
        row = rows.get(req_id)
        if row is None:
            row = find_or_make_row(state, req_id, time=event.time)
        if cached.resumed_req_ids and req_id in cached.resumed_req_ids:
            _resume(state, row, event, index)
        elif (added := cached.new_block_ids[index]) is not None:
            take_blocks(state, row, added[0], replace=False)
        num_tokens, start = num_scheduled.get(req_id, 0), starts[index]
        end = start + num_tokens
        if start < row.recompute_until:
            kind = row.last_step_kind = "resumed"
            if end >= row.recompute_until:
                row.add_milestone(event.time, step_id, "recomputed", f"up to token {row.recompute_until}")
                row.recompute_until = 0
        elif start < row.num_prompt_tokens:
            kind = row.last_step_kind = "chunk"
            row.add_milestone(event.time, step_id, "chunk", f"tokens {start} to {end - 1} of {row.num_prompt_tokens}")
        else:
            kind = row.last_step_kind = "decode"
        if row.state == "waiting":  # its admission was not seen
            row.state = "running"
        row.num_computed_tokens = end
        row.last_step_id, row.last_step_tokens = step_id, num_tokens
        shares.append(Share(req_id, kind, num_tokens, start))
    return shares


def _resume(state: DashboardState, row: RequestRow, event: StepEvent, index: int) -> None:
    cached = event.output.scheduled_cached_reqs
    row.state = "running"
    row.recompute_until = len(cached.all_token_ids.get(row.request_id, ())) or row.num_tokens
    added = cached.new_block_ids[index]
    take_blocks(state, row, list(added[0]) if added is not None else [], replace=True)
    start = cached.num_computed_tokens[index]
    text = f"{start} of {row.recompute_until} tokens found in the prefix cache, {plural(len(row.block_ids), 'block')}"
    row.add_milestone(event.time, event.step_id, "resumed", text)
    state.log.add(event.time, event.step_id, "resumed", row.request_id, f"resumed after a preemption: {text}")


def _admit(state: DashboardState, new: NewRequestData, event: StepEvent) -> Share:
    row = find_or_make_row(state, new.req_id, time=event.time)
    num_prompt, start = len(new.prompt_token_ids), new.num_computed_tokens
    num_tokens = event.output.num_scheduled_tokens.get(new.req_id, 0)
    row.state = "running"
    row.num_prompt_tokens = num_prompt
    row.num_cached_tokens = start
    row.num_computed_tokens = start + num_tokens
    row.sampling_params = new.sampling_params
    row.max_tokens = row.max_tokens or new.sampling_params.max_tokens or 0
    take_blocks(state, row, list(new.block_ids[0]), replace=True)
    row.last_step_id, row.last_step_tokens = event.step_id, num_tokens
    kind = row.last_step_kind = "prefill" if start + num_tokens >= num_prompt else "chunk"
    text = f"{start} of {num_prompt} prompt tokens from the prefix cache, {num_tokens} scheduled, {plural(len(row.block_ids), 'block')}"
    row.add_milestone(event.time, event.step_id, "scheduled", text)
    state.log.add(event.time, event.step_id, "admitted", new.req_id, f"admitted: {text}")
    return Share(new.req_id, kind, num_tokens, start)


# ---------------------------------------------------------------------------------------------------- the step itself
def _measure(state: DashboardState, event: StepEvent, shares: tuple[Share, ...]) -> None:
    num_prompt = num_recomputed = 0
    for _, kind, num_tokens, _ in shares:
        if kind == "resumed":
            num_recomputed += num_tokens
        elif kind != "decode":
            num_prompt += num_tokens
    state.totals.num_prompt_tokens_computed += num_prompt
    state.totals.num_recomputed_tokens += num_recomputed
    state.rates.add(event.time, 1, num_prompt, 0)
    bucket = state.histories.at(event.time)
    bucket.steps += 1
    bucket.prefill_tokens += num_prompt
    state.overlap_meter.add_host(event.schedule_start, event.schedule_end)


def _make_record(event: StepEvent, shares: tuple[Share, ...], finished_ids: tuple[str, ...]) -> StepRecord:
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
        finished_ids=finished_ids,
        num_allocated=len(changes.allocated),
        num_freed=len(changes.freed),
        num_evicted=len(changes.evicted),
        queue_depth=event.queue_depth,
        stats=event.stats,
        lanes=Lanes(schedule=(event.schedule_start, event.schedule_end)),
    )
