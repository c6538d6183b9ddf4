"""What the dashboard knows: plain data, which the folds change and `DashboardState` reads."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from aioengine.core.scheduler_output import AdmissionStop, SchedulerStats
from aioengine.events.sources.base import SourceStatus
from aioengine.events.wire import WireHeader
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine_tui.model.blocks import BlockMap
from aioengine_tui.model.log import LogBook
from aioengine_tui.model.metrics import History, OverlapMeter, RateWindow, SampleWindow
from aioengine_tui.model.rows import RequestRow, StepRecord
from aioengine_tui.model.waterfall import Waterfall

RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Totals:
    """The engine's own counts since it started, whenever a viewer came and whatever it missed; the same by any way to a moment.

    origin "since_attach": the engine is an older one, or the recording is, and tells none: these are the viewer's own.
    """

    origin: Literal["engine", "since_attach"]
    num_steps: int
    num_arrived: int
    num_finished: int  # however they ended
    num_aborted: int
    num_errors: int
    num_rejected: int  # refused because the queue was full: not among the arrived ones
    num_preemptions: int
    num_resumed: int  # came back after a preemption
    num_prompt_tokens_computed: int  # for the first time, without what the prefix cache served
    num_cached_tokens: int  # prompt tokens that the prefix cache served
    num_recomputed_tokens: int  # computed again after a preemption
    num_output_tokens: int
    num_evicted_blocks: int
    num_draft_tokens: int  # checked
    num_accepted_tokens: int  # those that were right


@dataclass(frozen=True, slots=True)
class GapNote:
    """Events that this viewer missed."""

    time: float  # seconds of the engine's clock
    num_dropped: int  # 0: how many is not known
    reason: str


@dataclass(slots=True)
class SinceAttach:
    """What this viewer saw itself since it attached (or since the place where its recording began); never reset."""

    num_steps: int = 0
    num_arrived: int = 0
    num_finished: int = 0  # however they ended
    num_aborted: int = 0
    num_errors: int = 0
    num_rejected: int = 0  # always 0: nothing tells a viewer of one
    num_preemptions: int = 0
    num_resumed: int = 0
    num_prompt_tokens_computed: int = 0  # for the first time, without what the prefix cache served
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    num_recomputed_tokens: int = 0  # computed again after a preemption
    num_output_tokens: int = 0
    num_evicted_blocks: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept, whatever the length of the run."""

    max_steps: int = 120
    max_finished: int = 512
    max_log_lines: int = 20_000


@dataclass(slots=True)
class StateData:
    """Everything that is folded from a stream."""

    limits: Limits
    steps: deque[StepRecord]  # oldest first
    log: LogBook
    header: WireHeader | None = None
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(()),)  # of the header
    has_windows: bool = False  # any of these groups
    status: SourceStatus = field(default_factory=partial(SourceStatus, "connecting"))
    stats: SchedulerStats | None = None
    now: float = 0.0  # the engine's clock as far as known: the latest event, or tick()
    last_event_time: float | None = None
    last_step_id: int = 0  # scheduled; 0: none seen
    num_in_flight: int = 0
    paused: bool = False
    admission_stop: AdmissionStop | None = None
    requests: dict[str, RequestRow] = field(default_factory=dict)  # live ones and those being cleaned up, by arrival
    finished: dict[str, RequestRow] = field(default_factory=dict)  # the latest that ended, oldest first
    blocks: BlockMap = field(default_factory=BlockMap)
    waterfall: Waterfall = field(default_factory=Waterfall)
    since_attach: SinceAttach = field(default_factory=SinceAttach)
    attach_time: float | None = None  # when this viewer's knowledge begins; None: nothing has come
    num_events: int = 0
    num_dropped: int = 0  # events lost on the way here, as far as they can be counted
    num_gaps: int = 0
    last_gap: GapNote | None = None
    out_of_sync: bool = False  # events are missing and no snapshot has come yet
    # The parts below are read through gauges() and history().
    rates: RateWindow = field(
        default_factory=partial(RateWindow, num_values=3, seconds=RATE_WINDOW_S)
    )  # steps, prefill tokens, decode tokens
    overlap: RateWindow = field(
        default_factory=partial(RateWindow, num_values=2, seconds=RATE_WINDOW_S)
    )  # host seconds, hidden host seconds
    ttfts: SampleWindow = field(default_factory=partial(SampleWindow, seconds=LATENCY_WINDOW_S))
    queue_waits: SampleWindow = field(default_factory=partial(SampleWindow, seconds=LATENCY_WINDOW_S))
    itls: SampleWindow = field(default_factory=partial(SampleWindow, seconds=LATENCY_WINDOW_S, capacity=8192))
    histories: History = field(default_factory=History)
    overlap_meter: OverlapMeter = field(default_factory=OverlapMeter)

    @classmethod
    def create(cls, limits: Limits) -> StateData:
        """Of a stream of which nothing has come yet."""
        return cls(limits, steps=deque(maxlen=limits.max_steps), log=LogBook(max_lines=limits.max_log_lines))

    def config(self, section: str, name: str) -> Any:
        """A resolved setting of the engine; section "" for the top level; None if unknown."""
        found: Any = self.header.config if self.header is not None else {}
        if section:
            found = found.get(section) or {}
        return found.get(name) if isinstance(found, dict) else None

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block."""
        value = self.config("cache", "block_size")
        return value if isinstance(value, int) else None

    def set_header(self, header: WireHeader) -> None:
        self.header = header
        stated = self.config("cache", "kv_cache_groups")
        if isinstance(stated, list) and stated:
            self.groups = tuple(_read_group(group) for group in stated)
            self.has_windows = any(group.sliding_window is not None for group in self.groups)

    def copy(self) -> StateData:
        """Independent of this one."""
        return dataclasses.replace(
            self,
            requests={request_id: row.copy() for request_id, row in self.requests.items()},
            finished=self.finished.copy(),  # a finished row changes only if its reason comes late; it is replaced then
            steps=self.steps.copy(),
            blocks=self.blocks.copy(),
            waterfall=self.waterfall.copy(),
            log=self.log.copy(),
            since_attach=dataclasses.replace(self.since_attach),
            rates=self.rates.copy(),
            overlap=self.overlap.copy(),
            ttfts=self.ttfts.copy(),
            queue_waits=self.queue_waits.copy(),
            itls=self.itls.copy(),
            histories=self.histories.copy(),
            overlap_meter=self.overlap_meter.copy(),
        )


def read_totals(data: StateData) -> Totals:
    """The engine's counts, where its events tell them; else this viewer's own."""
    stats, own = data.stats, data.since_attach
    if stats is not None and stats.num_finished_reqs is not None:
        return Totals(
            origin="engine",
            num_steps=data.last_step_id,
            num_arrived=stats.num_arrived_reqs or 0,
            num_finished=stats.num_finished_reqs,
            num_aborted=stats.num_aborted_reqs,
            num_errors=stats.num_error_reqs or 0,
            num_rejected=stats.num_rejected_reqs,
            num_preemptions=stats.num_preemptions,
            num_resumed=stats.num_resumed_reqs,
            num_prompt_tokens_computed=stats.num_prompt_tokens_computed or 0,
            num_cached_tokens=stats.prefix_cache_hits,
            num_recomputed_tokens=stats.num_recomputed_tokens or 0,
            num_output_tokens=stats.num_output_tokens or 0,
            num_evicted_blocks=stats.num_evicted_blocks or 0,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
        )
    return Totals("since_attach", **dataclasses.asdict(own))


def _read_group(stated: Any) -> KVCacheGroup:
    """One of a header's; whatever else stands there is taken as one that sees everything."""
    group = stated if isinstance(stated, dict) else {}
    layers, window = group.get("layers"), group.get("sliding_window")
    return KVCacheGroup(tuple(layers) if isinstance(layers, list) else (), window if isinstance(window, int) and window > 0 else None)
