"""Whatever the schedule, the same tokens: overlap, KV pressure, chunking, prefix cache and company change nothing.

The oracle is each request run alone, one step at a time, un-preempted, uncached and unchunked.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_kernels.cpu import status as native_status
from tests.covering import every_pair

NUM_REQUESTS = 24

needs_native = pytest.mark.skipif(native_status() is not None, reason=f"no native CPU kernels: {native_status()}")


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded ones, with shared prefixes, of lengths around the block size."""
    rng = random.Random(7)
    shared = [rng.randrange(2, 258) for _ in range(40)]
    made = []
    for index in range(NUM_REQUESTS):
        prompt = shared[: rng.choice([0, 16, 33, 40])] + [rng.randrange(2, 258) for _ in range(rng.randint(1, 60))]
        sampled: dict[str, Any] = {"temperature": 0.0}
        if index % 2:
            sampled = {"temperature": 0.9, "seed": index, "top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.9]), "min_p": 0.01}
        made.append((prompt, SamplingParams(max_tokens=rng.randint(1, 40), min_tokens=1, logprobs=2, **sampled)))
    return made


async def run(model: Path, *, alone: bool, weights: str = "dense", **options: Any) -> tuple[list[RequestOutput], int]:
    """Outputs in order, and how often something was preempted."""
    async with AsyncEngine(str(model), weights=weights, dtype="float32", check_invariants=True, max_model_len=256, **options) as engine:
        if alone:
            outputs = []
            for prompt, params in requests():
                outputs += await engine.generate_batch([prompt], params, progress=False)
        else:
            prompts, params_list = zip(*requests(), strict=True)
            outputs = await engine.generate_batch(prompts, params_list, progress=False)
        return outputs, engine.stats().num_preemptions


def run_plainly(model: Path, *, weights: str) -> list[RequestOutput]:
    plain = {"async_scheduling": False, "enable_prefix_caching": False, "enable_chunked_prefill": False}
    outputs, _ = asyncio.run(run(model, alone=True, weights=weights, **plain))
    return outputs


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> list[RequestOutput]:
    return run_plainly(tiny_model, weights="dense")


@pytest.fixture(scope="module")
def packed_oracles(tiny_model: Path) -> dict[str, list[RequestOutput]]:
    return {weights: run_plainly(tiny_model, weights=weights) for weights in ("exact", "fast")}


SWITCH = [True, False]


@pytest.mark.parametrize(
    ("overlap", "pool", "chunk", "prefix_cache", "alone"), every_pair(SWITCH, ["big", "tiny"], [None, 16, 4], SWITCH, SWITCH)
)
async def test_every_schedule_gives_the_tokens_of_the_oracle(
    tiny_model: Path, oracle: list[RequestOutput], overlap: bool, pool: str, chunk: int | None, prefix_cache: bool, alone: bool
) -> None:
    outputs, num_preemptions = await run(
        tiny_model,
        alone=alone,
        async_scheduling=overlap,
        num_kv_cache_blocks=18 if pool == "tiny" else 600,  # 17 blocks of 16: the longest request needs 9
        enable_prefix_caching=prefix_cache,
        enable_chunked_prefill=chunk is not None,
        long_prefill_token_threshold=chunk or 0,
        max_num_seqs=8,
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in oracle]
    assert [output.text for output in outputs] == [output.text for output in oracle]
    assert [output.finish_reason for output in outputs] == [output.finish_reason for output in oracle]
    if pool == "tiny" and not alone:
        assert num_preemptions > 0, "the tiny pool was meant to force preemption"
    if pool == "big":
        assert num_preemptions == 0


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], Any]]:
    """Tokens, and the float32 log-probabilities at each of them."""
    return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]


@needs_native
@pytest.mark.parametrize(
    ("weights", "overlap", "pool", "chunk", "prefix_cache", "alone"),
    every_pair(["exact", "fast"], SWITCH, ["big", "tiny"], [None, 4], SWITCH, SWITCH),
)
async def test_with_packed_weights_every_schedule_gives_the_same_bits(
    tiny_model: Path,
    packed_oracles: dict[str, list[RequestOutput]],
    weights: str,
    overlap: bool,
    pool: str,
    chunk: int | None,
    prefix_cache: bool,
    alone: bool,
) -> None:
    outputs, _ = await run(
        tiny_model,
        weights=weights,
        alone=alone,
        async_scheduling=overlap,
        num_kv_cache_blocks=18 if pool == "tiny" else 600,
        enable_prefix_caching=prefix_cache,
        enable_chunked_prefill=chunk is not None,
        long_prefill_token_threshold=chunk or 0,
        max_num_seqs=8,
    )
    assert bits(outputs) == bits(packed_oracles[weights])


@needs_native
def test_exact_weights_give_the_tokens_of_the_reference(
    oracle: list[RequestOutput], packed_oracles: dict[str, list[RequestOutput]]
) -> None:
    assert [output.token_ids for output in packed_oracles["exact"]] == [output.token_ids for output in oracle]


async def test_the_oracle_itself_is_what_transformers_generates(tiny_model: Path, oracle: list[RequestOutput]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for (prompt, params), output in zip(requests(), oracle, strict=True):
        if params.is_greedy:
            with torch.inference_mode():
                ids = model.generate(
                    torch.tensor([prompt]), do_sample=False, min_new_tokens=1, max_new_tokens=params.max_tokens, pad_token_id=0
                )
            assert output.token_ids == ids[0, len(prompt) :].tolist()
