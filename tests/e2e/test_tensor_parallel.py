"""Ranks that share a model give what one gives: tokens, log-probabilities, frames. The ranks are threads here, see `thread_ranks`."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine import startup
from aioengine.errors import ConfigError
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.testing import FakeTokenizer
from aioengine.testing.builders import make_model_info
from aioengine_kernels.cpu import status as native_status
from tests.executor.thread_ranks import ThreadRanks, create_thread_ranks
from tests.models.support import VOCAB, cases, random_model, save
from tests.models.test_gguf_packed import write_model
from tests.waiting import until

needs_native = pytest.mark.skipif(native_status() is not None, reason=f"no native CPU kernels: {native_status()}")
TOLERANCE = 1e-4


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_make_executor", create_thread_ranks)


@dataclasses.dataclass(frozen=True)
class Run:
    outputs: list[RequestOutput]
    frames: list[Any]
    stats: SchedulerStats
    num_sums: int


def requests(vocab_size: int, *, num: int = 8, **more: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and seeded ones, some with a prefix in common, all with log-probabilities."""
    rng = random.Random(3)
    shared = [rng.randrange(3, vocab_size) for _ in range(20)]
    prompts = [shared[: rng.choice([0, 16, 20])] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 24))] for _ in range(num)]
    sampled: list[dict[str, Any]] = [{"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 2 else {"temperature": 0.0} for i in range(num)]
    return prompts, [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **params, **more) for params in sampled]


async def run(model: Path, size: int, *, more: dict[str, Any] | None = None, vocab_size: int = VOCAB, **options: Any) -> Run:
    """All requests are there before the first step, so that the frames depend on nothing but the tokens."""
    settings: dict[str, Any] = {
        "prefix_caching_seed": "same",
        "max_model_len": 128,
        "num_kv_cache_blocks": 200,
        "max_num_seqs": 8,
        "seed": 0,
        **options,
    }
    tokenizer = None if (model / "tokenizer.json").exists() else FakeTokenizer()
    engine = AsyncEngine(str(model), tokenizer=tokenizer, tensor_parallel_size=size, check_invariants=True, **settings)
    async with engine:
        prompts, params = requests(vocab_size, **(more or {}))
        with engine.events(maxlen=10_000) as subscription:
            engine.pause()
            task = asyncio.ensure_future(engine.generate_batch(prompts, params, progress=False))
            await until(lambda: engine.stats().num_waiting_reqs == len(prompts))
            engine.resume()
            outputs = await task
            await until(lambda: engine._life.started().core.is_idle)
            events = subscription.drain()
        executor = engine._life.executor
        num_sums = executor.meeting.num_sums if isinstance(executor, ThreadRanks) else 0
        frames = [frame(event) for event in events if isinstance(event, (StepEvent, StepResultEvent))]
        return Run(outputs, frames, engine.stats(), num_sums)


def frame(event: StepEvent | StepResultEvent) -> Any:
    """What a step decided, without when."""
    common = (event.step_id, event.stats, event.block_changes, event.finished, event.block_hashes)
    if isinstance(event, StepEvent):
        return (*common, event.output, event.admission_stop)
    return (*common, event.num_new_tokens, event.num_draft_tokens, event.num_accepted_tokens)


def assert_same(ranks: Run, alone: Run, *, tolerance: float = TOLERANCE) -> None:
    assert ranks.num_sums > 0, "nothing was summed over ranks"
    for ours, theirs in zip(ranks.outputs, alone.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.outputs[0].logprobs or [], theirs.outputs[0].logprobs or [], strict=True):
            for token_id, entry in mine.items():
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=tolerance)
    assert ranks.frames == alone.frames


@pytest.mark.parametrize("weights", ["dense", pytest.param("exact", marks=needs_native)])
@pytest.mark.parametrize("name", ["llama", "llama-bias", "mistral-window", "qwen2", "qwen3", "gemma3"])
async def test_every_family_gives_the_same(name: str, weights: str, tmp_path: Path, in_threads: None) -> None:
    case = cases()[name]
    case.config.num_key_value_heads = max(case.config.num_key_value_heads, 2)  # Gemma's one KV head cannot be shared
    save(random_model(case), tmp_path)
    options: dict[str, Any] = {"weights": weights, "dtype": "float32"}
    assert_same(await run(tmp_path, 2, **options), await run(tmp_path, 1, **options))


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "guesses": ({"num_speculative_tokens": 3, "prompt_lookup_min": 1}, {}),
    "preemption": ({"num_kv_cache_blocks": 12, "enable_prefix_caching": False}, {}),
    "chunks and one step at a time": ({"max_num_batched_tokens": 9, "async_scheduling": False}, {}),
    "scored prompts": ({}, {"prompt_logprobs": 1}),
    "grammars": ({}, {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,12}")}),
}


@pytest.mark.parametrize("feature", FEATURES)
async def test_features_give_the_same(feature: str, tiny_model: Path, in_threads: None) -> None:
    options, params = FEATURES[feature]
    both = {"more": params, "vocab_size": 258, "weights": "dense", "dtype": "float32", **options}
    ranks, alone = await run(tiny_model, 2, **both), await run(tiny_model, 1, **both)
    assert_same(ranks, alone)
    used = {"guesses": ranks.stats.num_draft_tokens, "preemption": ranks.stats.num_preemptions}
    assert used.get(feature, 1) > 0, "the feature was not used"


@needs_native
async def test_packed_blocks_are_cut_between_groups(tmp_path: Path, in_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file whose blocks have 256 columns, of which each rank takes a half."""
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    path = write_model(tmp_path / "m.gguf", "Q5_K")
    options: dict[str, Any] = {"weights": "exact", "max_model_len": 64, "vocab_size": 200}
    ranks, alone = await run(path, 2, **options), await run(path, 1, **options)
    assert_same(ranks, alone, tolerance=1e-3)  # activations of 16 bits: a rounding that falls the other way is as much


async def test_a_size_that_does_not_divide_is_refused_with_those_that_do(tiny_model: Path) -> None:
    refused = r"tensor_parallel_size 4 does not divide the 6 attention heads and the 2 KV heads of .*; sizes that do: 1, 2"
    with pytest.raises(ConfigError, match=refused):
        await AsyncEngine(str(tiny_model), tensor_parallel_size=4).start()


def test_several_ranks_need_several_processes() -> None:
    with pytest.raises(ConfigError, match=r'"uniproc" is one rank, but tensor_parallel_size is 2'):
        EngineConfig(tensor_parallel_size=2, distributed_executor_backend="uniproc").resolve(
            make_model_info(), cuda_available=False, free_memory_bytes=1 << 30
        )
