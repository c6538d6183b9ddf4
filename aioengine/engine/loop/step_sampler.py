"""The second half of a step: when the worker is told to sample, and with which masks."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future
from dataclasses import dataclass

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.executor.base import Executor, GrammarOutput, hand_on
from aioengine.outputs import ModelRunnerOutput
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import GrammarError


@dataclass(frozen=True, slots=True)
class MaskTiming:
    """When the masks of a step were computed, in seconds of `time.perf_counter()`."""

    start: float
    end: float


class StepSampler:
    """Calls `sample_tokens` once for each step that was executed, in their order.

    As a rule right behind `execute_model`. A step that samples for a request with structured output needs that request's
    mask, and so the token before; if that one is still being sampled, the call waits until it has been taken in. The forward
    of the step runs meanwhile: the masks are computed beside it in either case. No step may be submitted behind one that
    waits (`is_waiting`), because the worker samples the oldest step that it has executed.

    A request whose grammar cannot go on fails alone, as if the worker had failed to sample for it.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, *, structured_output: StructuredOutputManager | None) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._structured_output = structured_output
        self._waiting: tuple[SchedulerOutput, Future[ModelRunnerOutput]] | None = None
        self._mask_timings: dict[int, MaskTiming] = {}  # by step id, of steps in flight
        self._failures: dict[int, dict[str, str]] = {}  # by step id: requests whose mask could not be computed, and why

    @property
    def is_waiting(self) -> bool:
        """A step has been executed, or is being executed, and its sampling is not submitted yet."""
        return self._waiting is not None

    def submit(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Sample for `output`, which was just handed to `execute_model`: now, or when `note_updated` allows it."""
        assert self._waiting is None, "a step was executed behind one that waits to be sampled"
        if not output.structured_output_request_ids or self._structured_output is None:
            return self._executor.sample_tokens()
        if self._knows_tokens_before(output):
            return self._executor.sample_tokens(self._compute_masks(output))
        future: Future[ModelRunnerOutput] = Future()
        self._waiting = output, future
        return future

    def note_updated(self) -> None:
        """The scheduler has taken in a step. What waited for its tokens is submitted."""
        if self._waiting is not None and self._knows_tokens_before(self._waiting[0]):
            (scheduler_output, future), self._waiting = self._waiting, None
            sampled = self._executor.sample_tokens(self._compute_masks(scheduler_output))
            sampled.add_done_callback(lambda done: hand_on(done, future, deliver=future.set_result))

    def take_mask_timing(self, step_id: int) -> MaskTiming | None:
        """Of a step that came back; None if it needed no mask."""
        return self._mask_timings.pop(step_id, None)

    def check(self, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """The result of a step, and in it the requests that fail: their mask could not be computed, or does not fit the token.

        The tokens of the others are taken in by their grammars. To be called once for each step, before the scheduler sees it.
        """
        if self._structured_output is None or not output.structured_output_request_ids:
            return result
        failures = self._failures.pop(output.step_id, {})
        for req_id in self._with_grammar(output):
            if req_id not in failures and req_id not in result.failed_req_ids:
                token_ids = result.sampled_token_ids[result.req_id_to_index[req_id]]
                if (cause := self._structured_output.accept(req_id, token_ids)) is not None:
                    failures[req_id] = f"the structured output cannot go on: {cause}"
        return dataclasses.replace(result, failed_req_ids={**result.failed_req_ids, **failures}) if failures else result

    def _with_grammar(self, output: SchedulerOutput) -> list[str]:
        """The requests of a step that need a mask, in the step's order; not those that have ended meanwhile."""
        wanted, live = output.structured_output_request_ids, self._structured_output
        return [req_id for req_id in output.num_scheduled_tokens if live is not None and req_id in wanted and req_id in live]

    def _knows_tokens_before(self, output: SchedulerOutput) -> bool:
        """No older step still samples for a request that needs a mask in this one, which itself counts as one placeholder."""
        requests = self._scheduler.requests
        return all(
            (request := requests.get(req_id)) is None or request.num_output_placeholders <= 1
            for req_id in output.structured_output_request_ids
        )

    def _compute_masks(self, output: SchedulerOutput) -> GrammarOutput:
        assert self._structured_output is not None
        start = time.perf_counter()
        bitmasks: dict[str, bytes] = {}
        for req_id in self._with_grammar(output):
            try:
                bitmasks[req_id] = self._structured_output.bitmask(req_id)
            except GrammarError as exc:
                self._failures.setdefault(output.step_id, {})[req_id] = f"the structured output cannot go on: {exc}"
        self._mask_timings[output.step_id] = MaskTiming(start, time.perf_counter())
        return GrammarOutput(bitmasks)
