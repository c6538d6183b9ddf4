"""The state as plain JSON values: for `--once --json`, for exports, and for tests that compare states."""

from __future__ import annotations

import dataclasses
from typing import Any

from aioengine.events.params_form import params_to_dict
from aioengine_tui.model.metrics import SERIES
from aioengine_tui.model.rows import RequestRow, StepRecord
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall_json import waterfall_to_json
from aioengine_tui.model.why.why_json import why_to_json

JSON_VERSION = 2
"""Raised by any change of the form of `state_to_json()` other than an addition. 2: `totals` are the engine's, free and empty blocks.

docs/dashboard-json.md says what every key means."""


def state_to_json(state: DashboardState, *, complete: bool = False) -> dict[str, Any]:
    """Numbers, live requests, the queue, finished ones, the latest step, the block counts. Times are seconds of the engine's clock.

    complete: everything that is kept too (all steps, all finished rows, every block, log lines, histories).
    """
    current = state.current
    value: dict[str, Any] = {
        "version": JSON_VERSION,
        "model": state.model,
        "engine_version": state.header.engine_version if state.header is not None else None,
        "config": state.header.config if state.header is not None else None,
        "status": dataclasses.asdict(state.status),
        "now": state.now,
        "unix_time": state.unix_time(state.now),
        "attach_time": state.attach_time,
        "last_event_time": state.last_event_time,
        "last_gap": None if state.last_gap is None else dataclasses.asdict(state.last_gap),
        "last_step_id": state.last_step_id,
        "gauges": dataclasses.asdict(state.gauges()),
        "totals": dataclasses.asdict(state.totals),
        "since_attach": dataclasses.asdict(state.since_attach),
        "queue": [{"request_id": row.request_id, **dataclasses.asdict(wait)} for row, wait in state.waits()],
        "requests": [row_to_json(row, state) for row in state.requests.values()],
        "finished": [row_to_json(row, state) for row in reversed(state.finished.values())][: None if complete else 20],
        "step": None if current is None else step_to_json(current),
    }
    value["why"] = why_to_json(state)
    if complete:
        value["waterfall"] = waterfall_to_json(state.waterfall)
        value["steps"] = [step_to_json(record) for record in state.steps]
        value["eviction_order"] = state.blocks.eviction_order()
        value["prefix_nodes"] = [node._asdict() for node in state.blocks.prefix_nodes()]
        value["blocks"] = [_block_to_json(state, block_id) for block_id in range(1, state.blocks.num_blocks + 1)]
        value["log"] = [dataclasses.asdict(line) for line in state.log.lines]
        value["histories"] = {series: state.history(series) for series in SERIES}
    return value


def row_to_json(row: RequestRow, state: DashboardState) -> dict[str, Any]:
    share = state.share_of(row)
    return {
        "request_id": row.request_id,
        "state": row.state,
        "num_prompt_tokens": row.num_prompt_tokens,
        "num_cached_tokens": row.num_cached_tokens,
        "num_computed_tokens": row.num_computed_tokens,
        "num_output_tokens": row.num_output_tokens,
        "max_tokens": row.max_tokens,
        "priority": row.priority,
        "num_preemptions": row.num_preemptions,
        "recompute_until": row.recompute_until,
        "step_tokens": share[0] if share else 0,
        "step_kind": share[1] if share else None,
        "block_ids": list(row.block_ids),
        "other_block_ids": [list(table) for table in row.other_block_ids],
        "arrival_time": row.arrival_time,
        "age": row.age(state.now),
        "scheduled_time": row.scheduled_time,
        "queue_wait": row.queue_wait,
        "first_token_time": row.first_token_time,
        "ttft": row.ttft,
        "rate": row.rate,
        "finish_reason": row.finish_reason,
        "stop_reason": row.stop_reason,
        "finish_time": row.finish_time,
        "told_in_step": row.told_in_step,
        "sampling_params": None if row.sampling_params is None else params_to_dict(row.sampling_params, complete=True),
        "prompt": row.prompt,
        "text": row.text,
        "timeline": [dataclasses.asdict(milestone) for milestone in row.timeline],
    }


def step_to_json(record: StepRecord) -> dict[str, Any]:
    value = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    value["shares"] = [share._asdict() for share in record.shares]
    value |= {"num_allocated": record.num_allocated, "num_freed": record.num_freed, "num_evicted": record.num_evicted}
    value["stats"] = dataclasses.asdict(record.stats)
    value["lanes"] = dataclasses.asdict(record.lanes)
    for name in ("new_ids", "cached_ids", "resumed_ids", "preempted_ids", "finished_ids", "ended_ids"):
        value[name] = list(value[name])
    return value


def _block_to_json(state: DashboardState, block_id: int) -> dict[str, Any]:
    value = dataclasses.asdict(state.block(block_id))
    value["owners"] = list(value["owners"])
    return value
