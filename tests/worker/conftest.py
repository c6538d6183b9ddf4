"""A tiny model whose every token matters, and a hand-driven scheduler side: what runner and worker tests share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.attention.triton_paged import TritonPagedBackend
from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.executor.base import GrammarOutput
from aioengine.kv_cache_groups import group_layers, group_of_layers, num_layer_caches
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ModelInfo, ResolvedConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.cuda_graphs import CapturedGraph
from aioengine.worker.device import CpuDevice, InterpreterDevice
from aioengine.worker.model_runner import ModelRunner
from aioengine.worker.pipeline.async_output import AsyncOutput

VOCAB_SIZE = 61
EOS = 7
INFO = ModelInfo(
    name="tiny",
    path="nowhere",
    architecture="TinyModel",
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype="float32",
    eos_token_ids=frozenset({EOS}),
)


class TinyModel(nn.Module):
    """Two attention layers with random weights; the positions enter through an embedding."""

    num_layers = 2
    runs_own_threads = False
    supports_graphs = True

    def __init__(self, backend: AttentionBackend, *, layer_windows: tuple[int | None, ...] = (None, None)) -> None:
        super().__init__()
        self.layer_groups = group_of_layers(group_layers(layer_windows))
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator).div_(math.sqrt(rows))

        self.backend = backend
        self.embedding = weight(VOCAB_SIZE, 32) * math.sqrt(VOCAB_SIZE)
        self.position_embedding = weight(64, 32) * 8
        self.qkv = [weight(32, 64) for _ in range(2)]
        self.out = [weight(32, 32) for _ in range(2)]
        self.head = weight(32, VOCAB_SIZE)
        self.num_forwards = 0
        self.num_logits_rows = 0

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, *, kv_caches: list[torch.Tensor], attention_metadata: Any
    ) -> torch.Tensor:
        assert input_ids.dtype == positions.dtype == torch.int64
        self.num_forwards += 1
        x = self.embedding[input_ids] + self.position_embedding[positions]
        for layer in range(2):
            query, key, value = (x @ self.qkv[layer]).view(-1, 8, 8).split([4, 2, 2], dim=1)
            metadata = attention_metadata[self.layer_groups[layer]]
            attended = self.backend.forward(query, key, value, kv_cache=kv_caches[layer], metadata=metadata, scale=8**-0.5)
            x = x + torch.tanh(attended.reshape(-1, 32) @ self.out[layer])
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits_rows += len(hidden)
        return hidden @ self.head

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None


class Driver:
    """Plays the scheduler for one runner, with full knowledge: it plans steps by hand and checks nothing itself."""

    def __init__(self, runner: ModelRunner, model: TinyModel, *, block_size: int, num_blocks: int) -> None:
        self.runner = runner
        self.model = model
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks - 1, 0, -2)) + list(range(num_blocks - 2, 0, -2))  # scattered
        self.prompts: dict[str, list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.outputs: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[Any]] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.known_to_worker: set[str] = set()
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.just_preempted: set[str] = set()
        self.previous: set[str] = set()
        self.step_id = 0

    def add(self, req_id: str, prompt: Iterable[int], **options: Any) -> None:
        self.prompts[req_id] = list(prompt)
        self.params[req_id] = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 64, **options})
        self.outputs[req_id] = []
        self.logprobs[req_id] = []
        self.computed[req_id] = 0
        self.blocks[req_id] = []

    def num_tokens(self, req_id: str) -> int:
        return len(self.prompts[req_id]) + len(self.outputs[req_id])

    def preempt(self, req_id: str) -> None:
        self.free_blocks += self.blocks[req_id]
        self.blocks[req_id] = []
        self.computed[req_id] = 0
        self.preempted.add(req_id)
        self.just_preempted.add(req_id)

    def finish(self, req_id: str) -> None:
        self.free_blocks += self.blocks.pop(req_id)
        self.finished.add(req_id)

    def plan(self, scheduled: dict[str, int]) -> SchedulerOutput:
        new_reqs: list[NewRequestData] = []
        cached: dict[str, Any] = {"req_ids": [], "new_block_ids": [], "num_computed_tokens": [], "num_output_tokens": []}
        resumed: set[str] = set()
        history: dict[str, list[int]] = {}
        for req_id, num_tokens in scheduled.items():
            start = self.computed[req_id]
            needed = -(-(start + num_tokens) // self.block_size) - len(self.blocks[req_id])
            added = [self.free_blocks.pop() for _ in range(needed)]
            self.blocks[req_id] += added
            if req_id not in self.known_to_worker:
                self.known_to_worker.add(req_id)
                new_reqs.append(NewRequestData(req_id, self.prompts[req_id], self.params[req_id], (list(self.blocks[req_id]),), start))
            else:
                if req_id not in self.previous:
                    history[req_id] = self.prompts[req_id] + self.outputs[req_id]
                if req_id in self.preempted:
                    self.preempted.discard(req_id)
                    resumed.add(req_id)
                cached["req_ids"].append(req_id)
                cached["new_block_ids"].append((added,) if added else None)
                cached["num_computed_tokens"].append(start)
                cached["num_output_tokens"].append(len(self.outputs[req_id]))
            self.computed[req_id] += num_tokens
        self.previous = set(scheduled)
        self.step_id += 1
        out = SchedulerOutput(
            step_id=self.step_id,
            scheduled_new_reqs=new_reqs,
            scheduled_cached_reqs=CachedRequestData(resumed_req_ids=frozenset(resumed), all_token_ids=history, **cached),
            num_scheduled_tokens=dict(scheduled),
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=frozenset(self.finished),
            preempted_req_ids=frozenset(self.just_preempted),
        )
        self.finished, self.just_preempted = set(), set()
        return out

    def step(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        self.runner.execute_model(self.plan(scheduled))
        output = self.sample()
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.outputs[req_id] += tokens
        for req_id, logprobs in output.logprobs.items():
            self.logprobs[req_id] += logprobs
        return output

    def sample(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        output = self.runner.sample_tokens(grammar_output)
        return output.wait() if isinstance(output, AsyncOutput) else output

    def generate(self, req_id: str, num_tokens: int, *, chunk: int = 64) -> list[int]:
        """Run one request by itself until it has `num_tokens` output tokens."""
        while len(self.outputs[req_id]) < num_tokens:
            self.step({req_id: min(chunk, self.num_tokens(req_id) - self.computed[req_id])})
        return self.outputs[req_id]


def edit_one_by_one(logits: list[float], prompt: list[int], output: list[int], options: dict[str, Any], *, eos: int = EOS) -> list[float]:
    """vLLM's order, in float32, a token at a time: allowed, bad words, min_tokens, bias, repetition, frequency, presence."""
    p = SamplingParams(**options)
    result = [np.float32(x) for x in logits]
    for token in range(len(result)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            result[token] = np.float32(-math.inf)
        for word in p.bad_words_token_ids:
            before = list(word[:-1])
            if word[-1] == token and len(before) <= len(output) and output[len(output) - len(before) :] == before:
                result[token] = np.float32(-math.inf)
        if len(output) < p.min_tokens and (token == eos or token in p.stop_token_ids):
            result[token] = np.float32(-math.inf)
        result[token] += np.float32(p.logit_bias.get(token, 0.0))
        if token in prompt or token in output:
            penalty = np.float32(p.repetition_penalty)
            result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
        result[token] -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
        result[token] -= np.float32(p.presence_penalty) * np.float32(token in output)
    return [float(x) for x in result]


@pytest.fixture(scope="session")
def expected_logits() -> Callable[..., list[float]]:
    return edit_one_by_one


MakeDriver = Callable[..., Driver]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and on a busy machine waiting for it takes most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_config() -> Callable[..., ResolvedConfig]:
    def make(*, layer_windows: tuple[int | None, ...] = (), **options: Any) -> ResolvedConfig:
        info = dataclasses.replace(INFO, layer_windows=layer_windows)
        options = {"device": "cpu", "max_num_seqs": 3, "block_size": 4, "num_threads": 1, **options}
        return EngineConfig(**options).resolve(info, cuda_available=False, free_memory_bytes=1 << 30)

    return make


class GraphsOnCpu(InterpreterDevice):
    """Runs steps as a GPU does; a "graph" calls the forward again on the same buffers, and poisons its output between."""

    supports_graphs = True

    def capture_graph(self, forward: Callable[[], torch.Tensor]) -> CapturedGraph:
        output = forward()

        def replay() -> None:
            output.copy_(forward())

        output.fill_(torch.nan)
        return CapturedGraph(replay, output)


@pytest.fixture
def graphs_on_cpu() -> type[GraphsOnCpu]:
    return GraphsOnCpu


@pytest.fixture
def tiny_model_class() -> type[TinyModel]:
    return TinyModel


@pytest.fixture(params=["host", "device", "graphs"])
def pipeline(request: pytest.FixtureRequest) -> str:
    """Where steps are built and sampled. On the "device" kernels are replaced by their references in torch."""
    name: str = request.param
    return name


@pytest.fixture
def make_driver(make_config: Callable[..., ResolvedConfig], pipeline: str) -> MakeDriver:
    def make(*, num_blocks: int = 60, **options: Any) -> Driver:
        config = make_config(**options)
        backend_class = TritonPagedBackend if pipeline == "graphs" else TorchPagedBackend
        backend = backend_class(
            AttentionConfig(
                num_heads=4,
                num_kv_heads=2,
                head_dim=8,
                block_size=config.cache.block_size,
                dtype=torch.float32,
                kv_cache_dtype=torch.float32,
            )
        )
        model = TinyModel(backend, layer_windows=config.model.windows)
        device_class = {"host": CpuDevice, "device": InterpreterDevice, "graphs": GraphsOnCpu}[pipeline]
        device = device_class(num_threads=None)
        num_caches = num_layer_caches(config.cache.kv_cache_groups)
        kv_caches = [backend.allocate_kv_cache(num_blocks, device.torch_device).fill_(torch.nan) for _ in range(num_caches)]
        # The runner calls a model by its interface alone; this one needs no loader.
        runner = ModelRunner(config, model=model, attention_backend=backend, kv_caches=kv_caches, device=device)  # type: ignore[arg-type]
        if device.supports_graphs:
            runner.capture_graphs()
        return Driver(runner, model, block_size=config.cache.block_size, num_blocks=num_blocks)

    return make
