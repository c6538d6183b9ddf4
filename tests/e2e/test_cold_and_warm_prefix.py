"""A prompt whose beginning is in the prefix cache continues as one that is computed from scratch, and what logprobs promise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_kernels.cpu import status as native_status

WEIGHTS = ["dense", *(["exact", "fast"] if native_status() is None else [])]
BLOCK = 16


def engine_for(model: Path, weights: str, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        str(model), weights=weights, dtype="float32", max_model_len=256, num_kv_cache_blocks=200, check_invariants=True, **options
    )


async def greedy(engine: AsyncEngine, prompt: list[int]) -> RequestOutput:
    (output,) = await engine.generate_batch([prompt], SamplingParams(temperature=0.0, max_tokens=24, logprobs=3), progress=False)
    return output


@pytest.mark.parametrize("weights", WEIGHTS)
async def test_a_warm_prefix_gives_the_text_of_a_cold_one(tiny_model: Path, weights: str) -> None:
    rng = random.Random(3)
    prefix = [rng.randrange(2, 258) for _ in range(5 * BLOCK)]
    # Around block borders; the second ends inside a block, the third at the end of one, the fourth goes past the prefix.
    prompts = [prefix[:BLOCK], prefix[: 2 * BLOCK + 7], prefix[: 4 * BLOCK], [*prefix, *(rng.randrange(2, 258) for _ in range(9))]]
    async with engine_for(tiny_model, weights, enable_prefix_caching=False) as engine:
        cold = [await greedy(engine, prompt) for prompt in prompts]
    async with engine_for(tiny_model, weights) as engine:
        first = await greedy(engine, prefix)
        warm = [await greedy(engine, prompt) for prompt in prompts]
        # A conversation: the answer's own blocks are found too.
        longer = [*prefix, *first.token_ids, 5, 6, 7]
        warm.append(await greedy(engine, longer))
    async with engine_for(tiny_model, weights, enable_prefix_caching=False) as engine:
        cold.append(await greedy(engine, longer))
    assert [output.num_cached_tokens for output in warm] == [0, 2 * BLOCK, 3 * BLOCK, 5 * BLOCK, (len(longer) - 4) // BLOCK * BLOCK]
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert [output.text for output in warm] == [output.text for output in cold]
    if weights != "dense":  # PyTorch's products may differ in the last bit with the number of rows; the native ones do not
        assert [output.outputs[0].logprobs for output in warm] == [output.outputs[0].logprobs for output in cold]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
async def test_the_sampled_token_is_always_reported_with_its_rank(tiny_model: Path, mode: str) -> None:
    """Hot enough that most sampled tokens are not among the best two."""
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=40, min_tokens=40, logprobs=2)
    everything = SamplingParams(temperature=5.0, seed=1, max_tokens=40, min_tokens=40, logprobs=20)
    async with engine_for(tiny_model, "dense", logprobs_mode=mode) as engine:
        (output,) = await engine.generate_batch([[5, 6, 7]], params, progress=False)
        (wide,) = await engine.generate_batch([[5, 6, 7]], everything, progress=False)
    assert output.token_ids == wide.token_ids
    logprobs, more = output.outputs[0].logprobs, wide.outputs[0].logprobs
    assert logprobs is not None
    assert more is not None
    assert len(logprobs) == len(output.token_ids)
    beyond = 0
    for token_id, entry, larger in zip(output.token_ids, logprobs, more, strict=True):
        rank = entry[token_id].rank
        assert rank is not None
        assert len(entry) == (2 if rank <= 2 else 3), "the best two, and the sampled one if it is not among them"
        beyond += rank > 2
        better = sum(other.logprob > entry[token_id].logprob for other in larger.values())
        assert better == min(rank - 1, 20), "a rank counts those that are better"
    assert beyond > 20
