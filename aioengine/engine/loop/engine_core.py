"""The overlapped step loop: one asyncio task that owns the scheduler and the executor and knows nothing about text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from aioengine.core.invariants import check_no_leak, check_scheduler
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput, SchedulerStats
from aioengine.engine.loop.core_events import CoreEvents, describe
from aioengine.engine.loop.engine_snapshot import TextSource
from aioengine.engine.loop.kv_transfers import KVTransfers
from aioengine.engine.loop.request_times import RequestTimes
from aioengine.engine.loop.step_gate import StepGate, StepWaiter
from aioengine.engine.loop.step_in_flight import StepInFlight, StepWatchdog
from aioengine.engine.loop.step_sampler import StepSampler
from aioengine.errors import EngineDeadError
from aioengine.events.bus import StepBus
from aioengine.events.step_event import EngineSnapshot, SchedulerCall
from aioengine.executor.base import Executor
from aioengine.kv_connector.base import KVConnector
from aioengine.outputs import EngineCoreOutput, FinishReason, ModelRunnerOutput
from aioengine.printable import get_logger
from aioengine.request import Request, RequestStatus
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import CompiledGrammar

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request that the output side ends: a stop string was found, or its output could not be processed."""

    request_id: str
    status: RequestStatus
    stop_reason: int | str | None = None


OutputCallback = Callable[[list[EngineCoreOutput]], Sequence[RequestEnd]]
"""Takes the outputs of one step, in the loop and without waiting; returns the requests to end because of them."""

FailureCallback = Callable[[BaseException], None]


class EngineCore:
    """Schedules, executes, samples and updates, with up to `max_concurrent_batches` steps in flight.

    Everything here runs in one event loop. Adding and ending requests takes effect at once: the loop's task waits
    nowhere but between two calls of the scheduler, so a request that ends while its step is in flight is gone before
    that step's tokens are taken in. With nothing to do the task sleeps on an event and uses no CPU.

    When anything in a step raises, the failure is logged, handed to `on_failure`, and the core stays dead. So it does when
    the worker does not come back from a step within `step_timeout_s` (see `StepWatchdog`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        bus: StepBus,
        on_outputs: OutputCallback,
        on_failure: FailureCallback,
        check_invariants: bool = False,
        step_timeout_s: float | None = None,
        text_source: TextSource | None = None,
        structured_output: StructuredOutputManager | None = None,
        times: RequestTimes | None = None,
        kv_connector: KVConnector | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._max_concurrent_batches = scheduler.config.max_concurrent_batches
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._check_invariants = check_invariants
        self._events = CoreEvents(scheduler, bus, text_source=text_source)
        self._structured_output = structured_output
        self._times = times if times is not None else RequestTimes()
        self.kv_transfers: KVTransfers | None = None
        if kv_connector is not None:
            self.kv_transfers = KVTransfers(kv_connector, executor, scheduler=scheduler, on_loaded=self._finish_load)
        self._sampler = StepSampler(executor, scheduler, structured_output=structured_output)

        self._in_flight: deque[StepInFlight] = deque()
        self._wake_up = asyncio.Event()  # a request came or went, or the worker has a result
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._gate = StepGate()
        self._watchdog = StepWatchdog(step_timeout_s, on_timeout=self._wake_up.set)
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._current: SchedulerOutput | None = None  # the step that is being handled, for the log of a failure

    # ------------------------------------------------------------------ life
    def start(self) -> None:
        """Start the loop's task in the running event loop."""
        assert self._task is None, "a core is started once"
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(), name="aioengine-core")

    async def stop(self) -> None:
        """End all requests and the loop's task. Steps in flight are left to the executor's shutdown."""
        if not self._stopped and self._error is None:
            self._stopped = True
            self.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
            self._publish_snapshot()
        self._end_waiting(EngineDeadError("the engine was shut down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def abandon(self) -> None:
        """Stop without waiting for anything: in the event loop, or after it was closed, when nobody can wait any more."""
        assert self._loop is not None
        if not self._stopped and self._error is None:
            self._stopped = True
            self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        if self._loop.is_closed():
            return
        self._end_waiting(EngineDeadError("the engine was shut down"))
        if self._task is not None:
            self._task.cancel()

    @property
    def is_idle(self) -> bool:
        """No request lives, no step is in flight, and the worker has forgotten whatever ended."""
        return not self._in_flight and not self.scheduler.has_work

    async def wait_until_idle(self) -> None:
        """Return once no request lives and the worker has forgotten whatever ended, or no further step can be taken."""
        if self.is_idle or self._error is not None or self._stopped:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle_waiters.append(waiter)
        await waiter

    @property
    def error(self) -> BaseException | None:
        """What the core died of, if it did."""
        return self._error

    def check_health(self) -> None:
        """Raise EngineDeadError if no further step can be taken."""
        if self._error is not None:
            raise EngineDeadError(f"the engine died of {type(self._error).__name__}: {self._error}") from self._error
        if self._stopped:
            raise EngineDeadError("the engine was shut down")
        self.executor.check_health()

    # ------------------------------------------------------------------ requests in and out
    def add_request(self, request: Request, *, prompt: str | None = None, grammar: CompiledGrammar | None = None) -> None:
        """Hand a request to the scheduler. Raises InvalidRequestError if it cannot run, EngineDeadError if nothing can."""
        self.check_health()
        self.scheduler.add_request(request)
        self._events.note_added(request, prompt=prompt)  # at once: what fails below ends a request that observers know
        if grammar is not None:
            assert self._structured_output is not None
            self._structured_output.add(request.request_id, grammar, request.sampling_params)
        self._times.note_added(request.request_id, arrival_time=request.arrival_time, now=time.perf_counter())
        self._wake_up.set()

    def knows(self, request_id: str) -> bool:
        """The id is in use: by a live request, or by one that the worker has not forgotten yet."""
        return request_id in self.scheduler.requests or self.scheduler.is_lingering(request_id)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[str]:
        """End requests at once; unknown and ended ids are ignored. Returns the ids that this call ended."""
        if self._error is not None:
            return []  # the scheduler stays as the failure left it
        return self._finish([RequestEnd(request_id, status) for request_id in request_ids])

    def _finish(self, ends: Sequence[RequestEnd]) -> list[str]:
        ended: list[str] = []
        for end in ends:
            for request in self.scheduler.finish_requests([end.request_id], end.status):
                reason = end.status.finish_reason
                assert reason is not None
                self._note_finished(request.request_id, reason, end.stop_reason, by="finish")
                ended.append(request.request_id)
        if ended:
            self._wake_up.set()
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `Scheduler.reset_prefix_cache`, also while steps are in flight. Raises EngineDeadError if running requests are to
        be reset and nothing can run any more.
        """
        if not reset_running_requests:
            self._events.note_reset(reset_running_requests=False)
            return self.scheduler.reset_prefix_cache()
        self.check_health()
        self._events.note_reset(reset_running_requests=True)
        is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._wake_up.set()  # who was preempted waits again
        return is_reset

    def _finish_load(self, request_id: str, num_blocks: int) -> None:
        """Blocks of a waiting request were loaded: it can run now."""
        if self._error is None and not self._stopped:
            self._events.note_loaded(request_id, num_blocks)
            self.scheduler.finish_load(request_id, num_blocks)
            self._wake_up.set()

    # ------------------------------------------------------------------ pausing
    @property
    def is_paused(self) -> bool:
        return self._gate.is_paused

    def pause(self) -> None:
        """Schedule no further step until `resume()`; those in flight end as usual. Requests still come and go. Idempotent."""
        self.check_health()
        if not self._gate.is_paused:
            self._gate.is_paused = True
            self._publish_snapshot()

    def resume(self) -> None:
        """Undo `pause()`. Idempotent."""
        self.check_health()
        if self._gate.is_paused:
            self._gate.nothing_to_run()
            self._gate.is_paused = False
            self._publish_snapshot()
            self._wake_up.set()

    def step(self) -> StepWaiter:
        """Let one step run while paused. Its id comes when its tokens have been taken in, None if there is nothing to run.

        Raises AioEngineError if the engine is not paused.
        """
        self.check_health()
        waiter = self._gate.allow_one()
        self._wake_up.set()
        return waiter

    # ------------------------------------------------------------------ the loop
    async def _run(self) -> None:
        try:
            while True:
                await self._run_until_idle()
                self._wake_up.clear()  # what it was set for is done
                self._become_idle()
                await self._wait()
        except asyncio.CancelledError:
            if not self._stopped:  # the event loop is being torn down around us: let nobody wait for tokens
                self._die(EngineDeadError("the engine's task was cancelled"))
            raise
        except GeneratorExit:
            raise  # the event loop is gone, and this task is garbage
        except BaseException as exc:  # a panic in a library written in Rust is no Exception, nor is KeyboardInterrupt
            self._log_failure(exc)
            self._die(exc)
            if isinstance(exc, (KeyboardInterrupt, SystemExit)):
                raise

    async def _run_until_idle(self) -> None:
        while True:
            while self._may_schedule() and self._schedule_step():
                pass
            if not self._in_flight:
                if not self.scheduler.has_work or not self._gate.is_open:
                    return
                if self.scheduler.loading:
                    await self._wait()  # for blocks that come from the KV connector
                    continue
                raise AssertionError("requests wait, no step is in flight, and the scheduler has nothing to run")
            step = self._in_flight[0]
            if step.is_ready():
                # Other coroutines get their turn after each step, also when the worker is faster than this loop.
                await asyncio.sleep(0)
            else:
                await self._wait()
                if not step.is_ready():
                    continue  # a request came or went: there may be a step to schedule
            self._in_flight.popleft()
            self._watchdog.watch(self._in_flight[0] if self._in_flight else None)
            self._update_step(step)

    def _may_schedule(self) -> bool:
        return len(self._in_flight) < self._max_concurrent_batches and self._gate.is_open and not self._sampler.is_waiting

    async def _wait(self) -> None:
        await self._wake_up.wait()
        self._wake_up.clear()

    def _schedule_step(self) -> bool:
        """Schedule a step and enqueue it on the worker; False if there is nothing to schedule."""
        schedule_start = time.perf_counter()
        output = self.scheduler.schedule()
        schedule_end = time.perf_counter()
        self._times.note_schedule(output, stop=self.scheduler.admission_stop, now=schedule_start)
        if output is None:
            return False
        self._current = output
        if self.kv_transfers is not None:
            self.kv_transfers.before_step(output)
        execute = self.executor.execute_model(output)
        sample = self._sampler.submit(output)
        step = StepInFlight(output, execute=execute, sample=sample)
        self._in_flight.append(step)
        if len(self._in_flight) == 1:
            self._watchdog.watch(step)
        self._gate.note_scheduled(output.step_id)
        execute.add_done_callback(self._on_execute_done)
        sample.add_done_callback(self._on_worker_done)
        self._events.publish_step(output, queue_depth=len(self._in_flight), schedule_start=schedule_start, schedule_end=schedule_end)
        if self._events.wants_snapshot_at(output.step_id):
            self._publish_snapshot()
        return True

    def _update_step(self, step: StepInFlight) -> None:
        """Take in the tokens of the oldest step and pass them on."""
        self._current = step.output
        result = self._sampler.check(step.output, step.result())
        update_start = time.perf_counter()
        self._events.note_update()
        outputs = self.scheduler.update_from_output(step.output, result)
        self._sampler.note_updated()  # before anything else: the worker may wait for it
        update_end = time.perf_counter()
        ends = self._on_outputs(outputs)
        self._collect_finished(outputs, ends)
        self._finish(ends)
        self._events.publish_result(
            step.output.step_id,
            outputs,
            result=result,
            masks=self._sampler.take_mask_timing(step.output.step_id),
            queue_depth=len(self._in_flight),
            update_start=update_start,
            update_end=update_end,
        )
        self._current = None
        self._gate.note_done(step.output.step_id)

    def _collect_finished(self, outputs: list[EngineCoreOutput], ends: Sequence[RequestEnd]) -> None:
        """Note the requests that the scheduler itself ended, by a stop token or the length.

        A stop string in the text of the last token goes before: it is what the user is told too.
        """
        by_id = {end.request_id: end for end in ends}
        for output in outputs:
            if output.finish_reason is None:
                continue
            reason, stop_reason = output.finish_reason, output.stop_reason
            end = by_id.get(output.request_id)
            if end is not None and end.status.finish_reason is not None:
                reason, stop_reason = end.status.finish_reason, end.stop_reason
            self._note_finished(output.request_id, reason, stop_reason, by="ended")

    def _note_finished(self, request_id: str, reason: FinishReason, stop_reason: int | str | None, *, by: SchedulerCall) -> None:
        self._events.note_finished(request_id, reason, stop_reason, by=by)
        if self._structured_output is not None:
            self._structured_output.remove(request_id)

    def _become_idle(self) -> None:
        """Nothing can run: there is no work, or the engine is paused."""
        self._gate.nothing_to_run()
        if not self.scheduler.has_work:
            check_no_leak(self.scheduler)
            self._answer_idle_waiters()
        if self._check_invariants:
            check_scheduler(self.scheduler)
        if self._events.has_news:
            # A request came and went without a step, so no StepEvent follows: observers must not go on showing it.
            self._publish_snapshot()

    # ------------------------------------------------------------------ called in the worker's thread
    def _on_execute_done(self, future: Future[None]) -> None:
        if future.cancelled() or future.exception() is not None:
            self._notify()

    def _on_worker_done(self, _: Future[ModelRunnerOutput]) -> None:
        self._notify()

    def _notify(self) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop was closed with steps in flight: nobody waits any more
            self._loop.call_soon_threadsafe(self._wake_up.set)

    # ------------------------------------------------------------------ what others may know
    def make_stats(self) -> SchedulerStats:
        return self.scheduler.make_stats()

    def _publish_snapshot(self) -> None:
        self._events.publish_snapshot(in_flight=[step.output for step in self._in_flight], paused=self._gate.is_paused)

    def make_snapshot(self) -> EngineSnapshot:
        """The full state, as it stands between two calls of the scheduler."""
        return self._events.make_snapshot(in_flight=[step.output for step in self._in_flight], paused=self._gate.is_paused)

    # ------------------------------------------------------------------ failure
    def _log_failure(self, exc: BaseException) -> None:
        step = "no step" if self._current is None else describe(self._current)
        logger.error(
            "the engine stops: %s: %s\nwhile it handled %s\n%s",
            type(exc).__name__,
            exc,
            step,
            self._events.describe_recent(),
            exc_info=exc,
        )

    def _die(self, exc: BaseException) -> None:
        self._error = exc
        self._end_waiting(EngineDeadError(f"the engine died of {type(exc).__name__}: {exc}"))
        self._on_failure(exc)

    def _end_waiting(self, error: BaseException) -> None:
        """No step will come back any more."""
        self._watchdog.stop()
        self._gate.fail(error)
        self._answer_idle_waiters()

    def _answer_idle_waiters(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
