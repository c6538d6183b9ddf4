"""From start to shutdown: what an `AsyncEngine` is built of, in which order, and how it is taken down again."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.core.scheduler import Scheduler
from aioengine.engine.admission import Admission
from aioengine.engine.detokenizer import TextTokenizer
from aioengine.engine.engine_core import EngineCore
from aioengine.engine.input_processor import InputProcessor
from aioengine.engine.output_processor import OutputProcessor
from aioengine.engine.publishing import Publisher, PublishOptions
from aioengine.engine.request_times import RequestTimes
from aioengine.engine.startup import find_parts, parts_for_executor
from aioengine.engine.submission import Submitter
from aioengine.errors import AioEngineError, ConfigError, EngineDeadError, StepTimeoutError
from aioengine.events.bus import StepBus
from aioengine.events.protocol import EngineControl
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
        self._loop = asyncio.get_running_loop()
        self._starting = self._loop.create_task(self._start(), name="aioengine-start")
        try:
            await self._starting
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
        self._publisher.record(self._model_info.name, resolved)

        await asyncio.wrap_future(executor.load_model())
        num_blocks = resolved.cache.num_kv_cache_blocks
        if num_blocks is None:
            num_blocks = await asyncio.wrap_future(executor.determine_num_kv_cache_blocks())
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
            on_failure=self._on_failure,
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
        """
        if drain_timeout is not None and not drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must be >= 0 seconds or None, got {drain_timeout!r}")
        if drain and self._stopping is None and self._core is not None:
            if self._draining is None:
                self._draining = asyncio.create_task(self._drain(self._core), name="aioengine-drain")
            _, late = await asyncio.wait([self._draining], timeout=drain_timeout)
            if late:
                logger.warning(
                    "%d requests have not ended within the drain_timeout of %g s and are cut off", self.num_unfinished_reqs, drain_timeout
                )
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="aioengine-stop")
        # Shielded: whoever waits for the end may be cancelled, and the worker must stop all the same.
        await asyncio.shield(self._stopping)

    @property
    def num_unfinished_reqs(self) -> int:
        """Requests that were taken in and have not ended; one with n continuations counts as n."""
        return 0 if self._core is None else len(self._core.scheduler.requests)

    @property
    def is_draining(self) -> bool:
        """`shutdown(drain=True)` was called: requests end, and none is taken in."""
        return self._draining is not None

    async def _drain(self, core: EngineCore) -> None:
        if core.is_paused and core.error is None:
            core.resume()
        await core.wait_until_idle()

    async def _stop(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._output is not None:
            self._output.fail_all(EngineDeadError("the engine was shut down"))
        if self._structured_output is not None:
            self._structured_output.shutdown()  # first of all: who waits for a grammar waits for nothing else
        if self._core is not None:
            await self._core.stop()
        if self._draining is not None:
            await asyncio.wait([self._draining])
        await self._stop_executor()
        await self._publisher.close()
        self._bus.close()

    def _stop_executor(self) -> asyncio.Task[None]:
        if self._executor_stopping is None:
            self._executor_stopping = asyncio.create_task(self._shutdown_executor(), name="aioengine-stop-executor")
        return self._executor_stopping

    async def _shutdown_executor(self) -> None:
        if self._executor is None:
            return
        is_stuck = self._core is not None and isinstance(self._core.error, StepTimeoutError)
        await shut_down_executor(self._executor, limit_s=_STUCK_EXECUTOR_SHUTDOWN_S if is_stuck else _EXECUTOR_SHUTDOWN_S)

    def _on_failure(self, error: BaseException) -> None:
        assert self._output is not None
        self._output.fail_all(error)
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # else the event loop itself is ending, and takes no new tasks
            self._stop_executor()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.shutdown()

    # ------------------------------------------------------------------ whether it runs
    def _running_core(self) -> EngineCore:
        """The core, if it can take a request from here; else raise what is wrong."""
        self._check_not_stopped()
        if self._core is None:
            raise AioEngineError("the engine is not started: use it inside `async with AsyncEngine(...)`, or await start() first")
        if asyncio.get_running_loop() is not self._loop:
            raise AioEngineError("the engine runs in another event loop: use it in the one that started it")
        self._core.check_health()
        if self._draining is not None:
            raise EngineDeadError("the engine is shutting down: it finishes its requests and takes no new ones")
        return self._core

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot take another step, AioEngineError if it is not started."""
        self._check_not_stopped()
        if self._core is None:
            raise AioEngineError("the engine is not started")
        self._core.check_health()

    def _check_not_stopped(self) -> None:
        if self._stopping is not None:
            raise EngineDeadError("the engine did not start" if self._start_error else "the engine was shut down") from self._start_error


async def shut_down_executor(executor: Executor, *, limit_s: float) -> None:
    """Shut it down in a thread of its own; after `limit_s` seconds leave that thread behind and say so in the log."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def shut_down() -> None:
        try:
            executor.shutdown()
        except Exception:
            logger.exception("the executor did not shut down cleanly")
        try:
            loop.call_soon_threadsafe(done.set_result, None)
        except RuntimeError:
            logger.warning("the executor did shut down in the end; its event loop was closed before")

    # Not `asyncio.to_thread`: Python would wait for that thread at exit, and for a step that never returns without end.
    threading.Thread(target=shut_down, name="aioengine-stop-executor", daemon=True).start()
    _, late = await asyncio.wait([done], timeout=limit_s)
    if late:
        logger.error("the executor has not shut down within %g s, because a call in it does not return: it is left behind", limit_s)
