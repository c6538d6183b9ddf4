"""The full state of an engine for observers that come late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from aioengine.core.block_hash import group_of, short_hash
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.step_event import EngineSnapshot, RequestSnapshot, StepEvent, StepResultEvent
from aioengine.printable import get_logger
from aioengine.request import Request

logger = get_logger(__name__)


class TextSource(Protocol):
    """Where observers' text comes from, if the user asked for text to be published. Called in the loop."""

    def take_new_text(self) -> dict[str, str]:
        """Request id -> what its text has grown by since the last call."""

    def text_of(self, request_id: str) -> tuple[str | None, str | None]:
        """The prompt and the output so far; None where there is none."""


@dataclass(slots=True)
class TokenTimes:
    """When a live request got its first tokens to compute, and its first sampled one: seconds of `time.perf_counter()`."""

    scheduled_time: float
    first_token_time: float | None = None


def build_snapshot(
    scheduler: Scheduler,
    *,
    in_flight: Iterable[SchedulerOutput],
    paused: bool,
    text_source: TextSource | None,
    times: Mapping[str, TokenTimes] = MappingProxyType({}),
    last_step: StepEvent | None = None,
    last_result: StepResultEvent | None = None,
) -> EngineSnapshot:
    """The state as it stands between two calls of the scheduler. Takes time proportional to everything alive and cached."""
    outputs = list(in_flight)
    told = {req_id: output.step_id for output in outputs for req_id in sorted(output.finished_req_ids)}
    kv = scheduler.kv_cache_manager
    pool = kv.block_pool
    cached = {block_id: block_hash for block_id, block_hash in enumerate(pool.block_hash) if block_hash is not None}
    return EngineSnapshot(
        step_id=scheduler.last_step_id,
        time=time.perf_counter(),
        stats=scheduler.make_stats(),
        requests=[_snapshot_request(request, text_source, times.get(request.request_id)) for request in scheduler.requests.values()],
        cached_block_ids=list(cached),
        cached_block_hashes=[short_hash(block_hash) for block_hash in cached.values()],
        lingering={req_id: told.get(req_id, 0) for req_id in sorted(scheduler.lingering_req_ids)},
        num_in_flight=len(outputs),
        paused=paused,
        cached_parent_hashes=[pool.short_parent_hash(block_id) for block_id in cached],
        cached_block_groups=[group_of(block_hash) for block_hash in cached.values()] if len(kv.groups) > 1 else [],
        free_block_ids=list(pool.free_block_queue),
        last_step=last_step,
        last_result=last_result,
    )


def _snapshot_request(request: Request, text_source: TextSource | None, times: TokenTimes | None) -> RequestSnapshot:
    prompt, text = None, None
    if text_source is not None:
        try:
            prompt, text = text_source.text_of(request.request_id)
        except Exception:  # what is wrong with one request's text takes nothing from the others
            logger.exception("the text of request %r is missing in a snapshot", request.request_id)
    return RequestSnapshot(
        request_id=request.request_id,
        status=request.status.name,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        max_tokens=request.max_tokens,
        arrival_time=request.arrival_time,
        num_preemptions=request.num_preemptions,
        priority=request.priority,
        block_ids=list(request.block_ids[0]),
        sampling_params=request.sampling_params,
        prompt=prompt,
        text=text,
        recompute_until=request.recompute_until,
        scheduled_time=times.scheduled_time if times is not None else None,
        first_token_time=times.first_token_time if times is not None else None,
        other_block_ids=[table.copy() for table in request.block_ids[1:]],
    )
