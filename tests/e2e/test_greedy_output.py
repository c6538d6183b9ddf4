"""Greedy output of the real model equals transformers', token for token, in float32."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_bench.workloads import load_workload

Gaps = Callable[[Any, list[int], list[int]], list[float]]

QUESTIONS = [
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a haiku about autumn leaves.",
    "List three uses of a paper clip.",
    "Translate to Spanish: good morning, my friend.",
    "What is 17 times 23? Show your work.",
    "Who wrote the novel Frankenstein, and when?",
    "Give me a recipe for pancakes with four ingredients.",
    "What does the Python keyword `yield` do?",
    "Name the planets of the solar system in order.",
]

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
async def test_ten_chats_equal_transformers(smollm2_oracle: Any, oracle_gaps: Gaps) -> None:
    async with AsyncEngine("smollm2", dtype="float32") as engine:
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = await engine.generate_batch(messages, SamplingParams(temperature=0, max_tokens=24), progress=False)
    assert_greedy(outputs, smollm2_oracle, oracle_gaps)
    for output in outputs[:2]:  # generate() itself, where nothing is derived: it takes a second a dozen tokens
        with torch.inference_mode():
            ids = smollm2_oracle.generate(torch.tensor([output.prompt_token_ids]), do_sample=False, max_new_tokens=24)
        assert output.token_ids == ids[0, len(output.prompt_token_ids) :].tolist()
        assert output.finish_reason == ("stop" if len(output.token_ids) < 24 else "length")


async def run_mixed(*, alone: bool = False, weights: str = "exact", **options: Any) -> tuple[list[RequestOutput], int]:
    """The 64 requests of the "mixed" workload and how often the engine preempted."""
    workload = load_workload("mixed")
    params = [SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True) for request in workload.requests]
    prompts = [request.prompt_token_ids for request in workload.requests]
    async with AsyncEngine("smollm2", weights=weights, max_num_seqs=1 if alone else workload.max_num_seqs, **options) as engine:
        outputs = await engine.generate_batch(prompts, params, progress=False)
        return outputs, engine.stats().num_preemptions


@pytest.fixture(scope="module")
def mixed_outputs() -> list[RequestOutput]:
    outputs, _ = asyncio.run(run_mixed())
    return outputs


@pytest.mark.model
@pytest.mark.timeout(900)
def test_sixty_four_mixed_prompts_equal_transformers(mixed_outputs: list[RequestOutput], smollm2_oracle: Any, oracle_gaps: Gaps) -> None:
    expected = [request.max_tokens for request in load_workload("mixed").requests]
    assert [len(output.token_ids) for output in mixed_outputs] == expected
    assert_greedy(mixed_outputs, smollm2_oracle, oracle_gaps)


# 3,200 token slots, where the 32 requests that may run at once come to some 7,000 tokens.
TINY_POOL = 200


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overlap", "blocks", "chunk", "prefix_cache"),
    [
        pytest.param(*point, marks=[] if point == (False, TINY_POOL, 16, False) else [pytest.mark.slow])
        for point in itertools.product([True, False], [None, TINY_POOL], [0, 16], [True, False])
    ],
)
async def test_the_real_model_gives_the_same_tokens_under_every_schedule(
    mixed_outputs: list[RequestOutput], overlap: bool, blocks: int | None, chunk: int, prefix_cache: bool
) -> None:
    outputs, num_preemptions = await run_mixed(
        async_scheduling=overlap, num_kv_cache_blocks=blocks, long_prefill_token_threshold=chunk, enable_prefix_caching=prefix_cache
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed_outputs]
    assert (num_preemptions > 0) == (blocks is not None)


# What llama.cpp's server gives on the same file, whose activations are 8-bit too (measured with `aioengine bench compare`).
SAME_TOKENS_OF_LLAMA_CPP = 31


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_the_default_weights_keep_to_float32_at_least_as_well_as_llama_cpp(mixed_outputs: list[RequestOutput]) -> None:
    outputs, _ = await run_mixed(weights="auto")
    same = sum(output.token_ids == exact.token_ids for output, exact in zip(outputs, mixed_outputs, strict=True))
    assert SAME_TOKENS_OF_LLAMA_CPP <= same < len(outputs)  # all of them would mean that these are not the fast weights


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_packed_and_dense_weights_give_the_same_tokens(mixed_outputs: list[RequestOutput]) -> None:
    outputs, _ = await run_mixed(weights="dense")
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed_outputs]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_real_model_gives_the_same_tokens_to_a_request_alone(mixed_outputs: list[RequestOutput]) -> None:
    outputs, _ = await run_mixed(alone=True)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in mixed_outputs]
