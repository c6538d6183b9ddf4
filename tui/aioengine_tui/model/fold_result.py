"""Folds a `StepResultEvent`: a step's tokens are back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from aioengine.events.step_event import StepResultEvent
from aioengine_tui.model.lifecycle import fold_gauges, note_arrival, note_block_changes, note_cleaned_up, note_finished
from aioengine_tui.model.rows import Lanes, RequestRow

if TYPE_CHECKING:
    from aioengine_tui.state import DashboardState


def fold_result(state: DashboardState, event: StepResultEvent) -> None:
    state.num_in_flight = event.queue_depth
    for arrival in event.added:
        note_arrival(state, arrival)
    _fold_tokens(state, event)
    for request_id, text in event.new_text.items():
        if (row := state.requests.get(request_id)) is not None:
            row.add_text(text)
    for info in event.finished:
        note_finished(state, info, time=event.time, step_id=event.step_id)
    note_cleaned_up(state, time=event.time, step_id=event.step_id)
    # What changes now shows beside the step that was scheduled last: that is the present.
    note_block_changes(state, event.block_changes, time=event.time, step_id=state.last_step_id or event.step_id)
    fold_gauges(state, event.stats, time=event.time)
    _measure_overlap(state, event)
    _complete_record(state, event)


def _fold_tokens(state: DashboardState, event: StepResultEvent) -> None:
    rows, time = state.requests, event.time
    num_tokens = 0
    gaps: dict[float, int] = {}  # time of the previous token -> tokens that followed it: nearly all rows share one
    for req_id, num_new in event.num_new_tokens.items():
        row = rows.get(req_id)
        num_tokens += num_new
        if row is None or num_new == 0:
            continue
        last_time = row.last_token_time
        if last_time is not None:
            gaps[last_time] = gaps.get(last_time, 0) + 1
        elif row.num_output_tokens == 0:
            _note_first_token(state, row, event)
        row.num_output_tokens += num_new
        if event.num_draft_tokens:  # what was computed for rejected draft tokens does not count; no step behind this one is in flight
            row.num_computed_tokens = min(row.num_computed_tokens, row.num_tokens - 1)
        row.last_token_time = time
    state.totals.num_output_tokens += num_tokens
    if not num_tokens:
        return
    state.rates.add(time, 0, 0, num_tokens)
    bucket = state.histories.at(time)
    bucket.decode_tokens += num_tokens
    for last_time, count in gaps.items():
        state.itls.add(time, time - last_time, count)
        bucket.itl_sum += (time - last_time) * count
        bucket.itl_count += count


def _note_first_token(state: DashboardState, row: RequestRow, event: StepResultEvent) -> None:
    row.first_token_time = event.time
    ttft = event.time - row.arrival_time
    row.add_milestone(event.time, event.step_id, "first_token", f"{ttft * 1e3:.1f} ms after it arrived")
    state.ttfts.add(event.time, ttft)
    bucket = state.histories.at(event.time)
    bucket.ttft_sum += ttft
    bucket.ttft_count += 1


def _measure_overlap(state: DashboardState, event: StepResultEvent) -> None:
    state.overlap_meter.add_host(event.update_start, event.update_end)
    start = event.execute_start if event.execute_start is not None else event.sample_start
    end = event.sample_end if event.sample_end is not None else event.execute_end
    if start is None or end is None:
        return
    host, hidden = state.overlap_meter.add_worker(start, end)
    state.overlap.add(event.time, host, hidden)
    bucket = state.histories.at(event.time)
    bucket.host += host
    bucket.hidden += hidden


def _complete_record(state: DashboardState, event: StepResultEvent) -> None:
    steps = state.steps
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
                lanes=Lanes(
                    schedule=record.lanes.schedule,
                    execute=_span(event.execute_start, event.execute_end),
                    sample=_span(event.sample_start, event.sample_end),
                    update=(event.update_start, event.update_end),
                ),
            )
            return
        if record.step_id < event.step_id:
            return


def _span(start: float | None, end: float | None) -> tuple[float, float] | None:
    return None if start is None or end is None else (start, end)
