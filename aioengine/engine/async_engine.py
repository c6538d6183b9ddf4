"""`AsyncEngine`: the engine as an asyncio program sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine.batch import collect_batch, naming_prompt, pair_up
from aioengine.engine.detokenizer import TextTokenizer
from aioengine.engine.engine_life import EngineLife
from aioengine.engine.event_control import EngineController
from aioengine.engine.event_loops import running_loop, wrong_loop
from aioengine.engine.input_processor import ProcessedInput, Prompt, check_request_options
from aioengine.engine.long_prompts import hash_long_prompt
from aioengine.engine.output_collector import OutputCollector
from aioengine.engine.output_stream import OutputStream
from aioengine.engine.publishing import PublishOptions
from aioengine.engine.submission import Submitter
from aioengine.errors import AioEngineError, ConfigError, InvalidRequestError
from aioengine.events.bus import DEFAULT_MAXLEN, StepBus, Subscription
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader
from aioengine.executor.base import Executor
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams

T = TypeVar("T")


class AsyncEngine(EngineLife):
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
        super().__init__(
            EngineConfig.from_options(model, options),
            executor=executor,
            tokenizer=None if isinstance(tokenizer, str) else tokenizer,
            model_info=model_info,
            publish=PublishOptions(record, events, events_token, allow_events_control, publish_text),
        )

    # ------------------------------------------------------------------ requests
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> OutputStream:
        """Generate a continuation of `prompt` and stream it.

        prompt: text, token ids, or chat messages ({"role": ..., "content": ...}), which the model's template formats.
        sampling_params: None means `SamplingParams()`.
        request_id: your name for it, unique among the live requests. None: one is made up.
        priority: with scheduling_policy="priority" lower numbers run first.
        cache_salt: only requests with an equal salt share cached prefixes.
        timeout: seconds from the first iteration, in the queue and running together. When they are over and the request has
            not ended, it is aborted and the stream ends with RequestTimeoutError.

        Yields an output whenever something is new; a slow consumer gets several steps merged into one. What an output holds
        says `sampling_params.output_kind`, and it has `sampling_params.n` continuations. The last one has a `finish_reason`:
        "error" if what went wrong concerns this request alone (`CompletionOutput.error` says what).

        Leaving an `async for` aborts the request, however it is left and whoever still holds the stream: `break`, an exception,
        a cancelled task. So do `await stream.aclose()`, the end of `async with engine.generate(...) as stream:`, and dropping
        the stream. Waiting is not reading: `await asyncio.wait_for(anext(stream), 0.2)` may time out and be called again, and
        the next output has all that came meanwhile. To read a part and go on later use `anext(stream)`, in `async with` (or
        `contextlib.aclosing`) so that the request ends when you do; see `OutputStream` for the small print.

        Raises, at the first iteration, InvalidRequestError if the request cannot be served (others are not affected),
        EngineOverloadedError if too many wait already, AioEngineError if the engine is not started or runs in another event
        loop, and EngineDeadError, also later, if the engine stopped.
        """
        submit = partial(self._submit, prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt)
        return OutputStream(submit, timeout=timeout, engine=self)

    async def _submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None, *, request_id: str | None, priority: int, cache_salt: str | None
    ) -> tuple[OutputCollector, Submitter]:
        """Nothing is awaited after the request was handed to the core."""
        arrival_time = time.perf_counter()
        self._running_core("generate()")
        request_id, priority, cache_salt = check_request_options(request_id, priority, cache_salt)
        assert self._submitter is not None
        self._submitter.check_request_id_is_free(request_id)
        self._check_admission()
        processed = await self._prepare(prompt, sampling_params, cache_salt)
        self._running_core("generate()")  # it may have stopped meanwhile
        self._check_admission([processed])
        collector = self._submitter.submit(
            processed, request_id=request_id, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt
        )
        return collector, self._submitter

    async def generate_batch(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate a continuation of each prompt; the final outputs come in the order of `prompts`.

        prompts: a list, or whatever else gives them one after the other. sampling_params: one for all, or one for each.
        progress: show a bar on stderr, if that is a terminal.

        Raises InvalidRequestError naming the index of a prompt that cannot be served, and EngineOverloadedError if they may
        not all wait, before any of them is started.
        """
        arrival_time = time.perf_counter()
        self._running_core("generate_batch()")
        assert self._submitter is not None
        processed: list[ProcessedInput] = []
        for index, (prompt, params) in enumerate(pair_up(prompts, sampling_params)):
            with naming_prompt(index):
                processed.append(await self._prepare(prompt, params, None))
            await asyncio.sleep(0)  # that took up to a millisecond; others have tokens to handle
        self._running_core("generate_batch()")  # it may have stopped meanwhile
        self._check_admission(processed)
        submitted: list[OutputCollector] = []
        try:
            # Nothing is awaited in between: either all of them reach the next schedule() or none.
            for index, item in enumerate(processed):
                with naming_prompt(index):
                    submitted.append(self._submitter.submit(item, request_id=None, arrival_time=arrival_time, final_only=True))
            return await collect_batch(submitted, progress=progress)
        finally:
            for collector in submitted:
                self._submitter.drop(collector)

    def abort(self, request_id: str) -> bool:
        """End a request: its stream ends with the finish_reason "abort". False if no such request is live.

        From another thread: True if such a request is live; it ends as soon as the event loop turns, which is woken for that.
        """
        return self._abort(request_id, Submitter.abort)

    def abort_scheduled(self, scheduled_id: str) -> bool:
        """As `abort`, by the id that events show: it differs where a name was used again at once, and each of the n > 1
        continuations of a prompt has its own; the others go on.
        """
        return self._abort(scheduled_id, Submitter.abort_scheduled)

    def _abort(self, request_id: str, end: Callable[[Submitter, str], bool]) -> bool:
        if not isinstance(request_id, str):
            raise InvalidRequestError(f"the id of a request is a string, got {type(request_id).__name__}")
        if self._submitter is None or self._is_stopped:
            return False
        loop = running_loop()
        if loop is self._loop:
            return end(self._submitter, request_id)
        assert self._loop is not None
        if self._loop.is_closed():
            raise wrong_loop(self._loop, loop, "abort()")
        is_live = self._submitter.is_live(request_id)
        if is_live:
            self._loop.call_soon_threadsafe(end, self._submitter, request_id)
        return is_live

    async def submit_unattended(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Start a request that nobody reads: only events show it. Returns the id that they show. Raises as `generate` does."""
        arrival_time = time.perf_counter()
        self._running_core("submit_unattended()")
        processed = await self._prepare(prompt, sampling_params, None)
        self._running_core("submit_unattended()")  # it may have stopped meanwhile
        self._check_admission([processed])
        assert self._submitter is not None
        collector = self._submitter.submit(processed, request_id=None, arrival_time=arrival_time, final_only=True)
        return self._submitter.scheduled_ids(collector.request_id)[0]

    async def _prepare(self, prompt: Prompt, sampling_params: SamplingParams | None, cache_salt: str | None) -> ProcessedInput:
        """Everything that takes long with a long prompt, without holding the loop."""
        assert self._input is not None
        assert self._core is not None
        processed = await self._input.process(prompt, sampling_params)
        kv_cache_manager = self._core.scheduler.kv_cache_manager
        block_hashes = await hash_long_prompt(kv_cache_manager, processed.prompt_token_ids, cache_salt=cache_salt)
        return dataclasses.replace(processed, block_hashes=block_hashes) if block_hashes else processed

    def _check_admission(self, requests: Sequence[ProcessedInput] = ()) -> None:
        """Raise EngineOverloadedError if these may not all wait; without any, if not even one more may."""
        assert self._admission is not None
        self._admission.check(
            num_reqs=sum(item.sampling_params.n for item in requests) if requests else 1,
            num_tokens=sum(item.sampling_params.n * len(item.prompt_token_ids) for item in requests),
        )

    # ------------------------------------------------------------------ pausing
    def pause(self) -> None:
        """Schedule no further step until `resume()`; steps in flight end, requests still come and go. Idempotent.

        Raises AioEngineError if the engine is not started, EngineDeadError if it stopped.
        """
        self._running_core("pause()").pause()

    def resume(self) -> None:
        """Undo `pause()`. Idempotent."""
        self._running_core("resume()").resume()

    async def step(self) -> int | None:
        """Run one step of a paused engine; its id, or None if there was nothing to run. Raises AioEngineError if not paused."""
        return await self._running_core("step()").step()

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
        It belongs to the event loop of the engine: raises AioEngineError while that runs in another thread.
        """
        if not isinstance(maxlen, int) or not 1 <= maxlen <= sys.maxsize:
            raise ConfigError(f"maxlen must be an integer from 1 to {sys.maxsize}, got {maxlen!r:.100}")
        self._check_nobody_else_runs("events()")
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
        """The full state now. Raises AioEngineError before `start()`, and while the engine's event loop runs in another thread."""
        core = _started(self._core)
        self._check_nobody_else_runs("snapshot()")
        return core.make_snapshot()

    def stats(self) -> SchedulerStats:
        """Gauges and totals now, from any thread. Raises AioEngineError before `start()`."""
        return _started(self._core).make_stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Refused (False) while a request holds KV blocks, unless `reset_running_requests`: then
        those are preempted first, and compute all their tokens anew; their outputs stay the same.

        Raises AioEngineError before `start()` and while the engine's event loop runs in another thread, EngineDeadError if running
        requests are to be reset and the engine stopped.
        """
        if reset_running_requests:
            return self._running_core("reset_prefix_cache()").reset_prefix_cache(reset_running_requests=True)
        core = _started(self._core)
        self._check_nobody_else_runs("reset_prefix_cache()")
        return core.reset_prefix_cache()


def _started(part: T | None) -> T:
    if part is None:
        raise AioEngineError("the engine is not started")
    return part
