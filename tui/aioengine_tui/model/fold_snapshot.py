"""Folds an `EngineSnapshot`: the whole truth between two events, for a start in the middle, after a gap, or at idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.events.step_event import EngineSnapshot, RequestSnapshot
from aioengine_tui.model.lifecycle import find_or_make_row, fold_gauges, note_unseen_end
from aioengine_tui.model.rows import RequestRow, RequestState

if TYPE_CHECKING:
    from aioengine_tui.state import DashboardState

_STATES: dict[str, RequestState] = {"WAITING": "waiting", "RUNNING": "running", "PREEMPTED": "preempted"}


def fold_snapshot(state: DashboardState, snapshot: EngineSnapshot) -> None:
    is_first, was_out_of_sync = state.num_events == 1, state.out_of_sync
    state.out_of_sync = False
    state.last_step_id = max(state.last_step_id, snapshot.step_id)
    state.num_in_flight = snapshot.num_in_flight
    _fold_paused(state, snapshot)
    for request in snapshot.requests:
        _fold_request(state, request, snapshot, in_sync=not was_out_of_sync)
    _fold_lingering(state, snapshot)
    known = {request.request_id for request in snapshot.requests} | snapshot.lingering.keys()
    for row in [row for row in state.requests.values() if row.request_id not in known]:
        note_unseen_end(state, row, time=snapshot.time, step_id=snapshot.step_id)
    hashes: list[str] | list[None] = snapshot.cached_block_hashes or [None] * len(snapshot.cached_block_ids)
    state.blocks.replace_all(
        snapshot.stats.num_total_blocks,
        tables=((request.request_id, request.block_ids) for request in snapshot.requests),
        cached=dict(zip(snapshot.cached_block_ids, hashes, strict=False)),
    )
    fold_gauges(state, snapshot.stats, time=snapshot.time)
    if is_first and snapshot.step_id:
        text = f"this begins with a snapshot after step {snapshot.step_id}: what was before is not known"
        state.log.add(snapshot.time, snapshot.step_id, "stream", None, text)
    elif was_out_of_sync and not is_first:
        state.log.add(snapshot.time, snapshot.step_id, "stream", None, "in step with the engine again, by a snapshot")


def _fold_paused(state: DashboardState, snapshot: EngineSnapshot) -> None:
    if snapshot.paused != state.paused:
        state.paused = snapshot.paused
        text = "the engine is paused: no further step is scheduled" if snapshot.paused else "the engine goes on"
        state.log.add(snapshot.time, snapshot.step_id, "engine", None, text)


def _fold_request(state: DashboardState, request: RequestSnapshot, snapshot: EngineSnapshot, *, in_sync: bool) -> None:
    row = state.requests.get(request.request_id)
    was_followed = in_sync and row is not None and row.is_live
    if row is None or not row.is_live:
        if row is not None:
            note_unseen_end(state, row, time=snapshot.time, step_id=snapshot.step_id)
        row = find_or_make_row(state, request.request_id, time=request.arrival_time)
        row.add_milestone(request.arrival_time, None, "queued", f"{request.num_prompt_tokens} prompt tokens")
    row.state = _STATES.get(request.status, "running")
    row.num_prompt_tokens = request.num_prompt_tokens
    row.num_cached_tokens = max(0, request.num_cached_tokens)
    row.num_computed_tokens = request.num_computed_tokens
    row.num_output_tokens = request.num_output_tokens
    row.max_tokens = request.max_tokens
    row.priority = request.priority
    row.num_preemptions = request.num_preemptions
    row.sampling_params = request.sampling_params or row.sampling_params
    row.prompt = request.prompt if request.prompt is not None else row.prompt
    row.text = request.text or row.text
    row.block_ids = list(request.block_ids)
    row.num_peak_blocks = max(row.num_peak_blocks, len(row.block_ids))
    if row.last_step_id == 0 and request.num_cached_tokens >= 0:
        row.last_step_id = snapshot.step_id  # it has been scheduled, so the worker knows it; when, is not told
    if not was_followed:
        _estimate_recomputing(row)


def _estimate_recomputing(row: RequestRow) -> None:
    """No token is sampled while old ones are computed again, so all that are known are old ones.

    Just one missing is what decoding looks like with no step in flight: the latest token goes through the model next.
    """
    if row.state == "running" and row.num_preemptions and row.num_computed_tokens < row.num_tokens - 1:
        row.recompute_until = row.num_tokens
    else:
        row.recompute_until = 0


def _fold_lingering(state: DashboardState, snapshot: EngineSnapshot) -> None:
    """Requests that ended, and that the worker still has to forget."""
    for request_id, told_in_step in snapshot.lingering.items():
        row = state.requests.get(request_id)
        if row is None:
            row = find_or_make_row(state, request_id, time=snapshot.time)
            row.last_step_id = snapshot.step_id
        if row.is_live:
            row.state = "cleaning_up"
            row.finish_time = snapshot.time
            row.block_ids = []
            state.totals.num_finished += 1
        row.told_in_step = told_in_step or None
