"""Why a request waits: its place in the queue, what it needs, who holds it, and who must end first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aioengine.kv_cache_groups import num_blocks_of_request
from aioengine_tui.model.rows import RequestRow
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waiting import Wait, WaitReason


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
    cause: WaitReason
    before: tuple[str, ...]  # who is admitted before it, the next one first
    num_blocks_needed: int  # for the tokens it has; less if the prefix cache has some of them
    num_blocks_before: int  # that those before it need
    num_blocks_claimed: int  # that running requests take in the next step
    num_free_blocks: int
    num_running: int
    max_num_seqs: int | None  # None: the engine does not tell its settings
    holders: tuple[Holder, ...]  # who holds blocks, the most first
    must_end: tuple[str, ...]  # of the running ones, soonest to end first: as soon as these are gone there is room for it
    num_before_must_end: int  # of those before it, when all that run are too few


def why_waiting(state: DashboardState, request_id: str) -> WhyWaiting | None:
    """None if no request of that name waits, or the engine does not say how large its blocks are."""
    waits = state.waits()
    block_size = state.block_size
    place = next((wait.position for row, wait in waits if row.request_id == request_id), None)
    if place is None or block_size is None:
        return None
    needed = {row.request_id: _blocks_needed(state, row, wait, block_size) for row, wait in waits[:place]}
    (row, wait), before = waits[place - 1], [row for row, _ in waits[: place - 1]]
    running = [other for other in state.requests.values() if other.state == "running"]
    step = _NextStep(state, running, [*before, row], needed=needed, block_size=block_size)
    must_end, num_before_must_end = step.who_must_end()
    return WhyWaiting(
        request_id=request_id,
        place=place,
        num_waiting=wait.num_waiting,
        cause=wait.reason,
        before=tuple(other.request_id for other in before),
        num_blocks_needed=needed[request_id],
        num_blocks_before=sum(needed[other.request_id] for other in before),
        num_blocks_claimed=sum(step.claim(other, step.budget)[1] for other in running),
        num_free_blocks=step.num_free,
        num_running=len(running),
        max_num_seqs=setting(state, "max_num_seqs"),
        holders=tuple(sorted((_holder(state, other) for other in running), key=lambda holder: -holder.num_blocks)),
        must_end=must_end,
        num_before_must_end=num_before_must_end,
    )


def _blocks_needed(state: DashboardState, row: RequestRow, wait: Wait, block_size: int) -> int:
    """The KV blocks that all its known tokens take. An admission wants room for all of them, not for the first chunk only.

    Of the one at which admission stopped the scheduler says it, less what the prefix cache has.
    """
    if wait.is_stopped and wait.num_blocks_needed is not None:
        return wait.num_blocks_needed
    return num_blocks_of_request(
        state.groups, row.num_tokens, block_size=block_size, max_step_tokens=setting(state, "max_num_batched_tokens") or row.num_tokens
    )


def _holder(state: DashboardState, row: RequestRow) -> Holder:
    own = sum(len(state.blocks.owners(block_id)) == 1 for block_id in row.held_block_ids)
    return Holder(row.request_id, row.num_blocks, own, tokens_left(row))


def tokens_left(row: RequestRow) -> int:
    """How many tokens a request may still generate; it may end sooner."""
    return max(0, row.max_tokens - row.num_output_tokens)


class _NextStep:
    """What the scheduler would do in its next step, as far as it can be known here, if some requests had ended before it."""

    def __init__(
        self, state: DashboardState, running: Sequence[RequestRow], queue: Sequence[RequestRow], *, needed: dict[str, int], block_size: int
    ) -> None:
        self.state = state
        self.running = running
        self.queue = queue  # up to the request that is asked about
        self.needed = needed  # blocks of each of the queue
        self.block_size = block_size
        self.soonest = sorted(running, key=tokens_left)
        self.num_free = state.stats.num_free_blocks if state.stats is not None else 0
        self.max_num_seqs = setting(state, "max_num_seqs") or len(running) + len(queue)
        self.budget = setting(state, "max_num_batched_tokens") or 1 << 30
        self.threshold = setting(state, "long_prefill_token_threshold") or 1 << 30
        self.splits_prompts = state.config("scheduler", "enable_chunked_prefill") is not False

    def claim(self, row: RequestRow, budget: int) -> tuple[int, int]:
        """Tokens and new blocks of a running request. Running requests are served before waiting ones."""
        num_tokens = min(max(1, row.num_tokens - row.num_computed_tokens), budget, self.threshold)
        num_new_blocks = -(-(row.num_computed_tokens + num_tokens) // self.block_size) - len(row.block_ids)
        return num_tokens, max(0, num_new_blocks) * len(self.state.groups)

    def admits_last(self, num_ended: int, num_gone: int) -> bool:
        """Whether there is a slot and blocks for the last of the queue.

        num_ended: of the running ones, soonest first. num_gone: of the queue, the first ones: they came and went before.
        Where the token budget ends first it is a later step that goes on, with whole prompts in their blocks by then.
        """
        ended = {row.request_id for row in self.soonest[:num_ended]}
        free = self.num_free + self._num_released(num_ended)
        budget, num_running = self.budget, len(self.running) - num_ended
        for row in self.running:
            if row.request_id in ended:
                continue
            num_tokens, num_blocks = self.claim(row, budget)
            if num_blocks > free:
                return False  # it has to preempt, and then admits nobody
            budget, free = budget - num_tokens, free - num_blocks
        for row in self.queue[num_gone:]:
            num_blocks = self.needed[row.request_id]
            if num_running >= self.max_num_seqs or num_blocks > free:
                return False
            stops = budget <= 0 or (not self.splits_prompts and row.num_tokens > budget)
            num_tokens = row.num_tokens if stops else min(row.num_tokens, budget, self.threshold)
            budget = 0 if stops else budget - num_tokens
            free -= min(num_blocks, -(-num_tokens // self.block_size) * len(self.state.groups))
            num_running += 1
        return True

    def _num_released(self, num_ended: int) -> int:
        released: Counter[int] = Counter()
        for row in self.soonest[:num_ended]:
            released.update(row.held_block_ids)
        return sum(count == len(self.state.blocks.owners(block_id)) for block_id, count in released.items())

    def who_must_end(self) -> tuple[tuple[str, ...], int]:
        """The fewest of the running ones, soonest to end first, and how many of those before it in the queue besides."""
        num_ended = _first(len(self.running), lambda count: self.admits_last(count, 0))
        num_gone = 0
        if num_ended == len(self.running) and not self.admits_last(num_ended, 0):
            num_gone = _first(len(self.queue) - 1, lambda count: self.admits_last(num_ended, count))
        return tuple(row.request_id for row in self.soonest[:num_ended]), num_gone


def _first(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least number from 0 to `most` that is enough, `most` if none is; what is more than enough is enough too."""
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def setting(state: DashboardState, name: str) -> int | None:
    """A number among the scheduler's settings; None if the engine does not tell it."""
    value = state.config("scheduler", name)
    return value if isinstance(value, int) else None
