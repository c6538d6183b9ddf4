"""What the core tells observers: each event built and published once, and the last few kept for the log of a failure."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.loop.engine_snapshot import TextSource, TokenTimes, build_snapshot
from aioengine.engine.loop.failure_report import describe_event, describe_output
from aioengine.engine.loop.step_sampler import MaskTiming
from aioengine.events.bus import StepBus
from aioengine.events.step_event import (
    EngineSnapshot,
    Event,
    FinishedInfo,
    LoadedInfo,
    RequestInfo,
    SchedulerCall,
    StepEvent,
    StepResultEvent,
)
from aioengine.outputs import EngineCoreOutput, FinishReason, ModelRunnerOutput, TokenLogprobs
from aioengine.printable import LogLines, get_logger, printable
from aioengine.request import Request

logger = get_logger(__name__)

_NUM_EVENTS_KEPT = 32
SNAPSHOT_INTERVAL = 2000
"""Steps between two snapshots among the events, at most: a reader of a long recording can begin at one."""
SNAPSHOT_WORK = 25_000
"""The same in what a reader has to fold from one to the next, some 70 ms: a step counts as `_STEP_WORK` and its requests.

For 256 running requests that is a snapshot every 87 steps; it takes the engine 9 ms with 10,000 cached blocks.
"""
_STEP_WORK = 30


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
        self._loaded: list[LoadedInfo] = []
        self._calls: list[SchedulerCall] = []  # of the scheduler, since the last event
        self._stats_before = scheduler.make_stats()  # as of the last result
        self._last_step: StepEvent | None = None
        self._last_result: StepResultEvent | None = None
        self._times: dict[str, TokenTimes] = {}  # of live requests that have been scheduled
        self._without_token: dict[str, TokenTimes] = {}  # those of them that have no token yet
        self._is_behind = False  # an event is missing and no snapshot has told what it would have
        self._work = 0  # since the last snapshot

    # ------------------------------------------------------------------ who came and who went
    def note_added(self, request: Request, *, prompt: str | None) -> None:
        """`add_request()` was called."""
        publish_text = self._text_source is not None
        self._requests[request.request_id] = request
        self._calls.append("add")
        self._added.append(
            RequestInfo(
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                arrival_time=request.arrival_time,
                priority=request.priority,
                prompt=prompt,
                prompt_token_ids=request.prompt_token_ids if publish_text else None,
                cache_salt=request.cache_salt if publish_text else None,
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                num_external_blocks=request.num_external_blocks,
                num_block_hashes=len(request.block_hashes),
                lora_name=request.lora_name,
                lora_key=request.lora_key,
            )
        )

    def note_loaded(self, request_id: str, num_blocks: int) -> None:
        """`finish_load()` is about to be called."""
        self._calls.append("loaded")
        self._loaded.append(LoadedInfo(request_id, num_blocks))

    def note_reset(self, *, reset_running_requests: bool) -> None:
        """`reset_prefix_cache()` was called."""
        self._calls.append("reset_running" if reset_running_requests else "reset")

    def note_update(self) -> None:
        """`update_from_output()` was called; what is noted until `publish_result` came after it."""
        self._calls.append("update")

    def note_finished(self, request_id: str, reason: FinishReason, stop_reason: int | str | None, *, by: SchedulerCall) -> None:
        """by: "finish" for a call of `finish_requests()`, "ended" if the scheduler ended it itself."""
        self._calls.append(by)
        request = self._requests.pop(request_id)
        self._times.pop(request_id, None)
        self._without_token.pop(request_id, None)
        self._finished.append(FinishedInfo(request_id, reason, request.num_output_tokens, stop_reason))

    @property
    def has_news(self) -> bool:
        """A request came or went, or more, and no event has told of it yet."""
        return bool(self._added or self._finished or self._is_behind)

    # ------------------------------------------------------------------ events
    def publish_step(self, output: SchedulerOutput, *, queue_depth: int, schedule_start: float, schedule_end: float) -> None:
        """A step was scheduled and handed to the worker. Times in seconds of `time.perf_counter()`."""
        report = self._scheduler.take_report()
        self._calls.append("schedule")
        self._work += _STEP_WORK + len(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            self._times[new.req_id] = self._without_token[new.req_id] = TokenTimes(schedule_start)
        self._publish_news(
            lambda: self._keep_step(
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
                    added=self._added,
                    finished=self._finished,
                    stopped_req_id=report.stopped_req_id,
                    num_blocks_needed=report.num_blocks_needed,
                    calls=self._calls,
                    block_hashes=report.block_hashes,
                    loaded=self._loaded,
                )
            )
        )

    def publish_result(
        self,
        step_id: int,
        outputs: list[EngineCoreOutput],
        *,
        result: ModelRunnerOutput,
        masks: MaskTiming | None,
        queue_depth: int,
        update_start: float,
        update_end: float,
    ) -> None:
        """The tokens of a step were taken in. Times in seconds of `time.perf_counter()`."""
        stats, before = self._scheduler.make_stats(), self._stats_before
        self._stats_before = stats
        report, timing, publish_text = self._scheduler.take_report(), result.timing, self._text_source is not None
        if self._without_token:
            self._note_first_tokens(outputs, time=update_end)
        self._publish_news(
            lambda: self._keep_result(
                StepResultEvent(
                    step_id=step_id,
                    time=update_end,
                    num_new_tokens={output.request_id: len(output.new_token_ids) for output in outputs},
                    stats=stats,
                    block_changes=report.block_changes,
                    queue_depth=queue_depth,
                    execute_start=timing.execute_start if timing else None,
                    execute_end=timing.execute_end if timing else None,
                    sample_start=timing.sample_start if timing else None,
                    sample_end=timing.sample_end if timing else None,
                    update_start=update_start,
                    update_end=update_end,
                    finished=self._finished,
                    added=self._added,
                    new_text=self._text_source.take_new_text() if self._text_source is not None else {},
                    num_draft_tokens=stats.num_draft_tokens - before.num_draft_tokens,
                    num_accepted_tokens=stats.num_accepted_tokens - before.num_accepted_tokens,
                    grammar_start=masks.start if masks else None,
                    grammar_end=masks.end if masks else None,
                    calls=self._calls,
                    block_hashes=report.block_hashes,
                    sampled_token_ids=_sampled(result) if publish_text else {},
                    num_dropped_tokens=_num_dropped(outputs, result),
                    logprob_digests=digest_logprobs(result.logprobs) if publish_text and result.logprobs else {},
                    loaded=self._loaded,
                )
            )
        )

    def _keep_step(self, event: StepEvent) -> StepEvent:
        """For snapshots; observers may ask for one when they are told of it."""
        self._last_step = event
        return event

    def _keep_result(self, event: StepResultEvent) -> StepResultEvent:
        self._last_result = event
        return event

    def _note_first_tokens(self, outputs: list[EngineCoreOutput], *, time: float) -> None:
        for output in outputs:
            if output.new_token_ids and (times := self._without_token.pop(output.request_id, None)) is not None:
                times.first_token_time = time

    def publish_snapshot(self, *, in_flight: Iterable[SchedulerOutput], paused: bool) -> None:
        """The full state, as it stands between two calls of the scheduler."""
        self._work = 0
        self._publish(lambda: self.make_snapshot(in_flight=in_flight, paused=paused))

    def wants_snapshot_at(self, step_id: int) -> bool:
        is_due = step_id % SNAPSHOT_INTERVAL == 0 or self._work >= SNAPSHOT_WORK or self._is_behind
        return is_due and self._bus.has_observers

    def make_snapshot(self, *, in_flight: Iterable[SchedulerOutput], paused: bool) -> EngineSnapshot:
        """As `publish_snapshot`, for one who asks."""
        last_step = self._last_step
        return build_snapshot(
            self._scheduler,
            in_flight=in_flight,
            paused=paused,
            text_source=self._text_source,
            times=self._times,
            last_step=last_step if last_step is not None and last_step.step_id == self._scheduler.last_step_id else None,
            last_result=self._last_result,
        )

    def _publish_news(self, make: Callable[[], Event]) -> None:
        """Publish an event that tells who came and who went."""
        if self._publish(make):
            self._added, self._finished, self._loaded, self._calls = [], [], [], []

    def _publish(self, make: Callable[[], Event]) -> bool:
        """Publish what `make` builds. False if it raises: what observers see ends no step, and a snapshot will tell the rest."""
        try:
            event = make()
        except Exception:
            if not self._is_behind:
                logger.exception("an event could not be built; observers get a snapshot as soon as there is one")
            self._is_behind = True
            return False
        self._is_behind = self._is_behind and not isinstance(event, EngineSnapshot)
        self._recent.append(event)
        self._bus.publish(event)
        return True

    def describe_recent(self) -> LogLines:
        """The last events, one a line, for the log of a failure. Never raises."""
        lines = "".join(f"\n  {describe(event)}" for event in self._recent)
        return LogLines(f"the last {len(self._recent)} events:{lines}")


def _sampled(result: ModelRunnerOutput) -> dict[str, list[int]]:
    return {req_id: token_ids for req_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True) if token_ids}


def _num_dropped(outputs: Iterable[EngineCoreOutput], result: ModelRunnerOutput) -> dict[str, int]:
    """Only accepted draft tokens can come with, and so behind, a token that ends their request."""
    return {
        output.request_id: num_dropped
        for output in outputs
        if output.num_draft_tokens
        and (num_dropped := len(result.sampled_token_ids[result.req_id_to_index[output.request_id]]) - len(output.new_token_ids))
    }


def digest_logprobs(logprobs: Mapping[str, list[TokenLogprobs]]) -> dict[str, str]:
    """A digest of the bits of each request's log-probabilities, so that two runs can be compared without writing them down."""
    return {req_id: _digest(positions) for req_id, positions in logprobs.items()}


def _digest(positions: Iterable[TokenLogprobs]) -> str:
    entries = [(token_id, entry.logprob, entry.rank) for position in positions for token_id, entry in position.items()]
    return hashlib.sha256(b"".join(struct.pack("<qdq", *entry) for entry in entries)).hexdigest()[:16]


def describe(subject: Event | SchedulerOutput) -> str:
    """One line for the log of a failure. Never raises."""
    try:
        return printable(describe_output(subject) if isinstance(subject, SchedulerOutput) else describe_event(subject))
    except Exception as exc:  # an integer of so many digits that Python does not write it out
        return f"{type(subject).__name__} of step {subject.step_id}, which cannot be described: {printable(str(exc))}"
