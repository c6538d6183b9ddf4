"""`fast` takes greedy tokens from a head of rounded activations: those of the exact head, token for token, in most steps."""

from __future__ import annotations

import pytest
import torch

from aioengine import AsyncEngine, SamplingParams
from aioengine.models.native_decoder import NativeDecoderForCausalLM
from aioengine_kernels.cpu import status, supported_isas

HAS_FAST_HEAD = status() is None and supported_isas()[-1] == "avx512"  # the model's head has 8 bits


@pytest.mark.model
@pytest.mark.skipif(not HAS_FAST_HEAD, reason="the exact head of 8-bit weights is the fastest here")
async def test_tokens_are_those_of_the_exact_head(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"Tell me {number} facts about the number {number}." for number in range(8)]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 8
    decided: list[bool] = []
    by_rounding = NativeDecoderForCausalLM.greedy_tokens

    def watched(self: NativeDecoderForCausalLM, hidden: torch.Tensor) -> torch.Tensor | None:
        tokens = by_rounding(self, hidden)
        decided.append(tokens is not None)
        return tokens

    async def generate() -> list[list[int]]:
        async with AsyncEngine("smollm2", weights="fast") as engine:
            return [output.token_ids for output in await engine.generate_batch(prompts, params, progress=False)]

    monkeypatch.setattr(NativeDecoderForCausalLM, "greedy_tokens", watched)
    tokens = await generate()
    assert sum(decided) > 0.9 * len(decided) > 18
    monkeypatch.setattr(NativeDecoderForCausalLM, "greedy_tokens", lambda self, hidden: None)
    assert await generate() == tokens
