"""From start to shutdown: what an `AsyncEngine` is built of, in which order, and how it is taken down again."""

from __future__ import annotations

import asyncio
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self

from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.core.scheduler import Scheduler
from aioengine.engine.admission import Admission
from aioengine.engine.deadline import check_seconds
from aioengine.engine.detokenizer import TextTokenizer
from aioengine.engine.engine_core import EngineCore
from aioengine.engine.event_loops import check_loop, need_running_loop, wrong_loop
from aioengine.engine.executor_shutdown import shut_down_executor, shut_down_in_background
from aioengine.engine.input_processor import InputProcessor
from aioengine.engine.output_processor import OutputProcessor
from aioengine.engine.publishing import Publisher, PublishOptions
from aioengine.engine.request_times import RequestTimes
from aioengine.engine.startup import find_parts, parts_for_executor
from aioengine.engine.submission import Submitter
from aioengine.errors import AioEngineError, ConfigError, EngineDeadError, StepTimeoutError
from aioengine.events.bus import StepBus
from aioengine.events.sources.base import EngineControl
from aioengine.executor.base import Executor
from aioengine.printable import get_logger
from aioengine.structured_output.manager import StructuredOutputManager

logger = get_logger(__name__)

# How long `shutdown()` waits for the executor. A call may run that takes long and ends (loading a model); a step that was
# given up already has had its time.
_EXECUTOR_SHUTDOWN_S = 30.0
_STUCK_EXECUTOR_SHUTDOWN_S = 0.5


class EngineLife(ABC):
    """The half of `AsyncEngine` that starts and stops; its parts are None until they exist."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None,
        tokenizer: TextTokenizer | None,
        model_info: ModelInfo | None,
        publish: PublishOptions,
    ) -> None:
        self._config = config
        self._executor = executor
        self._tokenizer = tokenizer
        self._model_info = model_info
        self._bus = StepBus()
        self._publisher = Publisher(publish, bus=self._bus)
        self._resolved: ResolvedConfig | None = None
        self._input: InputProcessor | None = None
        self._output: OutputProcessor | None = None
        self._core: EngineCore | None = None
        self._admission: Admission | None = None
        self._structured_output: StructuredOutputManager | None = None
        self._submitter: Submitter | None = None

        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._executor_stopping: asyncio.Task[None] | None = None
        self._start_error: BaseException | None = None

    @property
    @abstractmethod
    def control(self) -> EngineControl: ...

    # ------------------------------------------------------------------ start
    async def start(self) -> None:
        """Find and load the model and start the step loop. On failure everything that was started is stopped again.

        Raises ModelError, ConfigError (settings that contradict the model), AioEngineError (it was started before).
        """
        if self._stopping is not None:
            raise EngineDeadError("this engine was shut down: build a new AsyncEngine")
        if self._starting is not None:
            raise AioEngineError("this engine was started before: an AsyncEngine is started, or used in `async with`, once")
        self._loop = need_running_loop("start()")
        self._starting = self._loop.create_task(self._start(), name="aioengine-start")
        try:
            await self._starting
        except GeneratorExit:
            raise  # the event loop was closed around this: nothing can be awaited any more
        except BaseException as exc:
            self._start_error = exc
            stopped_meanwhile = self._stopping is not None
            await self.shutdown()
            if stopped_meanwhile and isinstance(exc, asyncio.CancelledError):
                raise EngineDeadError("the engine was shut down while it was starting") from None
            raise

    async def _start(self) -> None:
        self._publisher.bind()
        if self._executor is None:
            parts = await find_parts(self._config, tokenizer=self._tokenizer)
        else:
            parts = parts_for_executor(self._config, self._executor, tokenizer=self._tokenizer, model_info=self._model_info)
        executor = self._executor = parts.executor
        resolved = self._resolved = parts.config
        self._model_info, self._tokenizer = parts.model_info, parts.tokenizer

        await asyncio.wrap_future(executor.load_model())
        num_blocks = resolved.cache.num_kv_cache_blocks
        if num_blocks is None:
            num_blocks = await asyncio.wrap_future(executor.determine_num_kv_cache_blocks())
        resolved = self._resolved = resolved.fitted(num_blocks)
        self._publisher.record(self._model_info.name, resolved)
        await asyncio.wrap_future(executor.initialize_kv_cache(num_blocks))
        core = self._start_core(executor, resolved, num_blocks)
        await self._publisher.serve(snapshot=core.make_snapshot, control=self.control)

    def _start_core(self, executor: Executor, resolved: ResolvedConfig, num_blocks: int) -> EngineCore:
        scheduler = Scheduler(
            resolved.scheduler,
            cache=resolved.cache,
            num_kv_cache_blocks=num_blocks,
            eos_token_ids=resolved.model.eos_token_ids,
            check_invariants=resolved.check_invariants,
        )
        self._admission = Admission(resolved.admission, scheduler)
        model = resolved.model
        structured_output = self._structured_output = StructuredOutputManager(
            self._tokenizer, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        self._input = InputProcessor(
            resolved.model,
            self._tokenizer,
            max_model_len=resolved.scheduler.max_model_len,
            max_tokens_limit=scheduler.max_tokens_limit,
            seed=resolved.seed,
            structured_output=structured_output,
        )
        publish_text = self._publisher.options.publish_text
        times = RequestTimes()
        self._output = OutputProcessor(self._tokenizer, publish_text=publish_text, times=times)
        self._core = EngineCore(
            scheduler,
            executor,
            bus=self._bus,
            on_outputs=self._output.process_outputs,
            on_failure=_failure_callback(self._output, weakref.ref(self)),
            check_invariants=resolved.check_invariants,
            step_timeout_s=resolved.admission.step_timeout_s,
            text_source=self._output if publish_text else None,
            structured_output=structured_output,
            times=times,
        )
        self._submitter = Submitter(self._core, self._output, publish_text=publish_text)
        self._core.start()
        return self._core

    # ------------------------------------------------------------------ shutdown
    async def shutdown(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        """Stop for good: live streams end with EngineDeadError, the worker stops, a recording is closed. Idempotent.

        drain: first let the requests that were taken in run to their end. New ones are refused with EngineDeadError from
            now on, and a paused engine is resumed.
        drain_timeout: seconds after which the rest is cut off all the same; None: no limit. A second `shutdown()`, without
            `drain`, cuts them off at once.

        An executor that does not come back, because a step hangs in its device, is left behind with a message in the log.

        Belongs into the event loop that started the engine, and raises AioEngineError in another one. Once that loop was
        closed, any loop will do: nothing can be drained then, but the worker, the recording and the socket are closed.
        """
        wrong = check_seconds("drain_timeout", drain_timeout)
        if wrong is not None:
            raise ConfigError(wrong)
        loop = need_running_loop("shutdown()")
        if self._is_stopped:
            return
        if self._loop is not None and loop is not self._loop and not self._loop.is_closed():
            raise wrong_loop(self._loop, loop, "shutdown()")
        if drain and self._stopping is None and self._core is not None and loop is self._loop:
            await self._drain(self._core, drain_timeout)
        # Shielded: whoever waits for the end may be cancelled, and the worker must stop all the same.
        await asyncio.shield(self._stop_soon(loop))

    def _stop_soon(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """The task that stops the engine. A new one, if the last was cancelled, failed, or lost its event loop."""
        stopping = self._stopping
        if stopping is not None and not stopping.done() and not stopping.get_loop().is_closed():
            if stopping.get_loop() is not loop:
                raise wrong_loop(stopping.get_loop(), loop, "shutdown()")
            return stopping
        stop = self._stop() if self._loop is None or self._loop is loop else self._stop_after_loop()
        self._stopping = loop.create_task(stop, name="aioengine-stop")
        return self._stopping

    @property
    def _is_stopped(self) -> bool:
        """`shutdown()` has come to its end."""
        stopping = self._stopping
        return stopping is not None and stopping.done() and not stopping.cancelled() and stopping.exception() is None

    @property
    def num_unfinished_reqs(self) -> int:
        """Requests that were taken in and have not ended; one with n continuations counts as n."""
        return 0 if self._core is None else len(self._core.scheduler.requests)

    @property
    def is_draining(self) -> bool:
        """`shutdown(drain=True)` was called: requests end, and none is taken in."""
        return self._draining is not None

    async def _drain(self, core: EngineCore, limit_s: float | None) -> None:
        if self._draining is None:
            self._draining = asyncio.create_task(_end_requests(core), name="aioengine-drain")
        _, late = await asyncio.wait([self._draining], timeout=limit_s)
        if late:
            logger.warning("%d requests have not ended within the drain_timeout of %g s and are cut off", self.num_unfinished_reqs, limit_s)

    async def _stop(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._output is not None:
            self._output.fail_all(EngineDeadError("the engine was shut down"))
        await _each(self._stop_structured_output, self._stop_core, self._wait_for_executor, self._publisher.close, self._close_bus)

    async def _stop_after_loop(self) -> None:
        """As `_stop`, in another event loop, after the engine's own one was closed."""
        self._end_at_once()
        await _each(self._shutdown_executor, partial(asyncio.to_thread, self._publisher.close_recording))

    async def _stop_core(self) -> None:
        if self._core is not None:
            await self._core.stop()
        if self._draining is not None:
            await asyncio.wait([self._draining])

    def _end_at_once(self) -> None:
        """Whatever can be ended without waiting: after the event loop was closed, or in it, when the engine was dropped."""
        if self._output is not None:
            self._output.fail_all(EngineDeadError("the engine was shut down"))
        if self._core is not None:
            self._core.abandon()
        if self._structured_output is not None:
            self._structured_output.shutdown()
        self._publisher.abandon()
        self._bus.close()

    async def _stop_structured_output(self) -> None:
        if self._structured_output is not None:
            self._structured_output.shutdown()

    async def _close_bus(self) -> None:
        self._bus.close()

    async def _wait_for_executor(self) -> None:
        await self._stop_executor()

    def _stop_executor(self) -> asyncio.Task[None]:
        if self._executor_stopping is None or self._executor_stopping.cancelled():
            # Of a function and not a method: a task does not keep an engine alive that was dropped.
            self._executor_stopping = asyncio.create_task(self._shutdown_executor(), name="aioengine-stop-executor")
        return self._executor_stopping

    def _shutdown_executor(self) -> Coroutine[Any, Any, None]:
        is_stuck = self._core is not None and isinstance(self._core.error, StepTimeoutError)
        return shut_down_executor(self._executor, limit_s=_STUCK_EXECUTOR_SHUTDOWN_S if is_stuck else _EXECUTOR_SHUTDOWN_S)

    def __del__(self) -> None:
        loop: asyncio.AbstractEventLoop | None = getattr(self, "_loop", None)  # missing: the constructor failed
        if loop is None or self._is_stopped:
            return
        if not sys.is_finalizing():
            self._abandon(loop)
        warnings.warn(
            f"{type(self).__name__} for {self._config.model!r} was dropped without being shut down: use `async with AsyncEngine(...)`, "
            "or `await engine.shutdown()` in the event loop that started it",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody refers to the engine any more. In any thread."""
        try:
            loop.call_soon_threadsafe(self._end_at_once)
        except RuntimeError:  # the event loop was closed
            self._end_at_once()
        shut_down_in_background(self._executor, then=self._publisher.close_recording)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.shutdown()

    # ------------------------------------------------------------------ whether it runs
    def _running_core(self, call: str) -> EngineCore:
        """The core, if it can take a request from here; else raise what is wrong. call: what the caller was asked for."""
        self._check_not_stopped()
        if self._core is None:
            raise self._not_started()
        check_loop(self._loop, call)
        self._core.check_health()
        if self._draining is not None:
            raise EngineDeadError("the engine is shutting down: it finishes its requests and takes no new ones")
        return self._core

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot take another step, AioEngineError if it is not started."""
        self._check_not_stopped()
        if self._core is None:
            raise self._not_started()
        self._core.check_health()
        if self._loop is not None and self._loop.is_closed():
            raise EngineDeadError("the engine can take no step: the event loop that it was started in was closed")

    def _not_started(self) -> AioEngineError:
        if self._starting is not None:
            return AioEngineError("the engine is not started yet: wait until start() has returned")
        return AioEngineError("the engine is not started: use it inside `async with AsyncEngine(...)`, or await start() first")

    def _check_not_stopped(self) -> None:
        if self._stopping is not None:
            raise EngineDeadError("the engine did not start" if self._start_error else "the engine was shut down") from self._start_error

    def _check_nobody_else_runs(self, call: str) -> None:
        """Raise AioEngineError if the event loop of the engine runs in another thread: what `call` reads changes there."""
        if self._loop is not None and self._loop.is_running():
            check_loop(self._loop, call)


async def _each(*parts: Callable[[], Awaitable[None]]) -> None:
    """Do all of them, also if one fails, and then raise what the first one failed of.

    Not so when this is cancelled or its event loop was closed: then nothing more can be awaited here.
    """
    errors = []
    for part in parts:
        try:
            await part()
        except Exception as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


async def _end_requests(core: EngineCore) -> None:
    if core.is_paused and core.error is None:
        core.resume()
    await core.wait_until_idle()


def _failure_callback(output: OutputProcessor, engine: weakref.ref[EngineLife]) -> Callable[[BaseException], None]:
    """Ends the streams, and stops the executor. Called by the core, which must not keep an engine alive that was dropped."""

    def on_failure(error: BaseException) -> None:
        output.fail_all(error)
        living, task = engine(), asyncio.current_task()
        if living is not None and task is not None and not task.cancelling():
            # Else the event loop itself is ending, and takes no new tasks.
            living._stop_executor()

    return on_failure
