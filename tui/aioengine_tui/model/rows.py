"""One request as the dashboard knows it, and one step as it happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, overload

from aioengine.core.scheduler_output import AdmissionStop, SchedulerStats
from aioengine.outputs import FinishReason
from aioengine.sampling_params import SamplingParams

RequestState = Literal["waiting", "running", "preempted", "cleaning_up", "finished"]
"""cleaning_up: it ended, but the worker has not yet confirmed that it forgot it."""

ShareKind = Literal["prefill", "chunk", "decode", "resumed"]
"""What a request's tokens in a step are: prefill (the whole rest of a new prompt), chunk (a part of a prompt), decode (a
token that was sampled), resumed (computed once before, and lost to a preemption)."""

MilestoneKind = Literal[
    "queued", "scheduled", "chunk", "first_token", "preempted", "resumed", "recomputed", "finished", "told_worker", "cleaned_up"
]

Span = tuple[float, float]
"""Start and end, seconds of the engine's clock."""

_MAX_MILESTONES = 96
_MAX_TEXT = 20_000  # characters of output kept, the latest


@dataclass(frozen=True, slots=True)
class Milestone:
    """One point in the life of a request."""

    time: float  # seconds of the engine's clock
    step_id: int | None
    kind: MilestoneKind
    detail: str = ""


class Share(NamedTuple):
    """What one request got in one step, and what the worker is told of it."""

    request_id: str
    kind: ShareKind
    num_tokens: int
    start: int  # the position of the first of these tokens
    block_ids: tuple[int, ...] = ()  # its whole block table in the step, of the first KV-cache group
    num_new_blocks: int = 0  # the last ones of them: the frame's new_block_ids
    replaces_table: bool = False  # it is new or resumed: the frame's blocks are the table; otherwise they are appended
    num_output_tokens: int = 0  # known ones and those still being sampled, as the frame has it; 0 for a new request
    draft_token_ids: tuple[int, ...] = ()  # guesses that the step checks, counted in num_tokens; HIDDEN_TOKEN_ID: it did not travel
    needs_mask: bool = False  # it samples with a grammar's mask

    @property
    def end(self) -> int:
        """The position behind the last of these tokens."""
        return self.start + self.num_tokens

    @property
    def new_block_ids(self) -> tuple[int, ...]:
        """Of the frame."""
        return self.block_ids[len(self.block_ids) - self.num_new_blocks :]

    @property
    def blocks_before(self) -> tuple[int, ...]:
        """Its table before the step, as far as it is kept."""
        return () if self.replaces_table else self.block_ids[: len(self.block_ids) - self.num_new_blocks]


class DecodeShares(NamedTuple):
    """The shares of requests that decode one token each, in columns: most steps have no others, and few of them are looked at."""

    request_ids: Sequence[str]
    starts: Sequence[int]
    tables: Sequence[tuple[int, ...]]
    num_new_blocks: dict[str, int]  # only of those that got some
    num_output_tokens: Sequence[int]
    masked: frozenset[str]  # request ids

    def make(self) -> Iterator[Share]:
        new_blocks, masked = self.num_new_blocks, self.masked
        for req_id, start, table, num_output in zip(*self[:3], self.num_output_tokens, strict=True):
            yield Share(
                req_id, "decode", 1, start, table, new_blocks.get(req_id, 0), num_output_tokens=num_output, needs_mask=req_id in masked
            )


class Shares(Sequence[Share]):
    """The shares of a step in the order of the batch: those that decode, kept in columns, and others behind them.

    A share is made when it is asked for; to whoever reads it this is a tuple of shares. Never changes.
    """

    __slots__ = ("_made", "decoding", "others")

    def __init__(self, decoding: DecodeShares | None, others: tuple[Share, ...] = ()) -> None:
        self.decoding = decoding
        self.others = others
        self._made: tuple[Share, ...] | None = others if decoding is None else None

    @property
    def all(self) -> tuple[Share, ...]:
        if self._made is None:
            assert self.decoding is not None, "else they are made"
            self._made = (*self.decoding.make(), *self.others)
        return self._made

    @property
    def request_ids(self) -> Iterator[str]:
        """Without making the shares."""
        return chain(self.decoding.request_ids if self.decoding is not None else (), (share.request_id for share in self.others))

    def __len__(self) -> int:
        return len(self.others) + (len(self.decoding.request_ids) if self.decoding is not None else 0)

    @overload
    def __getitem__(self, index: int) -> Share: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Share, ...]: ...
    def __getitem__(self, index: int | slice) -> Share | tuple[Share, ...]:
        return self.all[index]

    def __iter__(self) -> Iterator[Share]:
        return iter(self.all)

    def __eq__(self, other: object) -> bool:
        return self.all == (other.all if isinstance(other, Shares) else other)

    def __hash__(self) -> int:
        return hash(self.all)

    def __repr__(self) -> str:
        return repr(self.all)


@dataclass(frozen=True, slots=True)
class Lanes:
    """When the phases of a step ran; None while unknown (the step is in flight, or the executor reports no times)."""

    schedule: Span
    execute: Span | None = None
    sample: Span | None = None
    update: Span | None = None
    grammar: Span | None = None  # when the host computed the masks; None: the step needed none, or is in flight


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. A record is replaced, never changed, when its result comes."""

    step_id: int
    time: float  # when it was scheduled
    token_budget: int
    num_tokens: int  # scheduled in all
    admission_stop: AdmissionStop
    shares: Shares  # in the order of the batch
    new_ids: tuple[str, ...]
    cached_ids: tuple[str, ...]  # went on from an earlier step; without the resumed ones
    resumed_ids: tuple[str, ...]
    preempted_ids: tuple[str, ...]
    finished_ids: tuple[str, ...]  # the worker is told to forget these
    allocated_ids: tuple[int, ...]  # blocks, since the event before
    freed_ids: tuple[int, ...]
    evicted_ids: tuple[int, ...]
    queue_depth: int  # steps in flight when it was scheduled, itself included
    stats: SchedulerStats
    lanes: Lanes
    num_new_tokens: int | None = None  # sampled and accepted; None while in flight
    ended_ids: tuple[str, ...] = ()  # requests whose end came with the result
    result_time: float | None = None
    num_draft_tokens: int = 0  # draft tokens that it checked, of num_tokens; known with the result
    num_accepted_tokens: int = 0  # those that were right
    zeroed_ids: tuple[int, ...] = ()  # new_block_ids_to_zero: blocks that the worker zeroes before use
    stopped_req_id: str | None = None  # the waiting request at which admission stopped; None: none waited, or an old recording
    num_blocks_needed: int = 0  # free blocks that it would take; 0 but for the admission stop "no_blocks"
    sampled: tuple[int, ...] = ()  # tokens that each of `shares` got, in their order; () while in flight

    @property
    def num_allocated(self) -> int:
        """Blocks."""
        return len(self.allocated_ids)

    @property
    def num_freed(self) -> int:
        return len(self.freed_ids)

    @property
    def num_evicted(self) -> int:
        return len(self.evicted_ids)

    @property
    def in_flight(self) -> bool:
        return self.result_time is None

    @property
    def is_cleanup_only(self) -> bool:
        """No token is computed; the step only tells the worker whom to forget."""
        return self.num_tokens == 0

    @property
    def duration(self) -> float | None:
        """Seconds from the start of schedule to the end of update; None while in flight."""
        return None if self.lanes.update is None else self.lanes.update[1] - self.lanes.schedule[0]


class RequestRow:
    """One request. Owned by a `StateData`; only the folds write to it."""

    __slots__ = (
        "arrival_time",
        "block_ids",
        "finish_reason",
        "finish_time",
        "first_token_time",
        "last_step_id",
        "last_step_kind",
        "last_step_tokens",
        "last_token_time",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_milestones_dropped",
        "num_output_tokens",
        "num_peak_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "other_block_ids",
        "priority",
        "prompt",
        "recompute_until",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "state",
        "stop_reason",
        "table",
        "text",
        "timeline",
        "told_in_step",
    )

    def __init__(self, request_id: str, *, arrival_time: float, num_prompt_tokens: int = 0, max_tokens: int = 0, priority: int = 0) -> None:
        self.request_id = request_id
        self.state: RequestState = "waiting"
        self.arrival_time = arrival_time
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.num_cached_tokens = 0  # of the prompt, served by the prefix cache when it was first scheduled
        self.num_computed_tokens = 0  # steps in flight included; back to 0 at a preemption
        self.num_output_tokens = 0
        self.num_preemptions = 0
        self.recompute_until = 0  # positions below this were computed before a preemption; never falls
        # Its block table of the first KV-cache group, and those of the others; empty when it holds none. 0: a window left it behind.
        self.block_ids: list[int] = []
        self.other_block_ids: list[list[int]] = []
        self.table: tuple[int, ...] = ()  # the first one, for the shares of steps
        self.num_peak_blocks = 0
        # Its share in the latest step it was part of; see DashboardState.share_of() for the present step.
        self.last_step_id = 0  # 0: never scheduled
        self.last_step_tokens = 0
        self.last_step_kind: ShareKind | None = None
        self.scheduled_time: float | None = None  # when its first step began; None: it has not run, or that was not told
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finish_time: float | None = None
        self.finish_reason: FinishReason | None = None  # None on a finished row: its end was not seen
        self.stop_reason: int | str | None = None
        self.told_in_step: int | None = None  # the step whose finished_req_ids holds it
        self.sampling_params: SamplingParams | None = None
        self.prompt: str | None = None  # only where the engine publishes text
        self.text: str | None = None  # the output so far, cut at the front when long; only where text is published
        self.timeline: deque[Milestone] = deque(maxlen=_MAX_MILESTONES)
        self.num_milestones_dropped = 0  # the oldest ones, of a long life

    @property
    def is_live(self) -> bool:
        return self.state in ("waiting", "running", "preempted")

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def tables(self) -> list[list[int]]:
        """One for each KV-cache group."""
        return [self.block_ids, *self.other_block_ids]

    @property
    def held_block_ids(self) -> list[int]:
        """Of all groups, without those that a window has left behind."""
        return [block_id for table in self.tables for block_id in table if block_id]

    @property
    def num_blocks(self) -> int:
        return sum(len(table) - table.count(0) for table in self.tables)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before it, or if it was not seen."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def queue_wait(self) -> float | None:
        """Seconds from arrival to its first step; None before that, or if it was not told."""
        return None if self.scheduled_time is None else max(0.0, self.scheduled_time - self.arrival_time)

    def age(self, now: float) -> float:
        """Seconds since arrival; of an ended request until its end."""
        return max(0.0, (self.finish_time if self.finish_time is not None else now) - self.arrival_time)

    @property
    def rate(self) -> float | None:
        """Output tokens a second between its first and its latest token; None with fewer than two."""
        if self.first_token_time is None or self.last_token_time is None or self.last_token_time <= self.first_token_time:
            return None
        return (self.num_output_tokens - 1) / (self.last_token_time - self.first_token_time)

    def add_text(self, text: str) -> None:
        self.text = ((self.text or "") + text)[-_MAX_TEXT:]

    def copy(self) -> RequestRow:
        other = object.__new__(RequestRow)
        for name in RequestRow.__slots__:
            setattr(other, name, getattr(self, name))
        other.block_ids = self.block_ids.copy()
        other.other_block_ids = [table.copy() for table in self.other_block_ids]
        other.timeline = self.timeline.copy()
        return other
