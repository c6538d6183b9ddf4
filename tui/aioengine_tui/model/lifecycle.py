"""Transitions of requests that several kinds of events cause: arrival, the end, the worker's clean-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aioengine.core.scheduler_output import BlockChanges, SchedulerStats
from aioengine.events.step_event import FinishedInfo, RequestInfo
from aioengine_tui.model.rows import RequestRow

if TYPE_CHECKING:
    from aioengine_tui.state import DashboardState


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def name_some(names: Sequence[object], limit: int = 6) -> str:
    """ "a, b, c and 4 more" """
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def find_or_make_row(state: DashboardState, request_id: str, *, time: float) -> RequestRow:
    """The live row; a blank one if the stream left out its arrival."""
    row = state.requests.get(request_id)
    if row is None:
        state.finished.pop(request_id, None)  # the name is used again
        row = state.requests[request_id] = RequestRow(request_id, arrival_time=time)
        state.totals.num_arrived += 1
    return row


def note_arrival(state: DashboardState, info: RequestInfo) -> None:
    row = state.requests.get(info.request_id)
    if row is not None and row.is_live:  # a snapshot was quicker
        row.prompt = row.prompt or info.prompt
        return
    if row is not None:  # the name is used again while the old one's clean-up went unseen
        _retire(state, row)
    row = find_or_make_row(state, info.request_id, time=info.arrival_time)
    row.num_prompt_tokens = info.num_prompt_tokens
    row.max_tokens = info.max_tokens
    row.priority = info.priority
    row.prompt = info.prompt
    row.add_milestone(info.arrival_time, None, "queued", f"{plural(info.num_prompt_tokens, 'prompt token')}, up to {info.max_tokens} more")
    text = f"arrived with {plural(info.num_prompt_tokens, 'prompt token')}, up to {plural(info.max_tokens, 'token')} to generate"
    state.log.add(info.arrival_time, None, "arrived", info.request_id, text)


def note_finished(state: DashboardState, info: FinishedInfo, *, time: float, step_id: int) -> None:
    """A request ended: its blocks return at once, the worker is told in the next step."""
    row = state.requests.get(info.request_id)
    if row is None or not row.is_live:
        _complete_reason(state, row, info)
        return
    row.finish_time = time
    row.finish_reason, row.stop_reason = info.finish_reason, info.stop_reason
    row.num_output_tokens = info.num_output_tokens
    row.state = "cleaning_up"
    _count_end(state, info)
    num_blocks = release_blocks(state, row, step_id=step_id)
    returned = f"; {plural(num_blocks, 'block')} returned" if num_blocks else ""
    text = f"{_end_words(info)} after {plural(info.num_output_tokens, 'token')}"
    row.add_milestone(time, step_id, "finished", text + returned)
    state.log.add(time, step_id, "aborted" if info.finish_reason == "abort" else "finished", info.request_id, text)
    if num_blocks:
        state.log.add(time, step_id, "freed", info.request_id, f"{plural(num_blocks, 'block')} let go of")
    if row.last_step_id == 0:  # never scheduled: the worker does not know it
        _retire(state, row)


def _end_words(info: FinishedInfo) -> str:
    match info.finish_reason:
        case "stop" if info.stop_reason is None:
            return "stopped by an end-of-sequence token"
        case "stop":
            return f"stopped by {'token' if isinstance(info.stop_reason, int) else 'the text'} {info.stop_reason!r}"
        case "length":
            return "reached its length"
        case "repetition":
            return "stopped because it repeated itself"
        case "abort":
            return "aborted"
        case "error":
            return "failed"
        case _:  # of a newer engine
            return f"ended by {info.finish_reason}"


def _count_end(state: DashboardState, info: FinishedInfo) -> None:
    state.totals.num_finished += 1
    state.totals.num_aborted += info.finish_reason == "abort"
    state.totals.num_errors += info.finish_reason == "error"


def _complete_reason(state: DashboardState, row: RequestRow | None, info: FinishedInfo) -> None:
    """The end was seen before, in a snapshot, and the reason comes now."""
    old = row or state.finished.get(info.request_id)
    if old is None or old.finish_reason is not None:
        return
    new = old.copy()  # a finished row may be shared with copies of the state
    new.finish_reason, new.stop_reason, new.num_output_tokens = info.finish_reason, info.stop_reason, info.num_output_tokens
    (state.requests if row is not None else state.finished)[info.request_id] = new
    state.totals.num_aborted += info.finish_reason == "abort"
    state.totals.num_errors += info.finish_reason == "error"


def note_told(state: DashboardState, request_ids: Sequence[str], *, time: float, step_id: int) -> None:
    """A step that tells the worker to forget these was handed over."""
    for request_id in request_ids:
        row = state.requests.get(request_id)
        if row is not None and not row.is_live:
            row.told_in_step = step_id
            row.add_milestone(time, step_id, "told_worker", f"in finished_req_ids of step {step_id}")
            state.log.add(time, step_id, "told", request_id, f"leaves: step {step_id} tells the worker to forget it")


def note_cleaned_up(state: DashboardState, *, time: float, step_id: int) -> None:
    """The worker has run a step, so it has forgotten whom that step, or one before, named."""
    gone = [row for row in state.requests.values() if row.told_in_step is not None and row.told_in_step <= step_id]
    for row in gone:
        row.add_milestone(time, step_id, "cleaned_up", f"step {step_id} came back")
        state.log.add(time, step_id, "cleaned_up", row.request_id, "cleaned up on the worker")
        _retire(state, row)


def note_unseen_end(state: DashboardState, row: RequestRow, *, time: float, step_id: int) -> None:
    """It is no longer there, and the stream did not say why (yet)."""
    release_blocks(state, row, step_id=step_id)
    if row.is_live:
        row.finish_time = time
        state.totals.num_finished += 1
        row.add_milestone(time, step_id, "finished", "its end was not seen")
    _retire(state, row)


def _retire(state: DashboardState, row: RequestRow) -> None:
    """Move a row to the ring of finished ones."""
    row.state = "finished"
    state.requests.pop(row.request_id, None)
    state.finished.pop(row.request_id, None)
    state.finished[row.request_id] = row
    while len(state.finished) > state.max_finished:
        del state.finished[next(iter(state.finished))]


def release_blocks(state: DashboardState, row: RequestRow, *, step_id: int) -> int:
    """Take its blocks away; returns how many it had."""
    num_blocks = len(row.block_ids)
    state.blocks.remove_owner(row.request_id, row.block_ids, step_id=step_id)
    row.block_ids = []
    return num_blocks


def take_blocks(state: DashboardState, row: RequestRow, block_ids: list[int], *, replace: bool) -> None:
    """More blocks for a request, or another table."""
    if replace and row.block_ids:
        state.blocks.remove_owner(row.request_id, row.block_ids, step_id=state.last_step_id)
        row.block_ids = []
    row.block_ids += block_ids
    row.num_peak_blocks = max(row.num_peak_blocks, len(row.block_ids))
    state.blocks.add_owner(row.request_id, block_ids)


def note_block_changes(state: DashboardState, changes: BlockChanges, *, time: float, step_id: int) -> None:
    if changes.evicted:
        state.blocks.evict(changes.evicted)
        state.totals.num_evicted_blocks += len(changes.evicted)
        text = f"{plural(len(changes.evicted), 'cached block')} evicted: {name_some(changes.evicted)}"
        state.log.add(time, step_id, "evicted", None, text)
    if changes.cached:
        state.blocks.cache(changes.cached, changes.cached_hashes or [None] * len(changes.cached))
    if changes.allocated or changes.freed:
        state.blocks.note_changes(step_id=step_id, allocated=changes.allocated, released=changes.freed)


def take_gauges(state: DashboardState, stats: SchedulerStats, *, time: float) -> None:
    """Absolute numbers, which every event carries. They also end rows that a lossy stream left behind."""
    before, state.stats = state.stats, stats
    state.blocks.resize(stats.num_total_blocks)
    bucket = state.histories.at(time)
    bucket.kv_usage = stats.kv_cache_usage
    bucket.running = stats.num_running_reqs
    bucket.waiting = stats.num_waiting_reqs - stats.num_preempted_reqs
    bucket.preempted = stats.num_preempted_reqs
    if before is not None:
        bucket.queries += max(0, stats.prefix_cache_queries - before.prefix_cache_queries)
        bucket.hits += max(0, stats.prefix_cache_hits - before.prefix_cache_hits)
    if state.out_of_sync and not stats.num_running_reqs and not stats.num_waiting_reqs:
        for row in [row for row in state.requests.values() if row.is_live]:
            note_unseen_end(state, row, time=time, step_id=state.last_step_id)
        state.out_of_sync = False  # nothing lives, so nothing can be wrong
