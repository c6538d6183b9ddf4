"""From start to shutdown: what an `AsyncEngine` is built of, in which order, and how it is taken down again."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from aioengine.config import EngineConfig
from aioengine.engine.event_loops import check_loop, need_running_loop, wrong_loop
from aioengine.engine.kv_store import open_kv_connector
from aioengine.engine.loop.engine_core import EngineCore
from aioengine.engine.loop.executor_shutdown import shut_down_executor, shut_down_in_background
from aioengine.engine.outputs.deadline import check_seconds
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.engine.parts import EngineParts
from aioengine.engine.publish_options import PublishOptions
from aioengine.engine.publishing import Publisher
from aioengine.engine.run_facts import find_run_facts
from aioengine.engine.startup import build_parts, find_setup, load_model, setup_for_executor
from aioengine.errors import AioEngineError, ConfigError, EngineDeadError, StepTimeoutError
from aioengine.events.bus import StepBus
from aioengine.events.sources.base import EngineControl
from aioengine.executor.base import Executor
from aioengine.printable import get_logger
from aioengine.resolved_config import ModelInfo

logger = get_logger(__name__)

# How long `shutdown()` waits for the executor. A call may run that takes long and ends (loading a model); a step that was
# given up already has had its time.
_EXECUTOR_SHUTDOWN_S = 30.0
_STUCK_EXECUTOR_SHUTDOWN_S = 0.5
_SAVE_KV_CACHE_S = 60.0


class EngineLife:
    """Starts an engine and stops it. Does not know the `AsyncEngine`, so no task of it keeps one alive that was dropped."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None,
        tokenizer: TextTokenizer | None,
        model_info: ModelInfo | None,
        publish: PublishOptions,
    ) -> None:
        self.config = config
        self.executor = executor  # the user's, or from `start()` on the engine's own
        self.bus = StepBus()
        self.publisher = Publisher(publish, bus=self.bus)
        self.parts: EngineParts | None = None
        self._tokenizer = tokenizer
        self._model_info = model_info

        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._executor_stopping: asyncio.Task[None] | None = None
        self._start_error: BaseException | None = None

    # ------------------------------------------------------------------ start
    async def start(self, control: EngineControl) -> None:
        """As `AsyncEngine.start`. control: what viewers may be given."""
        if self._stopping is not None:
            raise EngineDeadError("this engine was shut down: build a new AsyncEngine")
        if self._starting is not None:
            raise AioEngineError("this engine was started before: an AsyncEngine is started, or used in `async with`, once")
        self._loop = need_running_loop("start()")
        self._starting = self._loop.create_task(self._start(control), name="aioengine-start")
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

    async def _start(self, control: EngineControl) -> None:
        self.publisher.bind()
        if self.executor is None:
            setup = await find_setup(self.config, tokenizer=self._tokenizer)
            self.executor = setup.executor
        else:
            setup = setup_for_executor(self.config, self.executor, tokenizer=self._tokenizer, model_info=self._model_info)
        setup, num_blocks = await load_model(setup)
        has_store = setup.config.cache.kv_cache_dir is not None
        facts = await find_run_facts(setup, with_digest=has_store or self.publisher.options.record is not None)
        self.publisher.record(setup.model_info.name, setup.config, num_kv_cache_blocks=num_blocks, facts=dataclasses.asdict(facts))
        await asyncio.wrap_future(setup.executor.initialize_kv_cache(num_blocks))
        parts = self.parts = build_parts(
            setup,
            num_kv_cache_blocks=num_blocks,
            bus=self.bus,
            publish_text=self.publisher.options.publish_text,
            on_failure=self._on_failure,
            kv_connector=await open_kv_connector(setup, facts),
        )
        for name, folder in setup.config.worker.loras:
            await parts.loras.load(name, folder)
        parts.core.start()
        await self.publisher.serve(snapshot=parts.core.make_snapshot, control=control)

    def _on_failure(self, error: BaseException) -> None:
        """A step failed: end the streams, and stop the executor. Called by the core."""
        assert self.parts is not None
        self.parts.output.fail_all(error)
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            # Else the event loop itself is ending, and takes no new tasks.
            self._stop_executor()

    # ------------------------------------------------------------------ shutdown
    async def shutdown(self, *, drain: bool = False, drain_timeout: float | None = None) -> None:
        """As `AsyncEngine.shutdown`."""
        wrong = check_seconds("drain_timeout", drain_timeout)
        if wrong is not None:
            raise ConfigError(wrong)
        loop = need_running_loop("shutdown()")
        if self.is_stopped:
            return
        if self._loop is not None and loop is not self._loop and not self._loop.is_closed():
            raise wrong_loop(self._loop, loop, "shutdown()")
        if drain and self._stopping is None and self.parts is not None and loop is self._loop:
            await self._drain(self.parts.core, drain_timeout)
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
    def is_stopped(self) -> bool:
        """`shutdown()` has come to its end."""
        stopping = self._stopping
        return stopping is not None and stopping.done() and not stopping.cancelled() and stopping.exception() is None

    @property
    def num_unfinished_reqs(self) -> int:
        return 0 if self.parts is None else len(self.parts.core.scheduler.requests)

    @property
    def is_draining(self) -> bool:
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
        if self.parts is not None:
            self.parts.output.fail_all(EngineDeadError("the engine was shut down"))
        await _each(
            self._stop_structured_output,
            self._stop_core,
            self._keep_kv_cache,
            self._wait_for_executor,
            self.publisher.close,
            self._close_bus,
        )

    async def _stop_after_loop(self) -> None:
        """As `_stop`, in another event loop, after the engine's own one was closed."""
        self._end_at_once()
        await _each(self._shutdown_executor, partial(asyncio.to_thread, self.publisher.close_recording))

    async def _stop_core(self) -> None:
        if self.parts is not None:
            await self.parts.core.stop()
        if self._draining is not None:
            await asyncio.wait([self._draining])

    async def _keep_kv_cache(self) -> None:
        """Save what the prefix cache holds, while the worker is still there, and close the store."""
        transfers = None if self.parts is None else self.parts.core.kv_transfers
        if transfers is None:
            return
        try:
            if self.parts is not None and self.parts.core.error is None:
                async with asyncio.timeout(_SAVE_KV_CACHE_S):
                    await transfers.save_all()
        except Exception as exc:
            logger.warning("not all of the KV cache was saved: %s", exc or f"it took longer than {_SAVE_KV_CACHE_S:g} s")
        await asyncio.to_thread(transfers.close)

    def _end_at_once(self) -> None:
        """Whatever can be ended without waiting: after the event loop was closed, or in it, when the engine was dropped."""
        if self.parts is not None:
            self.parts.output.fail_all(EngineDeadError("the engine was shut down"))
            self.parts.core.abandon()
            self.parts.structured_output.shutdown()
        self.publisher.abandon()
        self.bus.close()

    async def _stop_structured_output(self) -> None:
        if self.parts is not None:
            self.parts.structured_output.shutdown()

    async def _close_bus(self) -> None:
        self.bus.close()

    async def _wait_for_executor(self) -> None:
        await self._stop_executor()

    def _stop_executor(self) -> asyncio.Task[None]:
        if self._executor_stopping is None or self._executor_stopping.cancelled():
            self._executor_stopping = asyncio.create_task(self._shutdown_executor(), name="aioengine-stop-executor")
        return self._executor_stopping

    def _shutdown_executor(self) -> Coroutine[Any, Any, None]:
        is_stuck = self.parts is not None and isinstance(self.parts.core.error, StepTimeoutError)
        return shut_down_executor(self.executor, limit_s=_STUCK_EXECUTOR_SHUTDOWN_S if is_stuck else _EXECUTOR_SHUTDOWN_S)

    def drop(self, engine: object) -> None:
        """Called by the finalizer of the engine, in any thread."""
        if self._loop is None or self.is_stopped:
            return
        if not sys.is_finalizing():
            self._abandon(self._loop)
        warnings.warn(
            f"{type(engine).__name__} for {self.config.model!r} was dropped without being shut down: use `async with AsyncEngine(...)`, "
            "or `await engine.shutdown()` in the event loop that started it",
            ResourceWarning,
            source=engine,
            stacklevel=3,
        )

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nobody refers to the engine any more. In any thread."""
        try:
            loop.call_soon_threadsafe(self._end_at_once)
        except RuntimeError:  # the event loop was closed
            self._end_at_once()
        shut_down_in_background(self.executor, then=self.publisher.close_recording)

    # ------------------------------------------------------------------ whether it runs
    def started(self) -> EngineParts:
        """The parts, also after the engine was stopped. Raises AioEngineError if it was never started."""
        if self.parts is None:
            raise AioEngineError("the engine is not started")
        return self.parts

    def running(self, call: str) -> EngineParts:
        """The parts, if they can take a request from here; else raise what is wrong. call: what the caller was asked for."""
        parts = self._unstopped()
        check_loop(parts.loop, call)
        parts.core.check_health()
        if self._draining is not None:
            raise EngineDeadError("the engine is shutting down: it finishes its requests and takes no new ones")
        return parts

    def check_health(self) -> None:
        parts = self._unstopped()
        parts.core.check_health()
        if parts.loop.is_closed():
            raise EngineDeadError("the engine can take no step: the event loop that it was started in was closed")

    def _unstopped(self) -> EngineParts:
        if self._stopping is not None:
            raise EngineDeadError("the engine did not start" if self._start_error else "the engine was shut down") from self._start_error
        if self.parts is None:
            raise self._not_started()
        return self.parts

    def _not_started(self) -> AioEngineError:
        if self._starting is not None:
            return AioEngineError("the engine is not started yet: wait until start() has returned")
        return AioEngineError("the engine is not started: use it inside `async with AsyncEngine(...)`, or await start() first")

    def check_nobody_else_runs(self, call: str) -> None:
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
