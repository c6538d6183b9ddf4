"""What the core tells observers: each event built and published once, and the last few kept for the log of a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.engine_snapshot import TextSource, build_snapshot
from aioengine.engine.failure_report import describe_event
from aioengine.events.bus import StepBus
from aioengine.events.step_event import EngineSnapshot, Event, FinishedInfo, RequestInfo, StepEvent, StepResultEvent
from aioengine.outputs import EngineCoreOutput, FinishReason, WorkerTiming
from aioengine.request import Request

_NUM_EVENTS_KEPT = 32
SNAPSHOT_INTERVAL = 2000
"""Steps between two snapshots among the events: a reader of a long recording can begin at one."""


class CoreEvents:
    """Publishes the events of one core. Who came and who went is told once, with the next event that can carry it."""

    def __init__(self, scheduler: Scheduler, bus: StepBus, *, text_source: TextSource | None) -> None:
        self._scheduler = scheduler
        self._bus = bus
        self._text_source = text_source
        self._token_budget = scheduler.config.max_num_batched_tokens
        self._recent: deque[Event] = deque(maxlen=_NUM_EVENTS_KEPT)
        self._requests: dict[str, Request] = {}  # the live ones; the scheduler forgets those that it ends itself
        self._added: list[RequestInfo] = []
        self._finished: list[FinishedInfo] = []
        self._stats_before = scheduler.make_stats()  # as of the last result

    # ------------------------------------------------------------------ who came and who went
    def note_added(self, request: Request, *, prompt: str | None) -> None:
        self._requests[request.request_id] = request
        self._added.append(
            RequestInfo(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                arrival_time=request.arrival_time,
                priority=request.priority,
                prompt=prompt,
            )
        )

    def note_finished(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        request = self._requests.pop(request_id)
        self._finished.append(FinishedInfo(request_id, reason, request.num_output_tokens, stop_reason))

    @property
    def has_news(self) -> bool:
        """A request came or went and no event has told of it yet."""
        return bool(self._added or self._finished)

    # ------------------------------------------------------------------ events
    def publish_step(self, output: SchedulerOutput, *, queue_depth: int, schedule_start: float, schedule_end: float) -> None:
        """A step was scheduled and handed to the worker. Times in seconds of `time.perf_counter()`."""
        report = self._scheduler.take_report()
        added, self._added = self._added, []
        finished, self._finished = self._finished, []
        self.publish(
            StepEvent(
                step_id=output.step_id,
                time=schedule_end,
                output=output,
                stats=self._scheduler.make_stats(),
                admission_stop=report.admission_stop,
                token_budget=self._token_budget,
                block_changes=report.block_changes,
                queue_depth=queue_depth,
                schedule_start=schedule_start,
                schedule_end=schedule_end,
                added=added,
                finished=finished,
            )
        )

    def publish_result(
        self,
        step_id: int,
        outputs: list[EngineCoreOutput],
        *,
        timing: WorkerTiming | None,
        queue_depth: int,
        update_start: float,
        update_end: float,
    ) -> None:
        """The tokens of a step were taken in. Times in seconds of `time.perf_counter()`."""
        added, self._added = self._added, []
        finished, self._finished = self._finished, []
        stats, before = self._scheduler.make_stats(), self._stats_before
        self._stats_before = stats
        self.publish(
            StepResultEvent(
                step_id=step_id,
                time=update_end,
                num_new_tokens={output.request_id: len(output.new_token_ids) for output in outputs},
                stats=stats,
                block_changes=self._scheduler.take_report().block_changes,
                queue_depth=queue_depth,
                execute_start=timing.execute_start if timing else None,
                execute_end=timing.execute_end if timing else None,
                sample_start=timing.sample_start if timing else None,
                sample_end=timing.sample_end if timing else None,
                update_start=update_start,
                update_end=update_end,
                finished=finished,
                added=added,
                new_text=self._text_source.take_new_text() if self._text_source is not None else {},
                num_draft_tokens=stats.num_draft_tokens - before.num_draft_tokens,
                num_accepted_tokens=stats.num_accepted_tokens - before.num_accepted_tokens,
            )
        )

    def wants_snapshot_at(self, step_id: int) -> bool:
        return step_id % SNAPSHOT_INTERVAL == 0 and self._bus.has_observers

    def make_snapshot(self, *, in_flight: Iterable[SchedulerOutput], paused: bool) -> EngineSnapshot:
        """The full state, as it stands between two calls of the scheduler."""
        return build_snapshot(self._scheduler, in_flight=in_flight, paused=paused, text_source=self._text_source)

    def publish(self, event: Event) -> None:
        self._recent.append(event)
        self._bus.publish(event)

    def describe_recent(self) -> str:
        """The last events, one a line, for the log of a failure."""
        lines = "\n".join(f"  {describe_event(event)}" for event in self._recent)
        return f"the last {len(self._recent)} events:\n{lines}"
