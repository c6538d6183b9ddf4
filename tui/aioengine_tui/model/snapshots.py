"""What a snapshot says of requests, and of the step before it, to a viewer that did not see how it came about."""

from __future__ import annotations

from aioengine.events.step_event import EngineSnapshot, RequestSnapshot, StepEvent
from aioengine_tui.model.rows import RequestRow, RequestState, Share, ShareKind, Shares
from aioengine_tui.model.state_data import StateData
from aioengine_tui.model.transitions import add_milestone, find_or_make_row, note_unseen_end

_STATES: dict[str, RequestState] = {"WAITING": "waiting", "RUNNING": "running", "PREEMPTED": "preempted"}


def fold_snapshot_requests(data: StateData, snapshot: EngineSnapshot, *, in_sync: bool) -> None:
    """Take over the requests of a snapshot; those that it does not have are gone. in_sync: nothing was missed before it."""
    for request in snapshot.requests:
        _note_request_snapshot(data, request, snapshot, in_sync=in_sync)
    _note_lingering(data, snapshot)
    known = {request.request_id for request in snapshot.requests} | snapshot.lingering.keys()
    for row in [row for row in data.requests.values() if row.request_id not in known]:
        note_unseen_end(data, row, time=snapshot.time, step_id=snapshot.step_id)


def _note_request_snapshot(data: StateData, request: RequestSnapshot, snapshot: EngineSnapshot, *, in_sync: bool) -> None:
    row = data.requests.get(request.request_id)
    was_followed = in_sync and row is not None and row.is_live
    if row is None or not row.is_live:
        if row is not None:
            note_unseen_end(data, row, time=snapshot.time, step_id=snapshot.step_id)
        row = find_or_make_row(data, request.request_id, time=request.arrival_time)
        add_milestone(row, request.arrival_time, None, "queued", f"{request.num_prompt_tokens} prompt tokens")
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
    row.block_ids, row.other_block_ids = list(request.block_ids), [list(table) for table in request.other_block_ids]
    row.table = tuple(request.block_ids)
    row.num_peak_blocks = max(row.num_peak_blocks, row.num_blocks)
    if row.last_step_id == 0 and request.num_cached_tokens >= 0:
        row.last_step_id = snapshot.step_id  # it has been scheduled, so the worker knows it; when, is not told
    if request.scheduled_time is not None:
        if row.scheduled_time is None:
            data.queue_waits.add(request.scheduled_time, max(0.0, request.scheduled_time - request.arrival_time))
        row.scheduled_time = request.scheduled_time
    if request.recompute_until is not None:
        row.recompute_until = request.recompute_until
    elif not was_followed:
        _estimate_recomputing(row)
    if row.first_token_time is None and request.first_token_time is not None:
        row.first_token_time = request.first_token_time
        if row.ttft is not None:
            data.ttfts.add(request.first_token_time, row.ttft)
    result = snapshot.last_result
    if result is not None and not was_followed and result.num_new_tokens.get(request.request_id):
        row.last_token_time = result.time


def _estimate_recomputing(row: RequestRow) -> None:
    """Of an older engine. No token is sampled while old ones are computed again, so all that are known are old ones.

    Just one missing is what decoding looks like with no step in flight: the latest token goes through the model next.
    """
    if row.state == "running" and row.num_preemptions and row.num_computed_tokens < row.num_tokens - 1:
        row.recompute_until = row.num_tokens
    else:
        row.recompute_until = 0


def _note_lingering(data: StateData, snapshot: EngineSnapshot) -> None:
    """Requests that ended, and that the worker still has to forget."""
    for request_id, told_in_step in snapshot.lingering.items():
        row = data.requests.get(request_id)
        if row is None:
            row = find_or_make_row(data, request_id, time=snapshot.time)
            row.last_step_id = snapshot.step_id
        if row.is_live:
            row.state = "cleaning_up"
            row.finish_time = snapshot.time
            row.block_ids, row.other_block_ids, row.table = [], [], ()
            data.since_attach.num_finished += 1
        row.told_in_step = told_in_step or None


def shares_of_told_step(data: StateData, event: StepEvent) -> Shares:
    """The shares of a step that was not seen, but told by a snapshot that came after it: the rows are already moved on."""
    output, cached = event.output, event.output.scheduled_cached_reqs
    drafts, masked = output.scheduled_spec_decode_tokens, output.structured_output_request_ids
    by_id: dict[str, Share] = {}
    kind: ShareKind
    for new in output.scheduled_new_reqs:
        num_tokens, table = output.num_scheduled_tokens.get(new.req_id, 0), tuple(new.block_ids[0])
        kind = "prefill" if new.num_computed_tokens + num_tokens >= len(new.prompt_token_ids) else "chunk"
        by_id[new.req_id] = Share(
            new.req_id, kind, num_tokens, new.num_computed_tokens, table, len(table), True, needs_mask=new.req_id in masked
        )
    for index, req_id in enumerate(cached.req_ids):
        row, is_resumed = data.requests.get(req_id), req_id in cached.resumed_req_ids
        num_tokens, start = output.num_scheduled_tokens.get(req_id, 0), cached.num_computed_tokens[index]
        added = cached.new_block_ids[index]
        new_block_ids = tuple(added[0]) if added else ()
        table = row.table if row is not None and row.table and not is_resumed else new_block_ids
        if is_resumed or (row is not None and start < row.recompute_until):
            kind = "resumed"
        else:
            kind = "decode" if cached.num_output_tokens[index] else "chunk"
        by_id[req_id] = Share(
            req_id, kind, num_tokens, start, table, len(new_block_ids), is_resumed,
            cached.num_output_tokens[index], tuple(drafts.get(req_id, ())), req_id in masked,
        )  # fmt: skip
    for share in by_id.values():
        if (row := data.requests.get(share.request_id)) is not None and row.is_live:
            row.last_step_id, row.last_step_tokens, row.last_step_kind = event.step_id, share.num_tokens, share.kind
    return Shares(None, tuple(by_id[req_id] for req_id in output.num_scheduled_tokens if req_id in by_id))
