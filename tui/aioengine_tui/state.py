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
from aioengine.events.step_event import EngineSnapshot, StepEvent, StepResultEvent
from aioengine.events.stream import CopyWanted, Gap, Restored, SourceStatus, StreamItem
from aioengine.events.wire import WireHeader
from aioengine_tui.model.blocks import BLOCK_STATES, BlockInfo, BlockMap, BlockState
from aioengine_tui.model.fold_result import fold_result
from aioengine_tui.model.fold_snapshot import fold_snapshot
from aioengine_tui.model.fold_step import fold_step
from aioengine_tui.model.log import LOG_KINDS, LogBook, LogKind, LogLine
from aioengine_tui.model.rows import Lanes, Milestone, RequestRow, RequestState, Share, ShareKind, StepRecord
from aioengine_tui.model.windows import HISTORY_LENGTH, SERIES, History, OverlapMeter, RateWindow, SampleWindow, Series

__all__ = [
    "BLOCK_STATES",
    "LOG_KINDS",
    "SERIES",
    "BlockInfo",
    "BlockMap",
    "BlockState",
    "DashboardState",
    "Gauges",
    "Lanes",
    "LogBook",
    "LogKind",
    "LogLine",
    "Milestone",
    "RequestRow",
    "RequestState",
    "Series",
    "Share",
    "ShareKind",
    "StepRecord",
    "Totals",
]

RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 60.0


@dataclass(slots=True)
class Totals:
    """Counts since the viewer attached (or the recording began); never reset."""

    num_steps: int = 0
    num_arrived: int = 0
    num_finished: int = 0  # however they ended
    num_aborted: int = 0
    num_errors: int = 0
    num_preemptions: int = 0
    num_prompt_tokens_computed: int = 0  # prefill and chunks, without what the prefix cache served
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_output_tokens: int = 0
    num_evicted_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The numbers of the overview at one moment. None: nothing was measured."""

    now: float
    uptime: float | None  # seconds since the engine started, if the header is known
    steps_per_s: float
    prefill_tokens_per_s: float  # of prompts; what preemptions make necessary again is in Totals.num_recomputed_tokens
    decode_tokens_per_s: float  # sampled and accepted
    num_running: int
    num_waiting: int  # without the preempted ones
    num_preempted: int
    num_cleaning_up: int
    kv_cache_usage: float  # 0..1
    num_used_blocks: int
    num_free_blocks: int  # cached ones included
    num_cached_blocks: int  # owned or not
    num_shared_blocks: int
    num_total_blocks: int
    prefix_hit_rate: float | None  # 0..1, of the tokens that the last 1000 requests looked up
    acceptance_rate: float | None  # 0..1, of all guesses that were checked since the engine started
    num_draft_tokens: int  # those guesses
    ttft_p50: float | None  # seconds, of the last minute
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    overlap_efficiency: float | None  # 0..1: share of schedule and update time during which the worker computed
    num_in_flight: int  # steps
    admission_stop: AdmissionStop | None  # of the latest step
    paused: bool  # the engine, by its user; not the view
    stale: bool
    num_dropped: int  # events that this viewer lost
    num_gaps: int


class DashboardState:
    """See the module's text. Attributes are for reading; only `apply()` and `tick()` change them."""

    def __init__(self, *, max_steps: int = 120, max_finished: int = 512, max_log_lines: int = 2000) -> None:
        self.header: WireHeader | None = None
        self.status = SourceStatus("connecting")
        self.stats: SchedulerStats | None = None
        self.now = 0.0  # the engine's clock as far as known: the latest event, or tick()
        self.last_event_time: float | None = None
        self.last_step_id = 0  # scheduled; 0: none seen
        self.num_in_flight = 0
        self.paused = False
        self.admission_stop: AdmissionStop | None = None
        self.requests: dict[str, RequestRow] = {}  # live ones and those being cleaned up, by arrival
        self.finished: dict[str, RequestRow] = {}  # the latest that ended, oldest first
        self.steps: deque[StepRecord] = deque(maxlen=max_steps)  # oldest first
        self.blocks = BlockMap()
        self.log = LogBook(max_lines=max_log_lines)
        self.totals = Totals()
        self.num_events = 0
        self.num_dropped = 0  # events lost on the way here, as far as they can be counted
        self.num_gaps = 0
        self.out_of_sync = False  # events are missing and no snapshot has come yet
        self.max_finished = max_finished
        # The parts below are read through gauges() and history().
        self.rates = RateWindow(num_values=3, seconds=RATE_WINDOW_S)  # steps, prefill tokens, decode tokens
        self.overlap = RateWindow(num_values=2, seconds=RATE_WINDOW_S)  # host seconds, hidden host seconds
        self.ttfts = SampleWindow(seconds=LATENCY_WINDOW_S)
        self.itls = SampleWindow(seconds=LATENCY_WINDOW_S, capacity=8192)
        self.histories = History()
        self.overlap_meter = OverlapMeter()

    # ------------------------------------------------------------------ folding
    def apply(self, item: StreamItem) -> None:
        """Fold one item of the stream. Never raises because of what a lossy stream left out."""
        match item:
            case StepEvent():
                self._take_time(item.time)
                fold_step(self, item)
            case StepResultEvent():
                self._take_time(item.time)
                fold_result(self, item)
            case EngineSnapshot():
                self._take_time(item.time)
                fold_snapshot(self, item)
            case WireHeader():
                self._take_header(item)
            case Gap():
                self.note_gap(item.num_dropped, item.reason)
            case SourceStatus():
                self._take_status(item)
            case Restored():
                self._become(item.state)
            case CopyWanted():
                item.answer(self.copy())

    def tick(self, now: float) -> None:
        """Let the engine's clock move on without events. It never goes back."""
        self.now = max(self.now, now)

    def _take_time(self, time: float) -> None:
        self.num_events += 1
        self.last_event_time = time
        self.now = max(self.now, time)

    def _take_header(self, header: WireHeader) -> None:
        if self.header is not None and header.perf_counter != self.header.perf_counter:
            # Another engine answers at this address: nothing of the old one is true any more.
            status, log = self.status, self.log
            self.__dict__.update(DashboardState(max_steps=self.steps.maxlen or 1, max_finished=self.max_finished).__dict__)
            self.status, self.log = status, log
            self.log.add(header.perf_counter, None, "stream", None, "another engine answers: starting over")
        self.header = header
        self.now = max(self.now, header.perf_counter)

    def _take_status(self, status: SourceStatus) -> None:
        if status.state != self.status.state and status.state in ("lost", "ended"):
            self.log.add(self.now, None, "stream", None, f"{status.state}: {status.detail}" if status.detail else status.state)
        self.status = status

    def note_gap(self, num_dropped: int, reason: str) -> None:
        """Events are missing: what is shown may be wrong until a snapshot comes."""
        self.num_gaps += 1
        self.num_dropped += num_dropped
        self.out_of_sync = True
        self.overlap_meter = OverlapMeter()
        count = f"{num_dropped} events" if num_dropped else "an unknown number of events"
        self.log.add(self.now, self.last_step_id or None, "stream", None, f"{count} missing: {reason}")

    def _become(self, other: DashboardState) -> None:
        status = self.status
        self.__dict__.update(other.__dict__)
        self.status = status

    # ------------------------------------------------------------------ reading
    @property
    def model(self) -> str:
        return self.header.model if self.header is not None else ""

    def config(self, section: str, name: str) -> Any:
        """A resolved setting of the engine, such as ("cache", "block_size"); section "" for the top level; None if unknown."""
        found: Any = self.header.config if self.header is not None else {}
        if section:
            found = found.get(section) or {}
        return found.get(name) if isinstance(found, dict) else None

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block."""
        value = self.config("cache", "block_size")
        return value if isinstance(value, int) else None

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
        return self.histories.values(series, self.now, length)

    def gauges(self) -> Gauges:
        stats = self.stats or SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        steps, prefill, decode = self.rates.rates(self.now)
        host, hidden = self.overlap.sums(self.now)
        ttft_p50, ttft_p95 = self.ttfts.percentiles(self.now, 0.5, 0.95)
        itl_p50, itl_p95 = self.itls.percentiles(self.now, 0.5, 0.95)
        return Gauges(
            now=self.now,
            uptime=None if self.header is None else max(0.0, self.now - self.header.perf_counter),
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
            num_shared_blocks=self.blocks.num_shared,
            num_total_blocks=stats.num_total_blocks,
            prefix_hit_rate=stats.prefix_cache_hit_rate,
            acceptance_rate=stats.acceptance_rate,
            num_draft_tokens=stats.num_draft_tokens,
            ttft_p50=ttft_p50,
            ttft_p95=ttft_p95,
            itl_p50=itl_p50,
            itl_p95=itl_p95,
            overlap_efficiency=min(1.0, hidden / host) if host > 0 else None,
            num_in_flight=self.num_in_flight,
            admission_stop=self.admission_stop,
            paused=self.paused,
            stale=self.is_stale,
            num_dropped=self.num_dropped,
            num_gaps=self.num_gaps,
        )

    # ------------------------------------------------------------------ putting aside
    def copy(self) -> DashboardState:
        """An independent state, for checkpoints of a replay and for a frozen view."""
        other = object.__new__(DashboardState)
        other.__dict__.update(self.__dict__)
        other.requests = {request_id: row.copy() for request_id, row in self.requests.items()}
        # A finished row changes only if its reason comes late; it is replaced then.
        other.finished = self.finished.copy()
        other.steps = self.steps.copy()
        other.blocks = self.blocks.copy()
        other.log = self.log.copy()
        other.totals = dataclasses.replace(self.totals)
        other.rates, other.overlap = self.rates.copy(), self.overlap.copy()
        other.ttfts, other.itls = self.ttfts.copy(), self.itls.copy()
        other.histories = self.histories.copy()
        other.overlap_meter = self.overlap_meter.copy()
        return other

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--once --json`; see `aioengine_tui.model.export.state_to_json`."""
        from aioengine_tui.model.export import state_to_json

        return state_to_json(self)
