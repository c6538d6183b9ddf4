"""The engine on models of random weights: its tokens in eager steps, in graphs and on the CPU, and its speed.

Run by `benchmarks/gpu_check.py`. The loop is `EngineCore` with the real scheduler and worker; text has no part in it, so neither a
tokenizer nor any file of a model is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.config import EngineConfig
from aioengine.core.scheduler import Scheduler
from aioengine.engine.loop.engine_core import EngineCore, RequestEnd
from aioengine.events.bus import StepBus
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.executor.base import GrammarOutput
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.models.base import CausalLM
from aioengine.models.registry import find_model_class
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput, TokenLogprobs
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import ModelInfo, ResolvedConfig
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import CompiledGrammar
from aioengine.worker.pipeline.async_output import AsyncOutput
from aioengine.worker.worker import Worker

Shape = dict[str, Any]  # the content of a config.json

_COMMON: Shape = {"hidden_act": "silu", "max_position_embeddings": 16384, "head_dim": 128, "num_key_value_heads": 8}
QWEN3_0_6B: Shape = _COMMON | {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LLAMA_3_8B: Shape = _COMMON | {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
}
# The shape of the 0.6B model with few layers, and a head of its own: logits of a tied head favour the input token.
CHECKED: Shape = QWEN3_0_6B | {"num_hidden_layers": 4, "tie_word_embeddings": False}
# For rehearsing without a GPU.
TINY: Shape = CHECKED | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def model_info(shape: Shape, dtype: str) -> ModelInfo:
    """No token ends an output: every request runs to its max_tokens."""
    return ModelInfo(
        name=f"random {shape['architecture']}",
        path="",
        architecture=shape["architecture"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_position_embeddings"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        dtype=dtype,
        eos_token_ids=frozenset(),
    )


@torch.no_grad()
def fill_with_random_weights(model: torch.nn.Module, *, same_everywhere: bool) -> None:
    """Weights that keep activations near 1. same_everywhere: drawn on the CPU, so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
        if same_everywhere:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        else:
            parameter.normal_(0.0, std)


class RandomWeightsWorker(Worker):
    """A worker whose model is built instead of read."""

    def __init__(self, config: ResolvedConfig, *, shape: Shape, same_everywhere: bool) -> None:
        super().__init__(config, files=None)  # type: ignore[arg-type]  # nothing is read
        self._shape = shape
        self._same_everywhere = same_everywhere
        self.sample_seconds: list[float] = []  # in the worker's thread, which does not wait for the device where that runs behind

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[Any]:
        start = time.perf_counter()
        output = super().sample_tokens(grammar_output)
        self.sample_seconds.append(time.perf_counter() - start)
        return output

    def load_model(self) -> None:
        family = find_model_class(self._shape["architecture"])
        device = self.device.torch_device
        model = family.build(family.read_config(self._shape), attention_backend=self._backend, dtype=self._dtype, device=device)
        fill_with_random_weights(model, same_everywhere=self._same_everywhere)
        self._model: CausalLM = model.eval()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and what becomes of it on the way."""

    prompt: list[int]
    params: Mapping[str, Any] = field(default_factory=dict)  # of `SamplingParams`; greedy unless they say otherwise
    abort_after: int | None = None  # tokens
    has_grammar: bool = False  # the i-th token's id is i modulo GRAMMAR_MODULUS, see `CountingGrammar`


@dataclass(slots=True)
class Run:
    """What one batch of requests gave."""

    token_ids: list[list[int]]
    output_times: list[tuple[float, int]] = field(default_factory=list)  # when a step's tokens came, and how many
    start_time: float = 0.0
    execute_seconds: list[float] = field(default_factory=list)  # the worker's thread in `execute_model`, a step
    sample_seconds: list[float] = field(default_factory=list)  # and in `sample_tokens`
    schedule_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by request
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    num_preemptions: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.update_seconds)

    def decode_step_seconds(self) -> float:
        """The median interval between steps in which every request got a token."""
        full = [when for when, num_tokens in self.output_times if num_tokens == len(self.token_ids)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(full))

    def seconds(self) -> float:
        return self.output_times[-1][0] - self.start_time

    def host_seconds_per_step(self) -> dict[str, float]:
        """Medians, by who spends them: the loop's thread (schedule, update) and the worker's (execute, and enqueueing the sampling)."""
        parts = {
            "schedule": self.schedule_seconds,
            "update": self.update_seconds,
            "execute": self.execute_seconds,
            "sample": self.sample_seconds,
        }
        return {name: statistics.median(values) for name, values in parts.items() if values}


GRAMMAR_MODULUS = 7


class CountingGrammar(StructuredOutputManager):
    """Stands for a grammar where no tokenizer is: each token depends on how many came before. All masks are made by the host."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, vocab_size=vocab_size, eos_token_ids=frozenset())
        self._num_tokens: dict[str, int] = {}
        ids = np.arange(vocab_size)
        self._masks = [np.packbits(ids % GRAMMAR_MODULUS == rest, bitorder="little").tobytes() for rest in range(GRAMMAR_MODULUS)]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._num_tokens

    def __len__(self) -> int:
        return len(self._num_tokens)

    def add(self, request_id: str, grammar: CompiledGrammar, params: SamplingParams) -> None:
        self._num_tokens[request_id] = 0

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        if request_id in self._num_tokens:
            self._num_tokens[request_id] += len(token_ids)

    def bitmask(self, request_id: str) -> bytes:
        return self._masks[self._num_tokens[request_id] % GRAMMAR_MODULUS]

    def remove(self, request_id: str) -> None:
        self._num_tokens.pop(request_id, None)


class RandomEngine:
    """An executor over random weights, and as many engine loops on it as wanted, one after the other."""

    def __init__(self, shape: Shape, *, device: str, dtype: str, same_everywhere: bool = False, **options: Any) -> None:
        info = model_info(shape, dtype)
        settings: dict[str, Any] = {"enable_prefix_caching": False, "device": device, "dtype": dtype, **options}
        self.config = EngineConfig(**settings).resolve(info, cuda_available=device == "cuda", free_memory_bytes=8 << 30)
        self.executor = UniProcExecutor(
            self.config, worker_factory=lambda: RandomWeightsWorker(self.config, shape=shape, same_everywhere=same_everywhere)
        )
        self.vocab_size: int = shape["vocab_size"]
        self.num_blocks = 0
        self.start_seconds = 0.0
        self.num_graphs = 0

    def start(self) -> None:
        """Build the model, size the cache, compile and capture."""
        begin = time.perf_counter()
        self.executor.load_model().result()
        given = self.config.cache.num_kv_cache_blocks
        self.num_blocks = given or self.executor.determine_num_kv_cache_blocks().result()
        self.executor.initialize_kv_cache(self.num_blocks).result()
        self.start_seconds = time.perf_counter() - begin
        self.num_graphs = self.call_model(lambda worker: worker.runner.num_graphs)

    def use_graphs(self, value: bool) -> None:
        self.executor.collective_rpc(lambda worker: setattr(worker.runner, "use_graphs", value)).result()

    def stop(self) -> None:
        self.executor.shutdown()

    def call_model(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the worker, in its thread."""
        return self.executor.collective_rpc(function).result()[0]

    def run(self, prompts: Sequence[list[int]], *, max_tokens: int, overlap: bool = True, **params: Any) -> Run:
        """All at once. Greedy unless `params` say otherwise."""
        return self.serve([Ask(prompt, {"max_tokens": max_tokens, **params}) for prompt in prompts], overlap=overlap)

    def serve(self, asks: Sequence[Ask], *, overlap: bool = True, concurrency: int | None = None) -> Run:
        """Up to `concurrency` at a time, in order; None: all at once."""

        async def serve() -> Run:
            return await _Serving(self, asks, overlap=overlap).run(concurrency or len(asks))

        self.call_model(lambda worker: worker.sample_seconds.clear())
        run = asyncio.run(serve())
        run.sample_seconds = self.call_model(lambda worker: list(worker.sample_seconds))
        return run


class _Serving:
    """One engine loop over an executor, from the first request to the last. Made in a running event loop."""

    def __init__(self, engine: RandomEngine, asks: Sequence[Ask], *, overlap: bool) -> None:
        config = engine.config
        self._scheduler = Scheduler(
            replace(config.scheduler, async_scheduling=overlap), cache=config.cache, num_kv_cache_blocks=engine.num_blocks
        )
        self._asks = asks
        self._todo = list(range(len(asks)))[::-1]
        self._num_left = len(asks)
        self._result = Run([[] for _ in asks])
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grammar = CountingGrammar(engine.vocab_size)
        bus = StepBus()
        bus.add_observer(lambda event: note_times(self._result, event))
        self._core = EngineCore(
            self._scheduler,
            engine.executor,
            bus=bus,
            on_outputs=self._on_outputs,
            on_failure=self._on_failure,
            structured_output=self._grammar,
        )

    async def run(self, concurrency: int) -> Run:
        self._core.start()
        self._result.start_time = time.perf_counter()
        for _ in range(min(concurrency, len(self._asks))):
            self._add_next()
        await self._done
        await self._core.wait_until_idle()  # the worker forgets the requests in a last step
        await self._core.stop()
        self._result.num_preemptions = self._scheduler.totals.num_preemptions
        return self._result

    def _add_next(self) -> None:
        if not self._todo:
            return
        index = self._todo.pop()
        ask = self._asks[index]
        params: dict[str, Any] = {"temperature": 0, "seed": 0, "ignore_eos": True, **ask.params}
        if ask.has_grammar:
            params["structured_outputs"] = StructuredOutputsParams(regex="counted")  # what it says is not read
        grammar = cast(CompiledGrammar, self._grammar) if ask.has_grammar else None
        self._core.add_request(Request(str(index), ask.prompt, sampling_params=SamplingParams(**params)), grammar=grammar)

    def _on_outputs(self, outputs: list[EngineCoreOutput]) -> list[RequestEnd]:
        run, ends = self._result, []
        if outputs:
            run.output_times.append((time.perf_counter(), len(outputs)))
        for output in outputs:
            index = int(output.request_id)
            run.token_ids[index] += output.new_token_ids
            run.logprobs.setdefault(index, []).extend(output.logprobs or [])
            run.prompt_logprobs.setdefault(index, []).extend(output.prompt_logprobs or [])
            reason: str | None = output.finish_reason
            if output.error is not None:
                run.errors[index] = output.error
            abort_after = self._asks[index].abort_after
            if reason is None and abort_after is not None and len(run.token_ids[index]) >= abort_after:
                ends.append(RequestEnd(output.request_id, RequestStatus.FINISHED_ABORTED))
                reason = "abort"
            if reason is not None:
                run.finish_reasons[index] = reason
                self._num_left -= 1
                asyncio.get_running_loop().call_soon(self._add_next)
        if self._num_left == 0 and not self._done.done():
            self._done.set_result(None)
        return ends

    def _on_failure(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)


def note_times(run: Run, event: Event) -> None:
    if isinstance(event, StepEvent):
        run.schedule_seconds.append(event.schedule_end - event.schedule_start)
    elif isinstance(event, StepResultEvent):
        run.update_seconds.append(event.update_end - event.update_start)
        if event.execute_start is not None and event.execute_end is not None:
            run.execute_seconds.append(event.execute_end - event.execute_start)


def random_prompts(num: int, length: int, *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(0, vocab_size, (num, length), generator=generator).tolist()
    return prompts


# ------------------------------------------------------------------ tokens
@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Whether two ways to run the same requests gave the same greedy tokens."""

    name: str
    num_tokens: int
    num_equal: int  # before the first difference of each request: after it the histories differ
    worst_gap: float  # where they part: how far the chosen logit is below the best one, by the CPU in float32
    limit: float

    @property
    def passed(self) -> bool:
        return self.worst_gap <= self.limit


def compare_tokens(
    name: str, expected: Run, actual: Run, *, prompts: Sequence[list[int]], gap: Callable[[list[int], int], float], limit: float
) -> TokenCheck:
    """gap(history, token): how far the token's logit is below the best after that history. Only near ties may differ."""
    num_equal, worst = 0, 0.0
    for prompt, wanted, got in zip(prompts, expected.token_ids, actual.token_ids, strict=True):
        same = next((i for i, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1]), len(wanted))
        num_equal += same
        if same < len(wanted):
            worst = max(worst, gap(prompt + wanted[:same], got[same]))
    return TokenCheck(name, sum(len(tokens) for tokens in expected.token_ids), num_equal, worst, limit)


def one_prompt(length: int, *, block_size: int, device: torch.device) -> AttentionBatch:
    """A whole prompt in blocks 0, 1, ..."""
    query_start_loc, seq_lens = np.array([0, length], dtype=np.int32), np.array([length], dtype=np.int32)
    return AttentionBatch(
        num_reqs=1,
        num_tokens=length,
        max_query_len=length,
        max_seq_len=length,
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        query_start_loc_np=query_start_loc,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        seq_lens_np=seq_lens,
        block_table=torch.arange(-(-length // block_size), dtype=torch.int32, device=device)[None],
        slot_mapping=torch.arange(length, device=device),
    )


def logit_gap(engine: RandomEngine) -> Callable[[list[int], int], float]:
    """`gap` for `compare_tokens`, by a forward of the engine's model over the whole history, beside the engine's cache."""

    def gap(history: list[int], token: int) -> float:
        def forward(worker: Any) -> float:
            model, backend, device = worker._model, worker._backend, worker.device.torch_device
            batch = one_prompt(len(history), block_size=worker.config.cache.block_size, device=device)
            batches = [replace(batch, sliding_window=group.sliding_window) for group in worker.config.cache.kv_cache_groups]
            metadata = tuple(backend.build_metadata(of_group) for of_group in batches)
            caches = [backend.allocate_kv_cache(batch.block_table.shape[1], device) for _ in range(model.num_layers)]
            ids, positions = torch.tensor(history, device=device), torch.arange(len(history), device=device)
            with torch.inference_mode():
                hidden = model.forward(ids, positions, kv_caches=caches, attention_metadata=metadata)
                logits = model.compute_logits(hidden[-1:])[0]
            return float(logits.max() - logits[token])

        result: float = engine.call_model(forward)
        return result

    return gap
