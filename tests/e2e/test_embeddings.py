"""Embeddings: transformers' hidden states, whatever else the engine does meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, InvalidRequestError, SamplingParams
from aioengine.events.recording.reader import read_recording
from aioengine.replay.frames import replay_frames
from aioengine_kernels.cpu import status as native_status

WEIGHTS = ["dense", *(["exact"] if native_status() is None else [])]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(tiny_model).eval()


def expected(oracle: Any, prompt: list[int], pooling: str, *, normalize: bool) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = oracle(torch.tensor([prompt])).last_hidden_state[0]
    vector = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    return vector / vector.norm() if normalize else vector


def some_prompts(num: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(2, 258) for _ in range(rng.choice((1, 5, 16, 17, 70)))] for _ in range(num)]


def engine_for(model: Path, weights: str, **options: Any) -> AsyncEngine:
    return AsyncEngine(str(model), weights=weights, dtype="float32", max_model_len=256, check_invariants=True, **options)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("mean", False), ("last", True), ("last", False)])
async def test_vectors_are_those_of_transformers(tiny_model: Path, oracle: Any, weights: str, pooling: Any, normalize: bool) -> None:
    prompts = some_prompts(12)
    # Chunks of 16, and so few blocks that some are preempted.
    async with engine_for(tiny_model, weights, max_num_batched_tokens=16, max_num_seqs=6, num_kv_cache_blocks=10) as engine:
        for _ in range(2):  # the second time the prefix cache has something
            outputs = await engine.embed(prompts, pooling=pooling, normalize=normalize)
            for prompt, output in zip(prompts, outputs, strict=True):
                vector = expected(oracle, prompt, pooling, normalize=normalize)
                torch.testing.assert_close(torch.tensor(output.embedding), vector, atol=1e-4, rtol=1e-4)
                assert output.prompt_token_ids == prompt
        assert engine.num_unfinished_reqs == 0


async def test_the_cache_serves_the_last_token_and_not_the_mean(tiny_model: Path) -> None:
    prompt = some_prompts(1)[0] * 100
    prompt = prompt[:70]
    async with engine_for(tiny_model, "dense") as engine:
        await engine.embed([prompt])
        (mean,), (last,) = await engine.embed([prompt]), await engine.embed([prompt], pooling="last")
    assert (mean.num_cached_tokens, last.num_cached_tokens) == (0, 64)


@pytest.mark.parametrize("weights", WEIGHTS)
async def test_tokens_and_vectors_do_not_disturb_each_other(tiny_model: Path, tmp_path: Path, weights: str) -> None:
    prompts, params = some_prompts(8), SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    async with engine_for(tiny_model, weights) as engine:
        tokens = [output.token_ids for output in await engine.generate_batch(prompts, params, progress=False)]
        vectors = [output.embedding for output in await engine.embed(prompts)]
    record = tmp_path / "steps.jsonl"
    async with engine_for(tiny_model, weights, max_num_batched_tokens=24, max_num_seqs=5, num_kv_cache_blocks=12, record=record) as engine:
        outputs, embeddings = await asyncio.gather(engine.generate_batch(prompts, params, progress=False), engine.embed(prompts))
    assert [output.token_ids for output in outputs] == tokens
    torch.testing.assert_close(torch.tensor([output.embedding for output in embeddings]), torch.tensor(vectors), atol=1e-5, rtol=1e-5)
    recording = read_recording(record)
    assert replay_frames(recording.header, recording.events).difference is None


async def test_what_cannot_be_embedded(tiny_model: Path) -> None:
    async with engine_for(tiny_model, "dense") as engine:
        for prompts, options, message in (
            ([[]], {}, "prompt 0: the prompt is empty"),
            ("text", {}, r"embed\(\) takes a list of prompts"),
            ([[5]], {"pooling": "max"}, "pooling must be"),
            ([[5]], {"normalize": 1}, "normalize must be True or False"),
            ([[5], [5] * 256], {}, "prompt 1: .*256 tokens"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await engine.embed(prompts, **options)
        assert await engine.embed([]) == []


async def test_a_cancelled_call_leaves_nothing_behind(tiny_model: Path) -> None:
    async with engine_for(tiny_model, "dense", max_num_batched_tokens=16, max_num_seqs=4) as engine:
        task = asyncio.create_task(engine.embed([[9] * 200] * 4))
        while not engine.stats().num_running_reqs:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert engine.num_unfinished_reqs == 0
        assert len(await engine.embed([[9] * 20])) == 1
