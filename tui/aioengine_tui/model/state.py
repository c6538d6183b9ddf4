"""`DashboardState`: everything the dashboard shows, folded from the event stream without drawing anything.

    state = DashboardState()
    async for item in source:      # any StepSource: an engine in this process, a socket, a recording
        state.apply(item)
    state.tick(source.now())       # on the screen's timer: lets rates fall to zero when no events come
    gauges = state.gauges()

`apply()` depends on nothing but the items, so the same items give the same state; reading never changes it. All times
are seconds of the engine's `time.perf_counter()`. Memory is bounded whatever the length of the run.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aioengine.core.scheduler_output import AdmissionStop, SchedulerStats
from aioengine.events.sources.base import CopyWanted, Restored, SourceStatus, StreamItem
from aioengine.events.wire import WireHeader
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine_tui.model.blocks import BLOCK_STATES, BlockInfo, BlockMap, BlockState, PrefixNode
from aioengine_tui.model.fold import fold
from aioengine_tui.model.log import LOG_KINDS, LogBook, LogKind, LogLine, plural
from aioengine_tui.model.metrics import HISTORY_LENGTH, SERIES, Series
from aioengine_tui.model.rows import Lanes, Milestone, RequestRow, RequestState, Share, ShareKind, StepRecord
from aioengine_tui.model.state_data import GapNote, Limits, SinceAttach, StateData, Totals, read_totals
from aioengine_tui.model.waiting import Wait, WaitReason, admission_order, explain_waits
from aioengine_tui.model.waterfall import Waterfall

__all__ = [
    "BLOCK_STATES",
    "LOG_KINDS",
    "SERIES",
    "BlockInfo",
    "BlockMap",
    "BlockState",
    "DashboardState",
    "GapNote",
    "Gauges",
    "Lanes",
    "LogBook",
    "LogKind",
    "LogLine",
    "Milestone",
    "PrefixNode",
    "RequestRow",
    "RequestState",
    "Series",
    "Share",
    "ShareKind",
    "SinceAttach",
    "StepRecord",
    "Totals",
    "Wait",
    "WaitReason",
]

GAP_SHOWN_S = 60.0
"""How long the screen speaks of events that were missed."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The numbers of the overview at one moment. None: nothing was measured."""

    now: float
    uptime: float | None  # seconds since the engine started, if the header is known; it stops when the engine is gone
    steps_per_s: float  # this and the other rates: over the last 5 seconds, or since this viewer attached
    prefill_tokens_per_s: float  # of prompts; what preemptions make necessary again is in Totals.num_recomputed_tokens
    decode_tokens_per_s: float  # sampled and accepted
    num_running: int
    num_waiting: int  # without the preempted ones
    num_preempted: int
    num_cleaning_up: int
    kv_cache_usage: float  # 0..1
    num_used_blocks: int
    num_free_blocks: int  # cached ones included
    num_cached_blocks: int  # their content can be found, owned or not
    num_free_cached_blocks: int  # free ones whose content can be found
    num_empty_blocks: int  # free ones that cache nothing
    num_shared_blocks: int
    num_total_blocks: int
    prefix_hit_rate: float | None  # 0..1, of the tokens that the last 1000 requests looked up
    acceptance_rate: float | None  # 0..1, of all draft tokens that were checked since the engine started
    num_draft_tokens: int  # those draft tokens
    ttft_p50: float | None  # seconds, of the last minute
    ttft_p95: float | None
    ttft_p99: float | None
    queue_wait_p50: float | None  # seconds from arrival to the first step, of those admitted in the last minute
    queue_wait_p95: float | None
    queue_wait_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    overlap_efficiency: float | None  # 0..1: share of schedule and update time during which the worker computed
    num_in_flight: int  # steps
    admission_stop: AdmissionStop | None  # of the latest step
    paused: bool  # the engine, by its user; not the view
    stale: bool
    num_dropped: int  # events that this viewer lost since it attached
    num_gaps: int  # since it attached


class DashboardState:
    """Reads what has been folded: see the module's text. Only `apply()` and `tick()` change it."""

    __slots__ = ("data",)

    def __init__(self, *, max_steps: int = 120, max_finished: int = 512, max_log_lines: int = 20_000) -> None:
        self.data = StateData.create(Limits(max_steps=max_steps, max_finished=max_finished, max_log_lines=max_log_lines))

    # ------------------------------------------------------------------ folding
    def apply(self, item: StreamItem) -> None:
        """Take in one item of the stream. Never raises because of what a lossy stream left out."""
        match item:
            case Restored():
                self._become(item.state.data)
            case CopyWanted():
                item.answer(self.copy())
            case WireHeader() if self.header is not None and item.perf_counter != self.header.perf_counter:
                # Another engine answers at this address: nothing of the old one is true any more.
                log = self.log
                self._become(StateData.create(self.data.limits))
                self.data.log = log
                log.add(item.perf_counter, None, "stream", None, "another engine answers: starting over")
                fold(self.data, item)
            case _:
                fold(self.data, item)

    def tick(self, now: float) -> None:
        """Let the engine's clock move on without events. It never goes back."""
        self.data.now = max(self.data.now, now)

    def _become(self, data: StateData) -> None:
        """Go on from other data; how the stream stands is known here only."""
        self.data = dataclasses.replace(data, status=self.status)

    def copy(self) -> DashboardState:
        """An independent state, for checkpoints of a replay and for a frozen view."""
        other = object.__new__(DashboardState)
        other.data = self.data.copy()
        return other

    # ------------------------------------------------------------------ what was folded
    @property
    def header(self) -> WireHeader | None:
        return self.data.header

    @property
    def status(self) -> SourceStatus:
        return self.data.status

    @property
    def stats(self) -> SchedulerStats | None:
        return self.data.stats

    @property
    def now(self) -> float:
        """The engine's clock as far as known: the latest event, or tick()."""
        return self.data.now

    @property
    def last_event_time(self) -> float | None:
        return self.data.last_event_time

    @property
    def last_step_id(self) -> int:
        """The id of the step that was scheduled last; 0: none was seen."""
        return self.data.last_step_id

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and whose tokens are not back yet."""
        return self.data.num_in_flight

    @property
    def paused(self) -> bool:
        """Whether the user has paused the engine."""
        return self.data.paused

    @property
    def admission_stop(self) -> AdmissionStop | None:
        """Why the latest step admitted no further request; None before the first step."""
        return self.data.admission_stop

    @property
    def requests(self) -> dict[str, RequestRow]:
        """Live ones and those being cleaned up, by arrival."""
        return self.data.requests

    @property
    def finished(self) -> dict[str, RequestRow]:
        """The latest that ended, oldest first."""
        return self.data.finished

    @property
    def steps(self) -> deque[StepRecord]:
        """Oldest first."""
        return self.data.steps

    @property
    def blocks(self) -> BlockMap:
        return self.data.blocks

    @property
    def waterfall(self) -> Waterfall:
        """What every request did in the latest steps."""
        return self.data.waterfall

    @property
    def log(self) -> LogBook:
        return self.data.log

    @property
    def totals(self) -> Totals:
        """The engine's own counts; of an older engine this viewer's, and `origin` says so."""
        return read_totals(self.data)

    @property
    def since_attach(self) -> SinceAttach:
        """What this viewer saw itself."""
        return self.data.since_attach

    @property
    def attach_time(self) -> float | None:
        """When this viewer's knowledge begins, on the engine's clock; None: nothing has come."""
        return self.data.attach_time

    @property
    def num_events(self) -> int:
        return self.data.num_events

    @property
    def num_dropped(self) -> int:
        """Events lost on the way here, as far as they can be counted."""
        return self.data.num_dropped

    @property
    def num_gaps(self) -> int:
        return self.data.num_gaps

    @property
    def last_gap(self) -> GapNote | None:
        """The latest events that were missed."""
        return self.data.last_gap

    def gap_words(self) -> str | None:
        """What to say of missed events: "2 gaps, 31 events lost, 12 s ago"; None: none, or the last is over a minute ago."""
        gap = self.last_gap
        if gap is None or (self.now - gap.time > GAP_SHOWN_S and not self.out_of_sync):
            return None
        lost = f", {plural(self.num_dropped, 'event')} lost" if self.num_dropped else ""
        return f"{plural(self.num_gaps, 'gap')}{lost}, {max(0.0, self.now - gap.time):.0f} s ago"

    @property
    def out_of_sync(self) -> bool:
        """Events are missing and no snapshot has come yet."""
        return self.data.out_of_sync

    # ------------------------------------------------------------------ reading
    @property
    def model(self) -> str:
        return self.header.model if self.header is not None else ""

    def config(self, section: str, name: str) -> Any:
        """A resolved setting of the engine, such as ("cache", "block_size"); section "" for the top level; None if unknown."""
        return self.data.config(section, name)

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block."""
        return self.data.block_size

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups."""
        return self.data.groups

    @property
    def is_stale(self) -> bool:
        """What is shown may not be the engine's present state: events are missing, or the engine cannot be reached."""
        return self.out_of_sync or self.status.state in ("lost", "connecting") or (self.status.state == "ended" and bool(self.requests))

    @property
    def current(self) -> StepRecord | None:
        """The step that was scheduled last."""
        return self.steps[-1] if self.steps else None

    def step(self, step_id: int) -> StepRecord | None:
        """A step that is still kept."""
        if not self.steps:
            return None
        index = len(self.steps) - 1 - (self.steps[-1].step_id - step_id)
        if 0 <= index < len(self.steps) and self.steps[index].step_id == step_id:
            return self.steps[index]
        return next((record for record in self.steps if record.step_id == step_id), None)

    def row(self, request_id: str) -> RequestRow | None:
        """A request, live or among the latest finished ones."""
        return self.requests.get(request_id) or self.finished.get(request_id)

    def rows(self, *, finished: bool = True) -> Iterator[RequestRow]:
        """Live ones by arrival, then, newest first, the finished ones."""
        yield from self.requests.values()
        if finished:
            yield from reversed(self.finished.values())

    def queue(self) -> list[RequestRow]:
        """The waiting and preempted requests in the order in which they will be admitted."""
        return admission_order(self.requests.values(), policy=str(self.config("scheduler", "policy") or "fcfs"))

    def wait_of(self, row: RequestRow) -> Wait | None:
        """Why a request waits; None if it does not. For all of them `waits()` is quicker."""
        return next((wait for waiting, wait in self.waits() if waiting is row), None)

    def waits(self) -> list[tuple[RequestRow, Wait]]:
        """The queue, and why each of it waits."""
        queue = self.queue()
        return list(zip(queue, explain_waits(queue, step=self.current, stats=self.stats, paused=self.paused), strict=True))

    def unix_time(self, time: float) -> float | None:
        """The date of a moment of the engine's clock, in seconds since 1970; None without a header."""
        header = self.header
        return None if header is None else header.unix_time + (time - header.perf_counter)

    @property
    def uptime(self) -> float | None:
        """Seconds since the engine started; of one that ended, or cannot be reached, until its last event. None: not known."""
        if self.header is None:
            return None
        is_gone = self.status.state in ("ended", "lost") and self.last_event_time is not None
        end = self.last_event_time if is_gone and self.last_event_time is not None else self.now
        return max(0.0, end - self.header.perf_counter)

    def share_of(self, row: RequestRow) -> tuple[int, ShareKind] | None:
        """Tokens and kind of a request's share in the latest step; None if it has none."""
        if row.last_step_id != self.last_step_id or row.last_step_kind is None:
            return None
        return row.last_step_tokens, row.last_step_kind

    def block(self, block_id: int, *, recent_steps: int = 0) -> BlockInfo:
        """One block, for a cursor. Raises IndexError for an id outside 1..num_blocks."""
        owners = self.blocks.owners(block_id)
        last_use = max((row.last_step_id for owner in owners if (row := self.requests.get(owner)) is not None), default=None)
        return self.blocks.info(block_id, last_use_step=last_use, step_id=self.last_step_id, recent_steps=recent_steps)

    def block_codes(self, *, recent_steps: int = 0) -> bytes:
        """One code a block, index 0 is block 1; `BLOCK_STATES[code]` names it."""
        return self.blocks.codes(step_id=self.last_step_id, recent_steps=recent_steps)

    def history(self, series: Series, length: int = HISTORY_LENGTH) -> list[float | None]:
        """The newest `length` values (at most 240), oldest first, one each half second."""
        return self.data.histories.values(series, self.now, length)

    def gauges(self) -> Gauges:
        stats = self.stats or SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        steps, prefill, decode = self.data.rates.rates(self.now)
        host, hidden = self.data.overlap.sums(self.now)
        ttft_p50, ttft_p95, ttft_p99 = self.data.ttfts.percentiles(self.now, 0.5, 0.95, 0.99)
        itl_p50, itl_p95, itl_p99 = self.data.itls.percentiles(self.now, 0.5, 0.95, 0.99)
        wait_p50, wait_p95, wait_p99 = self.data.queue_waits.percentiles(self.now, 0.5, 0.95, 0.99)
        return Gauges(
            now=self.now,
            uptime=self.uptime,
            steps_per_s=steps,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs - stats.num_preempted_reqs,
            num_preempted=stats.num_preempted_reqs,
            num_cleaning_up=sum(row.state == "cleaning_up" for row in self.requests.values()),
            kv_cache_usage=stats.kv_cache_usage,
            num_used_blocks=stats.num_used_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_free_cached_blocks=self.blocks.num_free_cached,
            num_empty_blocks=max(0, stats.num_free_blocks - self.blocks.num_free_cached),
            num_shared_blocks=self.blocks.num_shared,
            num_total_blocks=stats.num_total_blocks,
            prefix_hit_rate=stats.prefix_cache_hit_rate,
            acceptance_rate=stats.acceptance_rate,
            num_draft_tokens=stats.num_draft_tokens,
            ttft_p50=ttft_p50,
            ttft_p95=ttft_p95,
            ttft_p99=ttft_p99,
            queue_wait_p50=wait_p50,
            queue_wait_p95=wait_p95,
            queue_wait_p99=wait_p99,
            itl_p50=itl_p50,
            itl_p95=itl_p95,
            itl_p99=itl_p99,
            overlap_efficiency=min(1.0, hidden / host) if host > 0 else None,
            num_in_flight=self.num_in_flight,
            admission_stop=self.admission_stop,
            paused=self.paused,
            stale=self.is_stale,
            num_dropped=self.num_dropped,
            num_gaps=self.num_gaps,
        )
