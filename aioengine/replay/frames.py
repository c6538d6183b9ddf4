"""Repeats the calls of a recorded scheduler on a new one, and compares every field of every frame.

The scheduler has neither clock nor randomness, so equal calls give equal frames: which blocks, who is preempted, what the prefix
cache serves. Where the recording holds no text, block hashes stand for token ids: the scheduler knows contents by nothing else,
but for the token that ends a request, which is told by the end itself, and draft tokens, whose numbers are taken as recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aioengine.core.block_hash import short_hash
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import InvalidRequestError
from aioengine.events.step_event import Event, FinishedInfo, RequestInfo, SchedulerCall, StepEvent, StepResultEvent
from aioengine.events.wire import HIDDEN_TOKEN_ID, WireHeader
from aioengine.outputs import EngineCoreOutput, FinishReason, ModelRunnerOutput
from aioengine.replay.difference import Difference, find_difference
from aioengine.replay.hidden_tokens import RecordedProposer, end_token_id, expect_hidden_repetition
from aioengine.replay.recording import read_settings, steps_in_order
from aioengine.request import Request, RequestStatus
from aioengine.sampling_params import SamplingParams

_STATUSES: dict[FinishReason, RequestStatus] = {
    "abort": RequestStatus.FINISHED_ABORTED,
    "error": RequestStatus.FINISHED_ERROR,
    "length": RequestStatus.FINISHED_LENGTH_CAPPED,
    "repetition": RequestStatus.FINISHED_REPETITION,
    "stop": RequestStatus.FINISHED_STOPPED,
}


@dataclass(frozen=True, slots=True)
class FrameReport:
    """What was compared. difference: the first; None: there is none."""

    num_steps: int
    num_results: int
    num_preemptions: int
    difference: Difference | None


class _Different(Exception):
    """Carries a difference out of the depth."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


@dataclass(slots=True)
class _Told:
    """How many block hashes of a live request have been told."""

    request: Request
    num_recorded: int = 0
    num_now: int = 0


class FrameReplay:
    """One scheduler, driven by the events of one recording."""

    def __init__(self, header: WireHeader) -> None:
        """Raises ConfigError if the header lacks something."""
        settings = read_settings(header)
        self._has_text = header.include_prompts
        self.scheduler = Scheduler(
            settings.scheduler,
            cache=settings.cache,
            num_kv_cache_blocks=settings.num_kv_cache_blocks,
            eos_token_ids=settings.eos_token_ids,
        )
        self._proposer: RecordedProposer | None = None
        if self.scheduler.proposer is not None and not self._has_text:
            self.scheduler.proposer = self._proposer = RecordedProposer(settings.scheduler)
        self._in_flight: dict[int, SchedulerOutput] = {}
        self._event: StepEvent | StepResultEvent | None = None
        self._num_rejected_reqs = 0
        self._told: dict[str, _Told] = {}  # where there is text

    def take(self, event: StepEvent | StepResultEvent) -> Difference | None:
        """Repeat the calls that an event tells of, and compare what they give with it. Not to be called after a difference."""
        self._event = event
        if event.stats.num_rejected_reqs > self._num_rejected_reqs:  # they never came to the scheduler
            self.scheduler.note_rejected(event.stats.num_rejected_reqs - self._num_rejected_reqs)
            self._num_rejected_reqs = event.stats.num_rejected_reqs
        try:
            if isinstance(event, StepEvent):
                self._take_step(event)
            else:
                self._take_result(event)
        except _Different as exc:
            return exc.difference
        except (AssertionError, KeyError, IndexError, ValueError) as exc:  # the scheduler cannot do what it is said to have done
            return Difference(event.step_id, _kind(event), "the calls of the scheduler", event.calls, f"{type(exc).__name__}: {exc}")
        return None

    # ------------------------------------------------------------------ the two events
    def _take_step(self, event: StepEvent) -> None:
        self._learn_hashes(event)
        if self._proposer is not None:
            self._proposer.recorded = event.output.scheduled_spec_decode_tokens
        output: SchedulerOutput | None = None
        for call in self._calls(event):
            if call == "schedule":
                output = self.scheduler.schedule()
        if output is None:
            raise _Different(Difference(event.step_id, "step", "output", event.output, None))
        self._in_flight[event.step_id] = output
        report = self.scheduler.take_report()
        self._compare("output", event.output, output)
        self._compare("admission_stop", event.admission_stop, report.admission_stop)
        self._compare("stopped_req_id", event.stopped_req_id, report.stopped_req_id)
        self._compare("num_blocks_needed", event.num_blocks_needed, report.num_blocks_needed)
        self._compare("token_budget", event.token_budget, self.scheduler.config.max_num_batched_tokens)
        self._compare("block_changes", event.block_changes, report.block_changes)
        self._compare_common(event, report.block_hashes)

    def _take_result(self, event: StepResultEvent) -> None:
        self._learn_hashes(event)
        output = self._in_flight.pop(event.step_id)
        core_outputs: list[EngineCoreOutput] = []
        for call in self._calls(event):
            if call == "update":
                core_outputs = self.scheduler.update_from_output(output, self._worker_output(event, output))
        report = self.scheduler.take_report()
        num_new_tokens = {core_output.request_id: len(core_output.new_token_ids) for core_output in core_outputs}
        recorded = {req_id: count for req_id, count in event.num_new_tokens.items() if count or req_id in num_new_tokens}
        self._compare("num_new_tokens", recorded, num_new_tokens)  # chunks that gave only log-probabilities of the prompt are left out
        self._compare("block_changes", event.block_changes, report.block_changes)
        self._compare_common(event, report.block_hashes)

    def _compare_common(self, event: StepEvent | StepResultEvent, block_hashes: dict[str, list[str]]) -> None:
        self._compare("stats", event.stats, self.scheduler.make_stats())
        self._compare("queue_depth", event.queue_depth, len(self._in_flight))
        if self._has_text:
            self._compare_hashes(event, block_hashes)

    def _compare_hashes(self, event: StepEvent | StepResultEvent, now: dict[str, list[str]]) -> None:
        """Of what has been told so far of each request.

        Not event by event: a call of `schedule()` that found nothing to do is in no recording, but may have looked up the prefix of a
        waiting request, and so have come to its hashes an event earlier than here.
        """
        for req_id, hashes in now.items():
            if req_id in self._told:
                self._told[req_id].num_now += len(hashes)
        for req_id, recorded in event.block_hashes.items():
            told = self._told.get(req_id)
            self._compare(f"block_hashes[{req_id!r}]", recorded, None if told is None else self._next_hashes(told, len(recorded)))
        for req_id in now:
            told = self._told.get(req_id)
            if told is not None and told.num_now > told.num_recorded:
                raise _Different(Difference(event.step_id, _kind(event), f"block_hashes[{req_id!r}]", told.num_recorded, told.num_now))
        for info in event.finished:
            self._told.pop(info.request_id, None)

    def _next_hashes(self, told: _Told, count: int) -> list[str]:
        request, kv, start = told.request, self.scheduler.kv_cache_manager, told.num_recorded
        told.num_recorded = end = start + count
        hashes = request.block_hashes
        if len(hashes) < end:
            hashes = list(hashes)
            end = min(end, request.num_tokens // kv.block_size)
            kv.extend_hashes(hashes, request.all_token_ids, end, cache_salt=request.cache_salt, lora_key=request.lora_key)
        return [short_hash(block_hash) for block_hash in hashes[start:end]]

    def _compare(self, field: str, recorded: object, now: object) -> None:
        assert self._event is not None
        found = find_difference(field, recorded, now)
        if found is not None:
            raise _Different(Difference(self._event.step_id, _kind(self._event), *found))

    # ------------------------------------------------------------------ the calls
    def _calls(self, event: StepEvent | StepResultEvent) -> Iterator[SchedulerCall]:
        """Repeat what came in between; the event's own call is left to the caller, in its place."""
        added, finished, loaded = iter(event.added), iter(event.finished), iter(event.loaded)
        for call in event.calls:
            match call:
                case "add":
                    self._add(next(added), event)
                case "finish":
                    self._finish(next(finished))
                case "ended":
                    self._check_ended(next(finished))
                case "loaded":
                    info = next(loaded)
                    self.scheduler.finish_load(info.request_id, info.num_blocks)
                case "reset" | "reset_running":
                    self.scheduler.reset_prefix_cache(reset_running_requests=call == "reset_running")
                case _:
                    yield call

    def _add(self, info: RequestInfo, event: StepEvent | StepResultEvent) -> None:
        token_ids = info.prompt_token_ids if self._has_text else None
        if token_ids is None:
            token_ids = [HIDDEN_TOKEN_ID] * info.num_prompt_tokens
        params = info.sampling_params or SamplingParams(max_tokens=info.max_tokens)
        request = Request(
            info.request_id,
            token_ids,
            sampling_params=params,
            arrival_time=info.arrival_time,
            priority=info.priority,
            cache_salt=info.cache_salt,
            block_hashes=self._hash(info, token_ids) if self._has_text else _read_hashes(event.block_hashes.get(info.request_id, ())),
            pooling_params=info.pooling_params,
            num_external_blocks=info.num_external_blocks,
            lora_name=info.lora_name,
            lora_key=info.lora_key,
        )
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError as exc:
            raise _Different(Difference(event.step_id, _kind(event), "added", info.request_id, str(exc))) from exc
        if self._has_text:
            self._told[request.request_id] = _Told(request)
        else:
            expect_hidden_repetition(request)

    def _hash(self, info: RequestInfo, token_ids: list[int]) -> list[bytes]:
        """The hashes that a request came with."""
        hashes: list[bytes] = []
        kv = self.scheduler.kv_cache_manager
        kv.extend_hashes(hashes, token_ids, info.num_block_hashes, cache_salt=info.cache_salt, lora_key=info.lora_key)
        return hashes

    def _finish(self, info: FinishedInfo) -> None:
        ended = self.scheduler.finish_requests([info.request_id], _STATUSES[info.finish_reason])
        self._compare("finished", [info.request_id], [request.request_id for request in ended])
        self._compare(f"finished[{info.request_id!r}].num_output_tokens", info.num_output_tokens, ended[0].num_output_tokens)

    def _check_ended(self, info: FinishedInfo) -> None:
        if info.request_id in self.scheduler.requests:
            raise _Different(Difference(self._step_id, "result", "finished", info, "it goes on"))

    @property
    def _step_id(self) -> int:
        assert self._event is not None
        return self._event.step_id

    # ------------------------------------------------------------------ what the worker gave
    def _worker_output(self, event: StepResultEvent, output: SchedulerOutput) -> ModelRunnerOutput:
        ended = _ended_in_update(event)
        failed = {info.request_id: str(info.stop_reason or "") for info in ended if info.finish_reason == "error"}
        req_ids = list(output.num_scheduled_tokens)
        if self._has_text:
            sampled = [event.sampled_token_ids.get(req_id, []) for req_id in req_ids]
        else:
            by_id = {info.request_id: info for info in ended}
            sampled = [self._hidden_tokens(req_id, event, by_id.get(req_id)) for req_id in req_ids]
        return ModelRunnerOutput(
            req_ids,
            {req_id: index for index, req_id in enumerate(req_ids)},
            sampled,
            failed_req_ids=failed,
            pooler_output=self._pooled(ended),
        )

    def _pooled(self, ended: list[FinishedInfo]) -> dict[str, list[float]]:
        """Who got an embedding; what it was, no recording tells."""
        requests = self.scheduler.requests
        return {
            info.request_id: [] for info in ended if info.finish_reason == "stop" and requests[info.request_id].pooling_params is not None
        }

    def _hidden_tokens(self, req_id: str, event: StepResultEvent, end: FinishedInfo | None) -> list[int]:
        """As many as were sampled; the last accepted one ends the request if one did."""
        num_accepted = event.num_new_tokens.get(req_id, 0)
        token_ids = [HIDDEN_TOKEN_ID] * (num_accepted + event.num_dropped_tokens.get(req_id, 0))
        if end is not None and num_accepted:
            request = self.scheduler.requests[req_id]
            token_ids[num_accepted - 1] = end_token_id(request, end, num_accepted, eos_token_ids=self.scheduler.eos_token_ids)
        return token_ids

    def _learn_hashes(self, event: StepEvent | StepResultEvent) -> None:
        """Give requests the hashes that they come to in this event. Nobody looks further than a request's tokens reach."""
        if self._has_text:
            return
        added = {info.request_id for info in event.added}
        for req_id, hashes in event.block_hashes.items():
            request = self.scheduler.requests.get(req_id)
            if request is not None and req_id not in added:
                request.block_hashes += _read_hashes(hashes)


def _ended_in_update(event: StepResultEvent) -> list[FinishedInfo]:
    calls = [call for call in event.calls if call in ("finish", "ended")]
    return [info for call, info in zip(calls, event.finished, strict=True) if call == "ended"]


def _read_hashes(hashes: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in hashes]


def _kind(event: StepEvent | StepResultEvent) -> str:
    return "step" if isinstance(event, StepEvent) else "result"


def replay_frames(header: WireHeader, events: Iterable[Event], *, until: int | None = None) -> FrameReport:
    """Run a recording again, up to the frame of step `until`, and compare. Raises ConfigError if it cannot be run again."""
    replay = FrameReplay(header)
    num_steps = num_results = 0
    difference: Difference | None = None
    for event in list(steps_in_order(events, until=until)):  # all of them are looked at before the first is run
        difference = replay.take(event)
        if difference is not None:
            break
        num_steps += isinstance(event, StepEvent)
        num_results += isinstance(event, StepResultEvent)
    return FrameReport(num_steps, num_results, replay.scheduler.totals.num_preemptions, difference)
