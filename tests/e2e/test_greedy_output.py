"""Greedy output of the real model equals transformers', token for token, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from aioengine_bench.workloads import load_workload

from aioengine import AsyncEngine, RequestOutput, SamplingParams

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


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_sixty_four_mixed_prompts_equal_transformers(smollm2_oracle: Any, oracle_gaps: Gaps) -> None:
    workload = load_workload("mixed")
    params = [SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True) for request in workload.requests]
    async with AsyncEngine("smollm2", dtype="float32", max_num_seqs=workload.max_num_seqs) as engine:
        outputs = await engine.generate_batch([request.prompt_token_ids for request in workload.requests], params, progress=False)
    assert [len(output.token_ids) for output in outputs] == [request.max_tokens for request in workload.requests]
    assert_greedy(outputs, smollm2_oracle, oracle_gaps)
