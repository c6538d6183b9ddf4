"""One line for each step output or event, for the log of a failing step. Prompts and other token ids are left out."""

from __future__ import annotations

from aioengine.core.scheduler_output import NewRequestData, SchedulerOutput
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent


def describe_output(output: SchedulerOutput) -> str:
    """Who runs, from where, how many tokens, in which blocks; prompts and histories as lengths."""
    cached = output.scheduled_cached_reqs
    parts = [
        f"step {output.step_id}: {output.total_num_scheduled_tokens} tokens",
        *(_describe_new(new, output) for new in output.scheduled_new_reqs),
        *(_describe_cached(index, output) for index in range(len(cached.req_ids))),
    ]
    for name in ("finished_req_ids", "preempted_req_ids", "new_block_ids_to_zero"):
        ids = getattr(output, name)
        parts += [f"{name} {sorted(ids)}"] if ids else []
    return "; ".join(parts)


def _describe_new(new: NewRequestData, output: SchedulerOutput) -> str:
    where = _range(new.num_computed_tokens, output, new.req_id)
    return f"new {new.req_id!r} (prompt {len(new.prompt_token_ids)} tokens, {where}, blocks {list(new.block_ids)}, {new.sampling_params})"


def _describe_cached(index: int, output: SchedulerOutput) -> str:
    cached = output.scheduled_cached_reqs
    req_id = cached.req_ids[index]
    verb = "resumed" if req_id in cached.resumed_req_ids else "cached"
    history = f", history {len(cached.all_token_ids[req_id])} tokens" if req_id in cached.all_token_ids else ""
    return (
        f"{verb} {req_id!r} ({_range(cached.num_computed_tokens[index], output, req_id)}, "
        f"{cached.num_output_tokens[index]} output tokens{history}, new blocks {cached.new_block_ids[index]})"
    )


def describe_event(event: Event) -> str:
    stats = event.stats
    gauges = (
        f"{stats.num_running_reqs} running, {stats.num_waiting_reqs} waiting, {stats.num_free_blocks}/{stats.num_total_blocks} blocks free"
    )
    if isinstance(event, EngineSnapshot):
        return f"{event.time:.6f} snapshot after step {event.step_id} [{gauges}]"
    ended = [(info.request_id, info.finish_reason, info.num_output_tokens) for info in event.finished]
    changes = event.block_changes
    common = (
        f"[{gauges}, {event.queue_depth} in flight] finished {ended}, "
        f"blocks +{len(changes.allocated)} -{len(changes.freed)} evicted {len(changes.evicted)}"
    )
    if isinstance(event, StepEvent):
        added = [(info.request_id, info.num_prompt_tokens, info.max_tokens) for info in event.added]
        return f"{event.time:.6f} scheduled {describe_output(event.output)} {common}, added {added}, stopped by {event.admission_stop}"
    return f"{event.time:.6f} result of step {event.step_id}: new tokens {event.num_new_tokens} {common}"


def _range(start: int, output: SchedulerOutput, req_id: str) -> str:
    return f"positions {start}..{start + output.num_scheduled_tokens[req_id] - 1}"
