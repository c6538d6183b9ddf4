"""The engine on models of random weights: its tokens in eager steps, in graphs and on the CPU, and its speed.

Run by `benchmarks/gpu_check.py`. The loop is `EngineCore` with the real scheduler and worker; text has no part in it, so neither a
tokenizer nor any file of a model is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.core.scheduler import Scheduler
from aioengine.engine.loop.engine_core import EngineCore
from aioengine.events.bus import StepBus
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.models.base import CausalLM
from aioengine.models.registry import find_model_class
from aioengine.outputs import EngineCoreOutput
from aioengine.request import Request
from aioengine.sampling_params import SamplingParams
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

    def load_model(self) -> None:
        family = find_model_class(self._shape["architecture"])
        device = self.device.torch_device
        model = family.build(family.read_config(self._shape), attention_backend=self._backend, dtype=self._dtype, device=device)
        fill_with_random_weights(model, same_everywhere=self._same_everywhere)
        self._model: CausalLM = model.eval()


@dataclass(slots=True)
class Run:
    """What one batch of requests gave."""

    token_ids: list[list[int]]
    output_times: list[tuple[float, int]] = field(default_factory=list)  # when a step's tokens came, and how many
    start_time: float = 0.0
    execute_seconds: list[float] = field(default_factory=list)  # the worker's thread in `execute_model`, a step
    schedule_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)

    def decode_step_seconds(self) -> float:
        """The median interval between steps in which every request got a token."""
        full = [when for when, num_tokens in self.output_times if num_tokens == len(self.token_ids)]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(full))

    def seconds(self) -> float:
        return self.output_times[-1][0] - self.start_time

    def host_seconds_per_step(self) -> dict[str, float]:
        """Medians, by who spends them: the loop's thread (schedule, update) and the worker's (execute)."""
        parts = {"schedule": self.schedule_seconds, "update": self.update_seconds, "execute": self.execute_seconds}
        return {name: statistics.median(values) for name, values in parts.items() if values}


class RandomEngine:
    """An executor over random weights, and as many engine loops on it as wanted, one after the other."""

    def __init__(self, shape: Shape, *, device: str, dtype: str, same_everywhere: bool = False, **options: Any) -> None:
        info = model_info(shape, dtype)
        settings: dict[str, Any] = {"enable_prefix_caching": False, "device": device, "dtype": dtype, **options}
        self.config = EngineConfig(**settings).resolve(info, cuda_available=device == "cuda", free_memory_bytes=8 << 30)
        self._executor = UniProcExecutor(
            self.config, worker_factory=lambda: RandomWeightsWorker(self.config, shape=shape, same_everywhere=same_everywhere)
        )
        self.vocab_size: int = shape["vocab_size"]
        self.num_blocks = 0
        self.start_seconds = 0.0
        self.num_graphs = 0

    def start(self) -> None:
        """Build the model, size the cache, compile and capture."""
        begin = time.perf_counter()
        self._executor.load_model().result()
        given = self.config.cache.num_kv_cache_blocks
        self.num_blocks = given or self._executor.determine_num_kv_cache_blocks().result()
        self._executor.initialize_kv_cache(self.num_blocks).result()
        self.start_seconds = time.perf_counter() - begin
        self.num_graphs = self.call_model(lambda worker: worker.runner.num_graphs)

    def use_graphs(self, value: bool) -> None:
        self._executor.collective_rpc(lambda worker: setattr(worker.runner, "use_graphs", value)).result()

    def stop(self) -> None:
        self._executor.shutdown()

    def call_model(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the worker, in its thread."""
        return self._executor.collective_rpc(function).result()[0]

    def run(self, prompts: Sequence[list[int]], *, max_tokens: int, overlap: bool = True, **params: Any) -> Run:
        """Greedy unless `params` say otherwise."""
        sampling = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": max_tokens, "ignore_eos": True, **params})
        return asyncio.run(self._run(prompts, sampling, overlap))

    async def _run(self, prompts: Sequence[list[int]], sampling: SamplingParams, overlap: bool) -> Run:
        scheduler = Scheduler(
            replace(self.config.scheduler, async_scheduling=overlap), cache=self.config.cache, num_kv_cache_blocks=self.num_blocks
        )
        run = Run([[] for _ in prompts])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_left = len(prompts)

        def on_outputs(outputs: list[EngineCoreOutput]) -> list[Any]:
            nonlocal num_left
            if outputs:
                run.output_times.append((time.perf_counter(), len(outputs)))
            for output in outputs:
                run.token_ids[int(output.request_id)] += output.new_token_ids
                num_left -= output.finish_reason is not None
            if num_left == 0 and not done.done():
                done.set_result(None)
            return []

        def on_failure(error: BaseException) -> None:
            if not done.done():
                done.set_exception(error)

        bus = StepBus()
        bus.add_observer(lambda event: note_times(run, event))
        core = EngineCore(scheduler, self._executor, bus=bus, on_outputs=on_outputs, on_failure=on_failure)
        core.start()
        run.start_time = time.perf_counter()
        for index, prompt in enumerate(prompts):
            core.add_request(Request(str(index), prompt, sampling_params=sampling))
        await done
        while not core.is_idle:  # noqa: ASYNC110  # the worker forgets the requests in a last step, which nobody announces
            await asyncio.sleep(0.001)
        await core.stop()
        return run


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
            caches = [backend.allocate_kv_cache(batch.block_table.shape[1], device) for _ in range(model.num_layers)]
            ids, positions = torch.tensor(history, device=device), torch.arange(len(history), device=device)
            with torch.inference_mode():
                hidden = model.forward(ids, positions, kv_caches=caches, attention_metadata=backend.build_metadata(batch))
                logits = model.compute_logits(hidden[-1:])[0]
            return float(logits.max() - logits[token])

        result: float = engine.call_model(forward)
        return result

    return gap
