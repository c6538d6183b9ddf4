"""What the dashboard knows: plain data, which the folds change and `DashboardState` reads."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from aioengine.core.scheduler_output import AdmissionStop, SchedulerStats
from aioengine.events.sources.base import SourceStatus
from aioengine.events.wire import WireHeader
from aioengine_tui.model.blocks import BlockMap
from aioengine_tui.model.log import LogBook
from aioengine_tui.model.metrics import History, OverlapMeter, RateWindow, SampleWindow
from aioengine_tui.model.rows import RequestRow, StepRecord

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
    totals: Totals = field(default_factory=Totals)
    num_events: int = 0
    num_dropped: int = 0  # events lost on the way here, as far as they can be counted
    num_gaps: int = 0
    out_of_sync: bool = False  # events are missing and no snapshot has come yet
    # The parts below are read through gauges() and history().
    rates: RateWindow = field(
        default_factory=partial(RateWindow, num_values=3, seconds=RATE_WINDOW_S)
    )  # steps, prefill tokens, decode tokens
    overlap: RateWindow = field(
        default_factory=partial(RateWindow, num_values=2, seconds=RATE_WINDOW_S)
    )  # host seconds, hidden host seconds
    ttfts: SampleWindow = field(default_factory=partial(SampleWindow, seconds=LATENCY_WINDOW_S))
    itls: SampleWindow = field(default_factory=partial(SampleWindow, seconds=LATENCY_WINDOW_S, capacity=8192))
    histories: History = field(default_factory=History)
    overlap_meter: OverlapMeter = field(default_factory=OverlapMeter)

    @classmethod
    def create(cls, limits: Limits) -> StateData:
        """Of a stream of which nothing has come yet."""
        return cls(limits, steps=deque(maxlen=limits.max_steps), log=LogBook(max_lines=limits.max_log_lines))

    def copy(self) -> StateData:
        """Independent of this one."""
        return dataclasses.replace(
            self,
            requests={request_id: row.copy() for request_id, row in self.requests.items()},
            finished=self.finished.copy(),  # a finished row changes only if its reason comes late; it is replaced then
            steps=self.steps.copy(),
            blocks=self.blocks.copy(),
            log=self.log.copy(),
            totals=dataclasses.replace(self.totals),
            rates=self.rates.copy(),
            overlap=self.overlap.copy(),
            ttfts=self.ttfts.copy(),
            itls=self.itls.copy(),
            histories=self.histories.copy(),
            overlap_meter=self.overlap_meter.copy(),
        )
