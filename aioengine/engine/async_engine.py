"""`AsyncEngine`: the engine as an asyncio program sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine.adapters import LoadedLora
from aioengine.engine.event_control import EngineController
from aioengine.engine.event_loops import running_loop, wrong_loop
from aioengine.engine.inputs.batch import collect_batch, naming_prompt, pair_up, read_embedding
from aioengine.engine.inputs.input_processor import Prompt, check_request_options
from aioengine.engine.inputs.long_prompts import hash_long_prompt
from aioengine.engine.inputs.submission import Submitter
from aioengine.engine.life import EngineLife
from aioengine.engine.loop.kv_transfers import KVTransfers
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.output_stream import OutputStream
from aioengine.engine.parts import EngineParts
from aioengine.engine.processed_input import ProcessedInput
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import AioEngineError, ConfigError, InvalidRequestError
from aioengine.events.bus import DEFAULT_MAXLEN, StepBus, Subscription
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader
from aioengine.executor.base import Executor
from aioengine.kv_connector.base import KVConnectorStats
from aioengine.outputs import EmbeddingOutput, RequestOutput
from aioengine.pooling_params import Pooling, PoolingParams
from aioengine.resolved_config import ModelInfo, ResolvedConfig
from aioengine.sampling_params import SamplingParams

# What carries a request for an embedding: it is never sampled for, and its text is not looked at.
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, seed=0)


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
        self._life = EngineLife(
            EngineConfig.from_options(model, options),
            executor=executor,
            tokenizer=None if isinstance(tokenizer, str) else tokenizer,
            model_info=model_info,
            publish=PublishOptions(record, events, events_token, allow_events_control, publish_text),
        )

    # ------------------------------------------------------------------ start and shutdown
    async def start(self) -> None:
        """Find and load the model and start the step loop. On failure everything that was started is stopped again.

        Raises ModelError, ConfigError (settings that contradict the model), AioEngineError (it was started before).
        """
        await self._life.start(self.control)

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
        await self._life.shutdown(drain=drain, drain_timeout=drain_timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.shutdown()

    def __del__(self) -> None:
        life: EngineLife | None = getattr(self, "_life", None)  # missing: the constructor failed
        if life is not None:
            life.drop(self)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot take another step, AioEngineError if it is not started."""
        self._life.check_health()

    @property
    def num_unfinished_reqs(self) -> int:
        """Requests that were taken in and have not ended; one with n continuations counts as n."""
        return self._life.num_unfinished_reqs

    @property
    def is_draining(self) -> bool:
        """`shutdown(drain=True)` was called: requests end, and none is taken in."""
        return self._life.is_draining

    # ------------------------------------------------------------------ requests
    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
    ) -> OutputStream:
        """Generate a continuation of `prompt` and stream it.

        prompt: text, token ids, or chat messages ({"role": ..., "content": ...}), which the model's template formats.
        sampling_params: None means `SamplingParams()`.
        request_id: your name for it, unique among the live requests. None: one is made up.
        priority: with scheduling_policy="priority" lower numbers run first.
        cache_salt: only requests with an equal salt share cached prefixes.
        lora: the name of a loaded LoRA adapter; None: the model as it is.
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
        submit = partial(self._submit, prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt, lora=lora)
        return OutputStream(submit, timeout=timeout, engine=self)

    async def _submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        lora: str | None = None,
    ) -> tuple[OutputCollector, Submitter]:
        """Nothing is awaited after the request was handed to the core."""
        arrival_time = time.perf_counter()
        parts = self._life.running("generate()")
        request_id, priority, cache_salt = check_request_options(request_id, priority, cache_salt)
        parts.submitter.check_request_id_is_free(request_id)
        adapter = None if lora is None else parts.loras.find(lora)
        _check_admission(parts)
        processed = await _prepare(parts, prompt, sampling_params, cache_salt, lora=adapter)
        self._life.running("generate()")  # it may have stopped meanwhile
        if adapter is not None:
            parts.loras.check_still(adapter)
        _check_admission(parts, [processed])
        collector = parts.submitter.submit(
            processed, request_id=request_id, arrival_time=arrival_time, priority=priority, cache_salt=cache_salt
        )
        return collector, parts.submitter

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
        finished = await self._run_batch("generate_batch()", pair_up(prompts, sampling_params, call="generate_batch()"), progress=progress)
        return [output for _, output in finished]

    async def embed(self, prompts: Iterable[Prompt], *, pooling: Pooling = "mean", normalize: bool = True) -> list[EmbeddingOutput]:
        """One vector of hidden_size numbers for each prompt, in their order. Scheduled with everything else; nothing is sampled.

        prompts: as in `generate_batch`. pooling: "mean" of the hidden states of all tokens, which go through the model whatever the
        prefix cache holds, or that of the "last" token. normalize: scale each vector to length 1.

        Raises as `generate_batch`, and AioEngineError if the model gives no finite vector for a prompt or it is aborted.
        """
        params = PoolingParams(pooling, normalize)
        given = pair_up(prompts, _ONE_TOKEN, call="embed()")
        finished = await self._run_batch("embed()", given, pooling_params=params)
        return [read_embedding(index, collector, output) for index, (collector, output) in enumerate(finished)]

    async def _run_batch(
        self,
        call: str,
        given: list[tuple[Prompt, SamplingParams | None]],
        *,
        pooling_params: PoolingParams | None = None,
        progress: bool = False,
    ) -> list[tuple[OutputCollector, RequestOutput]]:
        """Run requests to their end: either all of them are taken in or none."""
        arrival_time = time.perf_counter()
        parts = self._life.running(call)
        processed: list[ProcessedInput] = []
        for index, (prompt, params) in enumerate(given):
            with naming_prompt(index):
                processed.append(await _prepare(parts, prompt, params, None, pooling_params=pooling_params))
            await asyncio.sleep(0)  # that took up to a millisecond; others have tokens to handle
        self._life.running(call)  # it may have stopped meanwhile
        _check_admission(parts, processed)
        submitted: list[OutputCollector] = []
        try:
            # Nothing is awaited in between: all of them reach the next schedule().
            for index, item in enumerate(processed):
                with naming_prompt(index):
                    submitted.append(parts.submitter.submit(item, request_id=None, arrival_time=arrival_time, final_only=True))
            return list(zip(submitted, await collect_batch(submitted, progress=progress), strict=True))
        finally:
            for collector in submitted:
                parts.submitter.drop(collector)

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
        parts = self._life.parts
        if parts is None or self._life.is_stopped:
            return False
        loop = running_loop()
        if loop is parts.loop:
            return end(parts.submitter, request_id)
        if parts.loop.is_closed():
            raise wrong_loop(parts.loop, loop, "abort()")
        is_live = parts.submitter.is_live(request_id)
        if is_live:
            parts.loop.call_soon_threadsafe(end, parts.submitter, request_id)
        return is_live

    async def submit_unattended(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str:
        """Start a request that nobody reads: only events show it. Returns the id that they show. Raises as `generate` does."""
        arrival_time = time.perf_counter()
        parts = self._life.running("submit_unattended()")
        processed = await _prepare(parts, prompt, sampling_params, None)
        self._life.running("submit_unattended()")  # it may have stopped meanwhile
        _check_admission(parts, [processed])
        return parts.submitter.submit_unattended(processed, arrival_time=arrival_time)

    def read_unattended(self, request_id: str) -> tuple[str, bool] | None:
        """(text so far, whether it has ended) of one of the last 16 requests of `submit_unattended()`; None for other ids.

        request_id: as that returned it.
        """
        parts = self._life.parts
        return None if parts is None else parts.submitter.read_unattended(request_id)

    # ------------------------------------------------------------------ LoRA adapters
    async def load_lora(self, name: str, folder: str | Path) -> None:
        """Load an adapter that PEFT saved; from now on requests may give its name as `lora`. Steps wait while it is read.

        Raises ConfigError for a name that is in use and for a model that takes no adapters, ModelError for a folder that is
        damaged, does not fit the model or asks for what is not supported, and as `generate` if the engine does not run.
        """
        await self._life.running("load_lora()").loras.load(name, folder)

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter. Refused with AioEngineError while requests have it: it neither waits for them nor ends them.

        Raises InvalidRequestError for a name that nothing is loaded under.
        """
        await self._life.running("unload_lora()").loras.unload(name)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """The adapters that are loaded. Raises AioEngineError before `start()`."""
        return self._life.started().loras.names

    # ------------------------------------------------------------------ pausing
    def pause(self) -> None:
        """Schedule no further step until `resume()`; steps in flight end, requests still come and go. Idempotent.

        Raises AioEngineError if the engine is not started, EngineDeadError if it stopped.
        """
        self._life.running("pause()").core.pause()

    def resume(self) -> None:
        """Undo `pause()`. Idempotent."""
        self._life.running("resume()").core.resume()

    async def step(self) -> int | None:
        """Run one step of a paused engine; its id, or None if there was nothing to run. Raises AioEngineError if not paused."""
        return await self._life.running("step()").core.step()

    @property
    def is_paused(self) -> bool:
        return self._life.parts is not None and self._life.parts.core.is_paused

    @property
    def control(self) -> EngineController:
        """Commands, in the form that viewers use."""
        return EngineController(self)

    # ------------------------------------------------------------------ what it is and how it is doing
    @property
    def config(self) -> EngineConfig:
        """The settings as the user gave them."""
        return self._life.config

    @property
    def resolved_config(self) -> ResolvedConfig:
        """The settings with every "auto" decided. Raises AioEngineError before `start()`."""
        return self._life.started().config

    @property
    def model_info(self) -> ModelInfo:
        """The model's facts. Raises AioEngineError before `start()`."""
        return self._life.started().model_info

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer. Raises AioEngineError before `start()` and where the engine works on token ids only."""
        tokenizer = self._life.started().tokenizer
        if tokenizer is None:
            raise AioEngineError("the engine has no tokenizer")
        return tokenizer

    def events(self, maxlen: int = DEFAULT_MAXLEN) -> Subscription:
        """Subscribe to the step events from now on: an async iterator and a context manager.

        It holds up to `maxlen` unread events, drops the oldest and counts them (`num_dropped`). It ends at `shutdown()`.
        It belongs to the event loop of the engine: raises AioEngineError while that runs in another thread.
        """
        if not isinstance(maxlen, int) or not 1 <= maxlen <= sys.maxsize:
            raise ConfigError(f"maxlen must be an integer from 1 to {sys.maxsize}, got {maxlen!r:.100}")
        self._life.check_nobody_else_runs("events()")
        return self._life.bus.subscribe(maxlen)

    @property
    def bus(self) -> StepBus:
        """Where the step events are published, for observers that want to be called."""
        return self._life.bus

    @property
    def wire_header(self) -> WireHeader:
        """What precedes the events where they are recorded or published. Raises AioEngineError before `start()`."""
        header = self._life.publisher.header
        if header is None:
            raise AioEngineError("the engine is not started")
        return header

    def snapshot(self) -> EngineSnapshot:
        """The full state now. Raises AioEngineError before `start()`, and while the engine's event loop runs in another thread."""
        core = self._life.started().core
        self._life.check_nobody_else_runs("snapshot()")
        return core.make_snapshot()

    def stats(self) -> SchedulerStats:
        """Gauges and totals now, from any thread. Raises AioEngineError before `start()`."""
        return self._life.started().core.make_stats()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Refused (False) while a request holds KV blocks, unless `reset_running_requests`: then
        those are preempted first, and compute all their tokens anew; their outputs stay the same.

        Raises AioEngineError before `start()` and while the engine's event loop runs in another thread, EngineDeadError if running
        requests are to be reset and the engine stopped.
        """
        if reset_running_requests:
            return self._life.running("reset_prefix_cache()").core.reset_prefix_cache(reset_running_requests=True)
        core = self._life.started().core
        self._life.check_nobody_else_runs("reset_prefix_cache()")
        return core.reset_prefix_cache()

    async def save_prefix_cache(self) -> int:
        """Write all cached prefixes to `kv_cache_dir` now, not only at shutdown; returns how many blocks that were.

        Requests go on meanwhile. Raises AioEngineError if the engine is not started or has no `kv_cache_dir`, EngineDeadError if
        it stopped.
        """
        return await self._kv_transfers("save_prefix_cache()").save_all()

    def kv_connector_stats(self) -> KVConnectorStats:
        """What `kv_cache_dir` holds for this engine, and what went there and came from there. Raises as `save_prefix_cache`."""
        return self._kv_transfers("kv_connector_stats()").connector.stats()

    def _kv_transfers(self, call: str) -> KVTransfers:
        transfers = self._life.running(call).core.kv_transfers
        if transfers is None:
            raise AioEngineError(f"{call} needs an engine with kv_cache_dir")
        return transfers


async def _prepare(
    parts: EngineParts,
    prompt: Prompt,
    sampling_params: SamplingParams | None,
    cache_salt: str | None,
    *,
    pooling_params: PoolingParams | None = None,
    lora: LoadedLora | None = None,
) -> ProcessedInput:
    """Everything that takes long with a long prompt, without holding the loop."""
    processed = dataclasses.replace(await parts.input.process(prompt, sampling_params), pooling_params=pooling_params)
    if lora is not None:
        processed = dataclasses.replace(processed, lora_name=lora.name, lora_key=lora.key)
    kv_cache_manager = parts.core.scheduler.kv_cache_manager
    transfers = parts.core.kv_transfers
    block_hashes = await hash_long_prompt(
        kv_cache_manager,
        processed.prompt_token_ids,
        cache_salt=cache_salt,
        lora_key=processed.lora_key,
        at_any_length=transfers is not None,
    )
    if not block_hashes:
        return processed
    num_external_blocks = 0 if transfers is None else transfers.connector.num_found(block_hashes)
    return dataclasses.replace(processed, block_hashes=block_hashes, num_external_blocks=num_external_blocks)


def _check_admission(parts: EngineParts, requests: Sequence[ProcessedInput] = ()) -> None:
    """Raise EngineOverloadedError if these may not all wait; without any, if not even one more may."""
    parts.admission.check(
        num_reqs=sum(item.sampling_params.n for item in requests) if requests else 1,
        num_tokens=sum(item.sampling_params.n * len(item.prompt_token_ids) for item in requests),
    )
