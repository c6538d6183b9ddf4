"""What happens to requests: they arrive, are scheduled and preempted, get tokens, end, and are forgotten by the worker."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from aioengine.core.scheduler_output import CachedRequestData, NewRequestData
from aioengine.events.step_event import FinishedInfo, RequestInfo, StepEvent, StepResultEvent
from aioengine_tui.model.log import end_words, name_some, plural
from aioengine_tui.model.rows import DecodeShares, Milestone, MilestoneKind, RequestRow, Share, ShareKind, Shares
from aioengine_tui.model.state_data import StateData


# ---------------------------------------------------------------------------------------------------- by event
def fold_step_requests(data: StateData, event: StepEvent) -> Shares:
    """What a scheduled step does to requests; returns their shares of it in the order of the batch."""
    for info in event.added:
        _note_arrival(data, info)
    for finished in event.finished:
        _note_finished(data, finished, time=event.schedule_start, step_id=event.step_id)
    if event.output.preempted_req_ids:
        _note_preempted(data, event)
    shares = _note_scheduled(data, event)
    _note_told(data, sorted(event.output.finished_req_ids), time=event.time, step_id=event.step_id)
    return shares


def fold_result_requests(data: StateData, event: StepResultEvent) -> None:
    """What the tokens of a step do to requests."""
    for arrival in event.added:
        _note_arrival(data, arrival)
    _note_tokens(data, event)
    for request_id, text in event.new_text.items():
        if (row := data.requests.get(request_id)) is not None:
            row.add_text(text)
    for info in event.finished:
        _note_finished(data, info, time=event.time, step_id=event.step_id)
    _note_cleaned_up(data, time=event.time, step_id=event.step_id)


def lists_agree(cached: CachedRequestData) -> bool:
    """The lists are parallel, as in anything that an engine sends."""
    return len(cached.req_ids) == len(cached.num_computed_tokens) == len(cached.new_block_ids) == len(cached.num_output_tokens)


# ---------------------------------------------------------------------------------------------------- arrival


def find_or_make_row(data: StateData, request_id: str, *, time: float) -> RequestRow:
    """The live row; a blank one if the stream left out its arrival."""
    row = data.requests.get(request_id)
    if row is None:
        data.finished.pop(request_id, None)  # the name is used again
        row = data.requests[request_id] = RequestRow(request_id, arrival_time=time)
        data.since_attach.num_arrived += 1
    return row


def _note_arrival(data: StateData, info: RequestInfo) -> None:
    row = data.requests.get(info.request_id)
    if row is not None and row.is_live:  # a snapshot was quicker
        row.prompt = row.prompt or info.prompt
        return
    if row is not None:  # the name is used again while the old one's clean-up went unseen
        _retire(data, row)
    row = find_or_make_row(data, info.request_id, time=info.arrival_time)
    row.num_prompt_tokens = info.num_prompt_tokens
    row.max_tokens = info.max_tokens
    row.priority = info.priority
    row.prompt = info.prompt
    add_milestone(row, info.arrival_time, None, "queued", f"{plural(info.num_prompt_tokens, 'prompt token')}, up to {info.max_tokens} more")
    text = f"arrived with {plural(info.num_prompt_tokens, 'prompt token')}, up to {plural(info.max_tokens, 'token')} to generate"
    data.log.add(info.arrival_time, None, "arrived", info.request_id, text)


# ---------------------------------------------------------------------------------------------------- scheduling


def _note_preempted(data: StateData, event: StepEvent) -> None:
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
        row = find_or_make_row(data, req_id, time=event.time)
        if row.state == "preempted":
            continue  # between two steps, and a snapshot came before the step that tells the worker
        num_computed, row.num_computed_tokens = row.num_computed_tokens, 0
        row.recompute_until = max(row.recompute_until, num_computed)
        num_blocks = _release_blocks(data, row, step_id=event.step_id)
        row.state = "preempted"
        row.num_preemptions += 1
        data.since_attach.num_preemptions += 1
        add_milestone(row, event.time, event.step_id, "preempted", f"{why}; it gave {plural(num_blocks, 'block')}")
        text = f"preempted because {why}: {plural(num_blocks, 'block')} given back, {num_computed} computed tokens lost"
        data.log.add(event.time, event.step_id, "preempted", req_id, text)


def _note_scheduled(data: StateData, event: StepEvent) -> Shares:
    """Move the rows on; returns the shares in the order of the batch."""
    output, cached = event.output, event.output.scheduled_cached_reqs
    decoding = _fold_steady(data, event) if lists_agree(cached) else None
    others = _fold_cached(data, event) if decoding is None else []
    others += [_admit(data, new, event) for new in output.scheduled_new_reqs]
    if not output.scheduled_new_reqs and not cached.resumed_req_ids:
        return Shares(decoding, tuple(others))  # the common case: already in order
    shares = Shares(decoding, tuple(others))
    if all(map(eq, shares.request_ids, output.num_scheduled_tokens)) and len(shares) == len(output.num_scheduled_tokens):
        return shares
    by_id = {share.request_id: share for share in shares}
    return Shares(None, tuple(by_id[req_id] for req_id in output.num_scheduled_tokens if req_id in by_id))


def _fold_steady(data: StateData, event: StepEvent) -> DecodeShares | None:
    """`_fold_cached` where every request decodes one token; None, and nothing is changed: they do not all.

    It is the step that comes by far the most often, so requests are looked up and compared in C, and no share is made.
    """
    output, cached, step_id = event.output, event.output.scheduled_cached_reqs, event.step_id
    if cached.resumed_req_ids or output.scheduled_spec_decode_tokens:
        return None
    req_ids, starts = cached.req_ids, cached.num_computed_tokens
    found = list(map(data.requests.get, req_ids))
    counts = list(map(output.num_scheduled_tokens.get, req_ids))
    if counts.count(1) != len(counts):
        return None
    rows: list[RequestRow] = []
    for row, start in zip(found, starts, strict=True):
        if row is None or start < row.recompute_until or start < row.num_prompt_tokens or row.state == "waiting":
            return None
        rows.append(row)
    num_new_blocks: dict[str, int] = {}
    if cached.new_block_ids.count(None) != len(rows):
        for row, added in zip(rows, cached.new_block_ids, strict=True):
            if added:
                _give_blocks(data, row, added, replace=False)
                num_new_blocks[row.request_id] = len(added[0])
    for row, start in zip(rows, starts, strict=True):
        row.num_computed_tokens = start + 1
        row.last_step_id = step_id
        row.last_step_tokens = 1
        row.last_step_kind = "decode"
    tables = [row.table for row in rows]
    if data.has_windows:
        for row in rows:
            _leave_behind(data, row)
    return DecodeShares(req_ids, starts, tables, num_new_blocks, cached.num_output_tokens, output.structured_output_request_ids)


def _fold_cached(data: StateData, event: StepEvent) -> list[Share]:
    cached, step_id = event.output.scheduled_cached_reqs, event.step_id
    rows, num_scheduled, starts = data.requests, event.output.num_scheduled_tokens, cached.num_computed_tokens
    num_output, resumed = cached.num_output_tokens, cached.resumed_req_ids
    drafts, masked = event.output.scheduled_spec_decode_tokens, event.output.structured_output_request_ids
    if not lists_agree(cached):
        return []
    # The loop of every running request in every step: looked up once, and a share made without a Python frame of its own.
    find_row, scheduled, new_share = rows.get, num_scheduled.get, tuple.__new__
    shares: list[Share] = []
    keep = shares.append
    kind: ShareKind
    for req_id, added, start, num_known in zip(cached.req_ids, cached.new_block_ids, starts, num_output, strict=False):
        row = find_row(req_id)
        if row is None:
            row = find_or_make_row(data, req_id, time=event.time)
        is_resumed = req_id in resumed
        num_new_blocks = 0
        if is_resumed:
            _resume(data, row, event, len(shares))
            num_new_blocks = len(added[0]) if added else 0
        elif added is not None:
            _give_blocks(data, row, added, replace=False)
            num_new_blocks = len(added[0]) if added else 0
        num_tokens = scheduled(req_id, 0)
        end = start + num_tokens
        if start < row.recompute_until:
            kind = "resumed"
            if end >= row.recompute_until:
                add_milestone(row, event.time, step_id, "recomputed", f"up to token {row.recompute_until}")
        elif start < row.num_prompt_tokens:
            kind = "chunk"
            add_milestone(row, event.time, step_id, "chunk", f"tokens {start} to {end - 1} of {row.num_prompt_tokens}")
        else:
            kind = "decode"
        if row.state == "waiting":  # its admission was not seen
            row.state = "running"
        row.last_step_kind, row.num_computed_tokens, row.last_step_id, row.last_step_tokens = kind, end, step_id, num_tokens
        guesses = tuple(drafts[req_id]) if req_id in drafts else ()
        values = (req_id, kind, num_tokens, start, row.table, num_new_blocks, is_resumed, num_known, guesses, req_id in masked)
        keep(new_share(Share, values))
        if data.has_windows:
            _leave_behind(data, row, num_draft_tokens=len(guesses))
    return shares


def _resume(data: StateData, row: RequestRow, event: StepEvent, index: int) -> None:
    cached = event.output.scheduled_cached_reqs
    data.since_attach.num_resumed += 1
    row.state = "running"
    num_tokens = len(cached.all_token_ids.get(row.request_id, ())) or row.num_tokens
    added = cached.new_block_ids[index]
    _give_blocks(data, row, added or (), replace=True)
    start = cached.num_computed_tokens[index]
    text = f"{start} of {num_tokens} tokens found in the prefix cache, {plural(row.num_blocks, 'block')}"
    add_milestone(row, event.time, event.step_id, "resumed", text)
    data.log.add(event.time, event.step_id, "resumed", row.request_id, f"resumed after a preemption: {text}")


def _admit(data: StateData, new: NewRequestData, event: StepEvent) -> Share:
    row = find_or_make_row(data, new.req_id, time=event.time)
    num_prompt, start = len(new.prompt_token_ids), new.num_computed_tokens
    num_tokens = event.output.num_scheduled_tokens.get(new.req_id, 0)
    row.state = "running"
    row.num_prompt_tokens = num_prompt
    row.num_cached_tokens = start
    data.since_attach.num_cached_tokens += start
    row.num_computed_tokens = start + num_tokens
    row.sampling_params = new.sampling_params
    row.max_tokens = row.max_tokens or new.sampling_params.max_tokens or 0
    row.scheduled_time = event.schedule_start
    _note_queue_wait(data, event.schedule_start, event.schedule_start - row.arrival_time)
    _give_blocks(data, row, new.block_ids, replace=True)
    row.last_step_id, row.last_step_tokens = event.step_id, num_tokens
    kind = row.last_step_kind = "prefill" if start + num_tokens >= num_prompt else "chunk"
    text = f"{start} of {num_prompt} prompt tokens from the prefix cache, {num_tokens} scheduled, {plural(row.num_blocks, 'block')}"
    add_milestone(row, event.time, event.step_id, "scheduled", text)
    data.log.add(event.time, event.step_id, "admitted", new.req_id, f"admitted: {text}")
    needs_mask = new.req_id in event.output.structured_output_request_ids
    share = Share(new.req_id, kind, num_tokens, start, row.table, len(row.table), True, needs_mask=needs_mask)
    if data.has_windows:
        _leave_behind(data, row)
    return share


def _note_queue_wait(data: StateData, time: float, wait: float) -> None:
    data.queue_waits.add(time, max(0.0, wait))
    bucket = data.histories.at(time)
    bucket.queue_wait_sum += max(0.0, wait)
    bucket.queue_wait_count += 1


# ---------------------------------------------------------------------------------------------------- tokens


def _note_tokens(data: StateData, event: StepResultEvent) -> None:
    find_row, time, has_drafts = data.requests.get, event.time, event.num_draft_tokens > 0
    num_tokens = sum(event.num_new_tokens.values())
    gaps: dict[float, int] = {}  # time of the previous token -> tokens that followed it
    latest, count = -1.0, 0  # nearly all rows share one: counted before it goes into the table
    for req_id, num_new in event.num_new_tokens.items():
        row = find_row(req_id)
        if row is None or num_new == 0:
            continue
        last_time = row.last_token_time
        if last_time == latest:
            count += 1
        elif last_time is not None:
            gaps[latest] = gaps.get(latest, 0) + count
            latest, count = last_time, 1
        elif row.num_output_tokens == 0:
            _note_first_token(data, row, event)
        row.num_output_tokens += num_new
        if has_drafts:  # what was computed for rejected draft tokens does not count; no step behind this one is in flight
            row.num_computed_tokens = min(row.num_computed_tokens, row.num_tokens - 1)
            if data.has_windows:
                _leave_behind(data, row)
        row.last_token_time = time
    gaps[latest] = gaps.get(latest, 0) + count
    del gaps[-1.0]
    data.since_attach.num_output_tokens += num_tokens
    if not num_tokens:
        return
    data.rates.add(time, 0, 0, num_tokens)
    bucket = data.histories.at(time)
    bucket.decode_tokens += num_tokens
    for last_time, count in gaps.items():
        data.itls.add(time, time - last_time, count)
        bucket.itl_sum += (time - last_time) * count
        bucket.itl_count += count


def _note_first_token(data: StateData, row: RequestRow, event: StepResultEvent) -> None:
    row.first_token_time = event.time
    ttft = event.time - row.arrival_time
    add_milestone(row, event.time, event.step_id, "first_token", f"{ttft * 1e3:.1f} ms after it arrived")
    data.ttfts.add(event.time, ttft)
    bucket = data.histories.at(event.time)
    bucket.ttft_sum += ttft
    bucket.ttft_count += 1


# ---------------------------------------------------------------------------------------------------- the end


def _note_finished(data: StateData, info: FinishedInfo, *, time: float, step_id: int) -> None:
    """A request ended: its blocks return at once, the worker is told in the next step."""
    row = data.requests.get(info.request_id)
    if row is None or not row.is_live:
        _complete_reason(data, row, info)
        return
    row.finish_time = time
    row.finish_reason, row.stop_reason = info.finish_reason, info.stop_reason
    row.num_output_tokens = info.num_output_tokens
    row.state = "cleaning_up"
    _count_end(data, info)
    num_blocks = _release_blocks(data, row, step_id=step_id)
    returned = f"; {plural(num_blocks, 'block')} returned" if num_blocks else ""
    text = f"{end_words(info)} after {plural(info.num_output_tokens, 'token')}"
    add_milestone(row, time, step_id, "finished", text + returned)
    data.log.add(time, step_id, "aborted" if info.finish_reason == "abort" else "finished", info.request_id, text)
    if num_blocks:
        data.log.add(time, step_id, "freed", info.request_id, f"{plural(num_blocks, 'block')} let go of")
    if row.last_step_id == 0:  # never scheduled: the worker does not know it
        _retire(data, row)


def _count_end(data: StateData, info: FinishedInfo) -> None:
    data.since_attach.num_finished += 1
    data.since_attach.num_aborted += info.finish_reason == "abort"
    data.since_attach.num_errors += info.finish_reason == "error"


def _complete_reason(data: StateData, row: RequestRow | None, info: FinishedInfo) -> None:
    """The end was seen before, in a snapshot, and the reason comes now."""
    old = row or data.finished.get(info.request_id)
    if old is None or old.finish_reason is not None:
        return
    new = old.copy()  # a finished row may be shared with copies of the state
    new.finish_reason, new.stop_reason, new.num_output_tokens = info.finish_reason, info.stop_reason, info.num_output_tokens
    (data.requests if row is not None else data.finished)[info.request_id] = new
    data.since_attach.num_aborted += info.finish_reason == "abort"
    data.since_attach.num_errors += info.finish_reason == "error"


def _note_told(data: StateData, request_ids: Sequence[str], *, time: float, step_id: int) -> None:
    """A step that tells the worker to forget these was handed over."""
    for request_id in request_ids:
        row = data.requests.get(request_id)
        if row is not None and not row.is_live:
            row.told_in_step = step_id
            add_milestone(row, time, step_id, "told_worker", f"in finished_req_ids of step {step_id}")
            data.log.add(time, step_id, "told", request_id, f"leaves: step {step_id} tells the worker to forget it")


def _note_cleaned_up(data: StateData, *, time: float, step_id: int) -> None:
    """The worker has run a step, so it has forgotten whom that step, or one before, named."""
    gone = [row for row in data.requests.values() if row.told_in_step is not None and row.told_in_step <= step_id]
    for row in gone:
        add_milestone(row, time, step_id, "cleaned_up", f"step {step_id} came back")
        data.log.add(time, step_id, "cleaned_up", row.request_id, "cleaned up on the worker")
        _retire(data, row)


def note_unseen_end(data: StateData, row: RequestRow, *, time: float, step_id: int) -> None:
    """It is no longer there, and the stream did not say why (yet)."""
    _release_blocks(data, row, step_id=step_id)
    if row.is_live:
        row.finish_time = time
        data.since_attach.num_finished += 1
        add_milestone(row, time, step_id, "finished", "its end was not seen")
    _retire(data, row)


def _retire(data: StateData, row: RequestRow) -> None:
    """Move a row to the ring of finished ones."""
    row.state = "finished"
    data.requests.pop(row.request_id, None)
    data.finished.pop(row.request_id, None)
    data.finished[row.request_id] = row
    while len(data.finished) > data.limits.max_finished:
        del data.finished[next(iter(data.finished))]


# ---------------------------------------------------------------------------------------------------- blocks and words


def _release_blocks(data: StateData, row: RequestRow, *, step_id: int) -> int:
    """Take its blocks away; returns how many it had."""
    num_blocks = row.num_blocks
    for table in row.tables:
        data.blocks.remove_owner(row.request_id, table, step_id=step_id)
    row.block_ids, row.other_block_ids, row.table = [], [], ()
    return num_blocks


def _give_blocks(data: StateData, row: RequestRow, added: Sequence[list[int]], *, replace: bool) -> None:
    """More blocks for a request, a list for each KV-cache group; or other tables."""
    if replace and row.block_ids:
        _release_blocks(data, row, step_id=data.last_step_id)
    if len(added) > 1 and not row.other_block_ids:
        row.other_block_ids = [[] for _ in added[1:]]
    for group_id, (table, block_ids) in enumerate(zip(row.tables, added, strict=False)):
        table += block_ids
        data.blocks.add_owner(row.request_id, block_ids, group_id=group_id)
    row.table = tuple(row.block_ids)
    row.num_peak_blocks = max(row.num_peak_blocks, row.num_blocks)


def _leave_behind(data: StateData, row: RequestRow, *, num_draft_tokens: int = 0) -> None:
    """What windows have moved past is given back, as the scheduler does when a step is planned, and when guesses are settled."""
    block_size = data.block_size
    if not block_size:
        return
    for group, table in zip(data.groups, row.tables, strict=False):
        end = start = min(group.first_block_in_sight(row.num_computed_tokens - num_draft_tokens, block_size=block_size), len(table))
        while start and table[start - 1]:
            start -= 1
        if start < end:
            data.blocks.remove_owner(row.request_id, table[start:end], step_id=data.last_step_id)
            table[start:end] = [0] * (end - start)
            row.table = tuple(row.block_ids)


def add_milestone(row: RequestRow, time: float, step_id: int | None, kind: MilestoneKind, detail: str = "") -> None:
    if len(row.timeline) == row.timeline.maxlen:
        row.num_milestones_dropped += 1
    row.timeline.append(Milestone(time, step_id, kind, detail))
