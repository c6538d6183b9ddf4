"""Why a request waits: its place in the queue, what it needs, who holds it, and who must end first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aioengine.core.scheduler_output import AdmissionStop
from aioengine_tui.model.rows import RequestRow
from aioengine_tui.model.state import DashboardState

WaitCause = AdmissionStop | Literal["new", "paused"]
"""An `AdmissionStop`: where the latest step stopped. new: it arrived after that step. paused: the engine is, by its user."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A running request, and what its end would give back."""

    request_id: str
    num_blocks: int
    num_own_blocks: int  # those of them that nobody else holds
    num_tokens_left: int  # it ends after so many tokens at the latest


@dataclass(frozen=True, slots=True)
class WhyWaiting:
    """Why one request waits. The numbers are of the moment of the state."""

    request_id: str
    place: int  # in the queue; 1 is admitted next
    num_waiting: int
    cause: WaitCause
    before: tuple[str, ...]  # who is admitted before it, the next one first
    num_blocks_needed: int  # for the tokens it has; less if the prefix cache has some of them
    num_blocks_before: int  # that those before it need
    num_blocks_claimed: int  # that running requests take in the next step
    num_free_blocks: int
    num_running: int
    max_num_seqs: int | None  # None: the engine does not tell its settings
    holders: tuple[Holder, ...]  # who holds blocks, the most first
    must_end: tuple[str, ...]  # of the running ones, soonest to end first: as soon as these are gone there is room for it


def why_waiting(state: DashboardState, request_id: str) -> WhyWaiting | None:
    """None if no request of that name waits, or the engine does not say how large its blocks are."""
    queue = waiting_queue(state)
    place = next((place for place, row in enumerate(queue, 1) if row.request_id == request_id), None)
    block_size = state.block_size
    if place is None or block_size is None:
        return None
    row, before = queue[place - 1], queue[: place - 1]
    running = [other for other in state.requests.values() if other.state == "running"]
    needed = blocks_needed(row, block_size)
    num_before = sum(blocks_needed(other, block_size) for other in before)
    num_free = state.stats.num_free_blocks if state.stats is not None else 0
    claims = {other.request_id: _next_claim(state, other, block_size) for other in running}
    limit = state.config("scheduler", "max_num_seqs")
    max_num_seqs = limit if isinstance(limit, int) else None
    return WhyWaiting(
        request_id=request_id,
        place=place,
        num_waiting=len(queue),
        cause=_cause(state, row),
        before=tuple(other.request_id for other in before),
        num_blocks_needed=needed,
        num_blocks_before=num_before,
        num_blocks_claimed=sum(claims.values()),
        num_free_blocks=num_free,
        num_running=len(running),
        max_num_seqs=max_num_seqs,
        holders=tuple(sorted((_holder(state, other) for other in running), key=lambda holder: -holder.num_blocks)),
        must_end=_must_end(
            state, running, place=place, num_wanted=needed + num_before, num_free=num_free, claims=claims, limit=max_num_seqs
        ),
    )


def waiting_queue(state: DashboardState) -> list[RequestRow]:
    """Who waits, in the order of admission: the scheduler's own, by arrival, or by priority where the policy is that."""
    rows = [row for row in state.requests.values() if row.state in ("waiting", "preempted")]
    if state.config("scheduler", "policy") == "priority":
        rows.sort(key=lambda row: row.priority)  # stable: equals by arrival
    return rows


def blocks_needed(row: RequestRow, block_size: int) -> int:
    """The KV blocks that all its known tokens take. An admission wants room for all of them, not for the first chunk only."""
    return -(-row.num_tokens // block_size)


def _cause(state: DashboardState, row: RequestRow) -> WaitCause:
    if state.paused:
        return "paused"
    seen = state.waterfall.row(row.request_id)
    if state.admission_stop in (None, "queue_empty") or seen is None or (seen.first_step or 0) > state.last_step_id:
        return "new"
    return state.admission_stop or "new"


def _holder(state: DashboardState, row: RequestRow) -> Holder:
    own = sum(len(state.blocks.owners(block_id)) == 1 for block_id in row.block_ids)
    return Holder(row.request_id, row.num_blocks, own, tokens_left(row))


def tokens_left(row: RequestRow) -> int:
    """How many tokens a request may still generate; it may end sooner."""
    return max(0, row.max_tokens - row.num_output_tokens)


def _next_claim(state: DashboardState, row: RequestRow, block_size: int) -> int:
    """New blocks that a running request takes in the next step. Running requests are served before waiting ones."""
    budget = state.config("scheduler", "max_num_batched_tokens")
    num_missing = max(1, row.num_tokens - row.num_computed_tokens)
    num_next = min(num_missing, budget) if isinstance(budget, int) else num_missing
    return max(0, -(-(row.num_computed_tokens + num_next) // block_size) - row.num_blocks)


def _must_end(
    state: DashboardState,
    running: Sequence[RequestRow],
    *,
    place: int,
    num_wanted: int,
    num_free: int,
    claims: dict[str, int],
    limit: int | None,
) -> tuple[str, ...]:
    """The shortest beginning of `running`, soonest to end first, whose end gives the slots and blocks that are missing.

    All of them where even that is too little by these numbers (the prefix cache may then have what is missing).
    """
    released: Counter[int] = Counter()
    num_claimed, num_left = sum(claims.values()), len(running)
    ended: list[str] = []
    for row in sorted(running, key=tokens_left):
        has_slot = limit is None or num_left + place <= limit
        if has_slot and num_wanted + num_claimed <= num_free:
            break
        ended.append(row.request_id)
        num_left -= 1
        num_claimed -= claims[row.request_id]
        for block_id in row.block_ids:
            released[block_id] += 1
            num_free += released[block_id] == len(state.blocks.owners(block_id))
    return tuple(ended)
