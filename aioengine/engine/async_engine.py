"""`AsyncEngine`: the engine as an asyncio program sees it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine.batch import collect_batch, naming_prompt, params_for_each
from aioengine.engine.detokenizer import TextTokenizer
from aioengine.engine.engine_core import EngineCore
from aioengine.engine.event_control import EngineController
from aioengine.engine.input_processor import InputProcessor, ProcessedInput, Prompt, check_request_options
from aioengine.engine.output_collector import OutputCollector
from aioengine.engine.output_processor import OutputProcessor
from aioengine.engine.publishing import Publisher, PublishOptions
from aioengine.engine.startup import find_parts, parts_for_executor
from aioengine.errors import AioEngineError, EngineDeadError, InvalidRequestError
from aioengine.events.bus import DEFAULT_MAXLEN, StepBus, Subscription
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader
from aioengine.executor.base import Executor
from aioengine.outputs import RequestOutput
from aioengine.request import Request, RequestStatus
from aioengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncEngine:
    """Generates text for any number of concurrent requests, batched step by step.

        async with AsyncEngine("smollm2", max_num_seqs=32) as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(output.text_delta, end="", flush=True)

    model: a name as in `EngineConfig.model`, or an `EngineConfig`; `options` are its fields and change it.
    record: a file that every step event is written to, as JSON lines.
    events: publishes the step events, for `aioengine top` in another process: a path for a Unix socket, which only its
        owner can use, or "tcp:HOST:PORT", which needs an `events_token`. allow_events_control: viewers may also pause and
        step the engine, abort requests and submit prompts. publish_text: events and recordings hold prompts and outputs.
    executor: runs the steps instead of the built-in one, `aioengine.testing.FakeExecutor` for example. No model is
        looked up then: `model_info` (default: the executor's own attribute of that name) states its facts, and without
        a `tokenizer` object prompts and outputs are token ids only.
    tokenizer: as in `EngineConfig.tokenizer`, or an object with the methods of `TextTokenizer`.

    An engine is started once and belongs to the event loop that started it; nothing heavy happens before `start()`.
    When a step fails, every stream ends with an EngineDeadError whose `__cause__` is the failure, and the engine stays
    dead. `shutdown()` ends the streams that are still live with an EngineDeadError too.

    Raises ConfigError for unknown or impossible options.
    """

    def __init__(
        self,
        model: str | EngineConfig = "smollm2",
        *,
        executor: Executor | None = None,
        record: str | Path | None = None,
        events: str | Path | None = None,
        events_token: str | None = None,
        allow_events_control: bool = False,
        publish_text: bool = False,
        tokenizer: str | TextTokenizer | None = None,
        model_info: ModelInfo | None = None,
        **options: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            options["tokenizer"] = tokenizer
        self._config = EngineConfig.from_options(model, options)
        self._executor = executor
        self._tokenizer = None if isinstance(tokenizer, str) else tokenizer
        self._model_info = model_info
        self._bus = StepBus()
        options_of_events = PublishOptions(record, events, events_token, allow_events_control, publish_text)
        self._publisher = Publisher(options_of_events, bus=self._bus)
        self._resolved: ResolvedConfig | None = None
        self._input: InputProcessor | None = None
        self._output: OutputProcessor | None = None
        self._core: EngineCore | None = None

        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._executor_stopping: asyncio.Task[None] | None = None
        self._start_error: BaseException | None = None
        self._request_numbers = itertools.count(1)

    # ------------------------------------------------------------------ life
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
        self._input = InputProcessor(
            resolved.model,
            self._tokenizer,
            max_model_len=resolved.scheduler.max_model_len,
            max_tokens_limit=scheduler.max_tokens_limit,
            seed=resolved.seed,
        )
        publish_text = self._publisher.options.publish_text
        self._output = OutputProcessor(self._tokenizer, publish_text=publish_text)
        self._core = EngineCore(
            scheduler,
            executor,
            bus=self._bus,
            on_outputs=self._output.process_outputs,
            on_failure=self._on_failure,
            check_invariants=resolved.check_invariants,
            text_source=self._output if publish_text else None,
        )
        self._core.start()
        return self._core

    async def shutdown(self) -> None:
        """Stop for good: live streams end with EngineDeadError, the worker stops, a recording is closed. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="aioengine-stop")
        # Shielded: whoever waits for the end may be cancelled, and the worker must stop all the same.
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._output is not None:
            self._output.fail_all(EngineDeadError("the engine was shut down"))
        if self._core is not None:
            await self._core.stop()
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
        try:
            await asyncio.to_thread(self._executor.shutdown)
        except Exception:
            logger.exception("the executor did not shut down cleanly")

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

    # ------------------------------------------------------------------ requests
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate a continuation of `prompt` and stream it.

        prompt: text, token ids, or chat messages ({"role": ..., "content": ...}), which the model's template formats.
        sampling_params: None means `SamplingParams()`.
        request_id: your name for it, unique among the live requests. None: one is made up.
        priority: with scheduling_policy="priority" lower numbers run first.
        cache_salt: only requests with an equal salt share cached prefixes.

        Yields an output whenever something is new; a slow consumer gets several steps merged into one. The last one has
        a `finish_reason`. Leaving the loop, cancelling the task, or dropping the generator aborts the request.

        Raises, at the first iteration, InvalidRequestError if the request cannot be served (others are not affected),
        AioEngineError if the engine is not started, and EngineDeadError, also later, if the engine stopped.
        """
        arrival_time = time.perf_counter()
        self._running_core()
        check_request_options(request_id, priority, cache_salt)
        self._check_request_id_is_free(request_id)
        assert self._input is not None
        processed = await self._input.process(prompt, sampling_params)
        internal_id, collector = self._submit(
            processed, request_id=request_id, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt
        )
        try:
            while True:
                output = await collector.take()
                yield output
                if output.finished:
                    return
        finally:
            self._drop(internal_id, collector)

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt; the final outputs come in the order of `prompts`.

        sampling_params: one for all, or a list with one for each prompt.
        progress: show a bar on stderr, if that is a terminal.

        Raises InvalidRequestError naming the index of a prompt that cannot be served, before any of them is started.
        """
        arrival_time = time.perf_counter()
        self._running_core()
        assert self._input is not None
        params = params_for_each(prompts, sampling_params)
        processed: list[ProcessedInput] = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index):
                processed.append(await self._input.process(prompt, params[index]))
            await asyncio.sleep(0)  # that took up to a millisecond; others have tokens to handle
        submitted: list[tuple[str, OutputCollector]] = []
        try:
            # Nothing is awaited in between: either all of them reach the next schedule() or none.
            for index, item in enumerate(processed):
                with naming_prompt(index):
                    submitted.append(self._submit(item, request_id=None, arrival_time=arrival_time, final_only=True))
            return await collect_batch([collector for _, collector in submitted], progress=progress)
        finally:
            for internal_id, collector in submitted:
                self._drop(internal_id, collector)

    def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with the finish_reason "abort". False if no such request is live."""
        if self._core is None or self._output is None:
            return False
        internal_id = self._output.internal_id(request_id)
        if internal_id is None:
            return False
        return self.abort_scheduled(internal_id)

    def abort_scheduled(self, scheduled_id: str) -> bool:
        """As `abort`, by the id that events show (it differs where a name was used again at once)."""
        if self._core is None or self._output is None or not self._output.is_live(scheduled_id):
            return False
        self._core.finish_requests([scheduled_id], RequestStatus.FINISHED_ABORTED)
        self._output.abort([scheduled_id])
        return True

    async def submit_unattended(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Start a request that nobody reads: only events show it. Returns the id that they show. Raises as `generate` does."""
        arrival_time = time.perf_counter()
        self._running_core()
        assert self._input is not None
        processed = await self._input.process(prompt, sampling_params)
        scheduled_id, _ = self._submit(processed, request_id=None, arrival_time=arrival_time, final_only=True)
        return scheduled_id

    def _submit(
        self,
        processed: ProcessedInput,
        *,
        request_id: str | None,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
    ) -> tuple[str, OutputCollector]:
        """Hand a request to the core; returns its id there and its way out."""
        core = self._running_core()
        self._check_request_id_is_free(request_id)
        assert self._output is not None
        user_id = request_id if request_id is not None else self._new_request_id(core)
        internal_id = user_id
        while core.knows(internal_id):  # the user may reuse a name that has just ended: the worker still knows that one
            internal_id = f"{user_id}~{next(self._request_numbers)}"
        request = Request(
            internal_id,
            processed.prompt_token_ids,
            sampling_params=processed.sampling_params,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        collector = self._output.add_request(internal_id, user_id, processed, now=arrival_time, final_only=final_only)
        try:
            core.add_request(request, prompt=processed.prompt if self._publisher.options.publish_text else None)
        except BaseException:
            self._output.discard(internal_id)
            raise
        return internal_id, collector

    def _new_request_id(self, core: EngineCore) -> str:
        assert self._output is not None
        while True:
            request_id = f"req-{next(self._request_numbers)}"
            if not core.knows(request_id) and self._output.internal_id(request_id) is None:
                return request_id

    def _check_request_id_is_free(self, request_id: str | None) -> None:
        assert self._output is not None
        if request_id is not None and self._output.internal_id(request_id) is not None:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a live request")

    def _drop(self, internal_id: str, collector: OutputCollector) -> None:
        """The consumer is gone: end its request, if it has not ended."""
        if collector.finished:
            return
        assert self._core is not None
        assert self._output is not None
        self._core.finish_requests([internal_id], RequestStatus.FINISHED_ABORTED)
        self._output.abort([internal_id])

    def _running_core(self) -> EngineCore:
        """The core, if it can take a request from here; else raise what is wrong."""
        if self._stopping is not None:
            raise EngineDeadError("the engine did not start" if self._start_error else "the engine was shut down") from self._start_error
        if self._core is None:
            raise AioEngineError("the engine is not started: use it inside `async with AsyncEngine(...)`, or await start() first")
        if asyncio.get_running_loop() is not self._loop:
            raise AioEngineError("the engine runs in another event loop: use it in the one that started it")
        self._core.check_health()
        return self._core

    # ------------------------------------------------------------------ pausing
    def pause(self) -> None:
        """Schedule no further step until `resume()`; steps in flight end, requests still come and go. Idempotent.

        Raises AioEngineError if the engine is not started, EngineDeadError if it stopped.
        """
        self._running_core().pause()

    def resume(self) -> None:
        """Undo `pause()`. Idempotent."""
        self._running_core().resume()

    async def step(self) -> int | None:
        """Run one step of a paused engine; its id, or None if there was nothing to run. Raises AioEngineError if not paused."""
        return await self._running_core().step()

    @property
    def is_paused(self) -> bool:
        return self._core is not None and self._core.is_paused

    @property
    def control(self) -> EngineController:
        """Commands, in the form that viewers use."""
        return EngineController(self)

    # ------------------------------------------------------------------ what it is and how it is doing
    @property
    def config(self) -> EngineConfig:
        """The settings as the user gave them."""
        return self._config

    @property
    def resolved_config(self) -> ResolvedConfig:
        """The settings with every "auto" decided. Raises AioEngineError before `start()`."""
        return _started(self._resolved)

    @property
    def model_info(self) -> ModelInfo:
        """The model's facts. Raises AioEngineError before `start()`."""
        return _started(self._model_info)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. Raises AioEngineError before `start()` and where the engine works on token ids only."""
        if self._tokenizer is None:
            raise AioEngineError("the engine has no tokenizer" if self._core is not None else "the engine is not started")
        return self._tokenizer

    def events(self, maxlen: int = DEFAULT_MAXLEN) -> Subscription:
        """Subscribe to the step events from now on: an async iterator and a context manager.

        It holds up to `maxlen` unread events, drops the oldest and counts them (`num_dropped`). It ends at `shutdown()`.
        """
        return self._bus.subscribe(maxlen)

    @property
    def bus(self) -> StepBus:
        """Where the step events are published, for observers that want to be called."""
        return self._bus

    @property
    def wire_header(self) -> WireHeader:
        """What precedes the events where they are recorded or published. Raises AioEngineError before `start()`."""
        return _started(self._publisher.header)

    def snapshot(self) -> EngineSnapshot:
        """The full state now. Raises AioEngineError before `start()`."""
        return _started(self._core).make_snapshot()

    def stats(self) -> SchedulerStats:
        """Gauges and totals now. Raises AioEngineError before `start()`."""
        return _started(self._core).make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while a request holds KV blocks. Raises AioEngineError before `start()`."""
        return _started(self._core).scheduler.reset_prefix_cache()

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot take another step, AioEngineError if it is not started."""
        if self._stopping is not None:
            raise EngineDeadError("the engine did not start" if self._start_error else "the engine was shut down") from self._start_error
        _started(self._core).check_health()


def _started(part: T | None) -> T:
    if part is None:
        raise AioEngineError("the engine is not started")
    return part
