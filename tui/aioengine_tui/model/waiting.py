"""Who waits, in which order, and for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from aioengine.core.scheduler_output import AdmissionStop, SchedulerStats
from aioengine_tui.model.rows import RequestRow, StepRecord

WaitReason = AdmissionStop | Literal["paused", "new", "unknown"]
"""Why a request waits: what stopped the admission of the latest step; paused: the engine is, by its user; new: it came after the
latest step, so no step has looked at it; unknown: no step has been seen."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request waits, as of the latest step."""

    position: int  # in the order of admission; 1: it is next
    num_waiting: int
    reason: WaitReason
    is_stopped: bool  # admission stopped at this very request; the others wait behind it
    num_blocks_needed: int | None  # free blocks that the request at which admission stopped would take; None: it lacks none
    num_free_blocks: int


def admission_order(rows: Iterable[RequestRow], *, policy: str) -> list[RequestRow]:
    """The waiting and preempted ones of `rows` (by arrival), the next one first, as the scheduler's queue has them."""
    waiting = [row for row in rows if row.state in ("waiting", "preempted")]
    return sorted(waiting, key=lambda row: row.priority) if policy == "priority" else waiting  # a sort keeps the order of equals


def explain_waits(queue: list[RequestRow], *, step: StepRecord | None, stats: SchedulerStats | None, paused: bool) -> list[Wait]:
    """Why each of the waiting requests waits, in their order."""
    return [
        _explain_wait(row, position, num_waiting=len(queue), step=step, stats=stats, paused=paused) for position, row in enumerate(queue, 1)
    ]


def _explain_wait(
    row: RequestRow, position: int, *, num_waiting: int, step: StepRecord | None, stats: SchedulerStats | None, paused: bool
) -> Wait:
    stopped = step is not None and step.stopped_req_id == row.request_id
    reason: WaitReason
    if paused:
        reason = "paused"
    elif step is None:
        reason = "unknown"
    elif step.admission_stop == "queue_empty" or (row.state == "waiting" and row.arrival_time > step.time):
        reason = "new"
    else:
        reason = step.admission_stop
    return Wait(
        position=position,
        num_waiting=num_waiting,
        reason=reason,
        is_stopped=stopped,
        num_blocks_needed=step.num_blocks_needed if step is not None and step.num_blocks_needed else None,
        num_free_blocks=stats.num_free_blocks if stats is not None else 0,
    )
