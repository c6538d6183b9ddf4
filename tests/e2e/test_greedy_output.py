"""Greedy output of the real model equals transformers', token for token, in float32."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_bench.workloads import WorkloadRequest, load_workload
from tests.covering import LEFT_TO_CI
from tests.e2e.questions import CHAT_QUESTIONS

Gaps = Callable[[Any, list[int], list[int]], list[float]]

# Two float32 implementations differ in rounding; where the two best logits are closer than this, either is right.
TIE = 1e-4


def assert_greedy(outputs: list[RequestOutput], oracle: Any, gaps: Gaps) -> None:
    ties = {}
    for output in outputs:
        worst = max(gaps(oracle, output.prompt_token_ids, output.token_ids))
        assert worst < TIE, f"{output.request_id}: a token is {worst:.2e} below the oracle's best"
        if worst > 0:
            ties[output.request_id] = worst
    print(f"{len(outputs)} requests, {sum(len(output.token_ids) for output in outputs)} tokens; decided by rounding: {ties or 'none'}")


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_ten_chats_equal_transformers(smollm2_oracle: Any, oracle_gaps: Gaps) -> None:
    async with AsyncEngine("smollm2", dtype="float32") as engine:
        messages = [[{"role": "user", "content": question}] for question in CHAT_QUESTIONS]
        outputs = await engine.generate_batch(messages, SamplingParams(temperature=0, max_tokens=24), progress=False)
    assert_greedy(outputs, smollm2_oracle, oracle_gaps)
    for output in outputs[:2]:  # generate() itself, where nothing is derived: it takes a second a dozen tokens
        with torch.inference_mode():
            ids = smollm2_oracle.generate(torch.tensor([output.prompt_token_ids]), do_sample=False, max_new_tokens=24)
        assert output.token_ids == ids[0, len(output.prompt_token_ids) :].tolist()
        assert output.finish_reason == ("stop" if len(output.token_ids) < 24 else "length")


@dataclass(frozen=True)
class Mixed:
    """The 64 requests of the "mixed" workload, or every n-th of them, and what the engine gives."""

    requests: list[WorkloadRequest]
    max_num_seqs: int
    outputs: list[RequestOutput]

    async def run(self, *, alone: bool = False, weights: str = "exact", **options: Any) -> tuple[list[RequestOutput], int]:
        """The outputs once more, and how often the engine preempted."""
        params = [SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True) for request in self.requests]
        prompts = [request.prompt_token_ids for request in self.requests]
        async with AsyncEngine("smollm2", weights=weights, max_num_seqs=1 if alone else self.max_num_seqs, **options) as engine:
            outputs = await engine.generate_batch(prompts, params, progress=False)
            return outputs, engine.stats().num_preemptions


@pytest.fixture(scope="module", params=[pytest.param(8, id="every-eighth"), pytest.param(1, id="all", marks=LEFT_TO_CI)])
def mixed(request: pytest.FixtureRequest) -> Mixed:
    workload = load_workload("mixed")
    chosen = Mixed(list(workload.requests[:: request.param]), workload.max_num_seqs // request.param, [])
    outputs, _ = asyncio.run(chosen.run())
    return replace(chosen, outputs=outputs)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_mixed_prompts_equal_transformers(mixed: Mixed, smollm2_oracle: Any, oracle_gaps: Gaps) -> None:
    assert [len(output.token_ids) for output in mixed.outputs] == [request.max_tokens for request in mixed.requests]
    assert_greedy(mixed.outputs, smollm2_oracle, oracle_gaps)


# 100 token slots for each request that may run, where they come to some 220 tokens each.
TINY_POOL = "tiny"


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overlap", "pool", "chunk", "prefix_cache"),
    [
        pytest.param(*point, marks=[] if point == (False, TINY_POOL, 16, False) else [pytest.mark.slow])
        for point in itertools.product([True, False], [None, TINY_POOL], [0, 16], [True, False])
    ],
)
async def test_the_real_model_gives_the_same_tokens_under_every_schedule(
    mixed: Mixed, overlap: bool, pool: str | None, chunk: int, prefix_cache: bool
) -> None:
    outputs, num_preemptions = await mixed.run(
        async_scheduling=overlap,
        num_kv_cache_blocks=mixed.max_num_seqs * 100 // 16 if pool == TINY_POOL else None,
        long_prefill_token_threshold=chunk,
        enable_prefix_caching=prefix_cache,
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed.outputs]
    assert (num_preemptions > 0) == (pool == TINY_POOL)


# What llama.cpp's server gives, of all 64, on the same file, whose activations are 8-bit too (measured with `aioengine bench compare`).
SAME_TOKENS_OF_LLAMA_CPP = 31


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_the_default_weights_keep_to_float32_at_least_as_well_as_llama_cpp(mixed: Mixed) -> None:
    outputs, _ = await mixed.run(weights="auto")
    same = sum(output.token_ids == exact.token_ids for output, exact in zip(outputs, mixed.outputs, strict=True))
    # All of them would mean that these are not the fast weights.
    assert SAME_TOKENS_OF_LLAMA_CPP * len(outputs) // 64 <= same < len(outputs)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_packed_and_dense_weights_give_the_same_tokens(mixed: Mixed) -> None:
    outputs, _ = await mixed.run(weights="dense")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed.outputs]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_real_model_gives_the_same_tokens_to_a_request_alone(mixed: Mixed) -> None:
    outputs, _ = await mixed.run(alone=True)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed.outputs]
