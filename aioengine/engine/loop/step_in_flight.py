"""A step that the worker has not given back yet, and the watch over the one that it works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import StepTimeoutError
from aioengine.outputs import ModelRunnerOutput

_NUM_REQS_NAMED = 8  # in the message of a step that does not come back


class StepInFlight:
    """The two calls of one step. Owned by the core; the worker's thread only completes the futures."""

    __slots__ = ("_error", "execute", "output", "sample")

    def __init__(self, output: SchedulerOutput, *, execute: Future[None], sample: Future[ModelRunnerOutput]) -> None:
        self.output = output
        self.execute = execute
        self.sample = sample
        self._error: BaseException | None = None

    def is_ready(self) -> bool:
        """`result()` does not wait."""
        return self._error is not None or self.sample.done() or self._execute_failed()

    def result(self) -> ModelRunnerOutput:
        """The step's tokens; raises what it failed of."""
        if self._error is not None:
            raise self._error
        # After a failed forward the sampler fails too, or never returns: the forward's error is the cause of both.
        if self._execute_failed():
            self.execute.result()
        return self.sample.result()

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for the worker any more: the step fails with `error`."""
        self._error = error

    def _execute_failed(self) -> bool:
        return self.execute.done() and (self.execute.cancelled() or self.execute.exception() is not None)


class StepWatchdog:
    """Gives a step up that stays with the worker for longer than `timeout_s` seconds (None: it waits for ever).

    The worker takes steps in order, so it works on the oldest one: the clock of a step starts when it becomes that, not
    when it is submitted, and whatever the worker does in it counts, such as compiling kernels in the first steps. There
    is one timer for many steps: when it fires it looks how long the oldest has been there, and it is not set again when
    there is none. So an idle engine has no timer, and a busy one sets a timer once per `timeout_s`, not once a step.
    """

    def __init__(self, timeout_s: float | None, *, on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._step: StepInFlight | None = None
        self._since = 0.0  # of `loop.time()`
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, step: StepInFlight | None) -> None:
        """The worker turns to `step` now, or has none."""
        if self._timeout_s is None:
            return
        self._step = step
        if step is not None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._timeout_s, self._look)

    def stop(self) -> None:
        self._step = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        step = self._step
        if step is None:
            return
        assert self._timeout_s is not None
        loop = asyncio.get_running_loop()
        age = loop.time() - self._since
        if age >= self._timeout_s and not step.is_ready():
            step.give_up(StepTimeoutError(self._describe(step, age)))
            self._on_timeout()
            return
        # Or it is ready and this loop was late: then the worker is not to blame.
        self._timer = loop.call_later(max(self._timeout_s - age, self._timeout_s / 2), self._look)

    def _describe(self, step: StepInFlight, age: float) -> str:
        req_ids = list(step.output.num_scheduled_tokens)
        named = ", ".join(repr(req_id) for req_id in req_ids[:_NUM_REQS_NAMED])
        if len(req_ids) > _NUM_REQS_NAMED:
            named += f" and {len(req_ids) - _NUM_REQS_NAMED} more"
        return (
            f"the worker has been in step {step.output.step_id} for {age:.1f} s and step_timeout_s is {self._timeout_s:g}; "
            f"the requests of the step: {named or 'none (it only cleans up)'}"
        )
