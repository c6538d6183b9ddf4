"""Architectures without a class of their own give the tokens and log-probabilities that transformers gives.

Six requests at once, with prompts that share a beginning and are computed 16 tokens at a time, in a pool that holds three of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioengine import AsyncEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from aioengine.kv_cache_groups import group_layers
from aioengine.models.info import read_model_info, resolve_model
from aioengine.outputs import TokenLogprobs
from aioengine.testing import EOS_TOKEN_ID, FakeTokenizer
from tests.covering import LEFT_TO_CI
from tests.models.fallback_cases import CASES, save_random

# Of each way to differ from a Llama one: latent attention, experts, windows and caps, scales, positions that are learned.
ALWAYS = {"deepseek_v3": True, "gemma2": True, "cohere2": False, "gpt2": True, "granite": False, "phi3": True, "qwen3_moe": False}
MAX_TOKENS = 14


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(36)]
    return [
        shared[:start] + [rng.randrange(256) for _ in range(more)]
        for start, more in ((36, 20), (36, 1), (0, 5), (33, 9), (20, 40), (0, 50))
    ]


def small_pool(folder: Path) -> int:
    """Blocks for three of the requests: 14 where layers see everything, less for each group of layers with a window."""
    groups = group_layers(read_model_info(resolve_model(str(folder))).windows)
    return sum(14 if group.sliding_window is None else 6 for group in groups)


async def generate(folder: Path, *, prefix_cache: bool) -> tuple[list[RequestOutput], int]:
    async with AsyncEngine(
        str(folder),
        tokenizer=FakeTokenizer(),
        check_invariants=True,
        enable_prefix_caching=prefix_cache,
        long_prefill_token_threshold=16,
        num_kv_cache_blocks=1 + small_pool(folder),
        max_model_len=128,
    ) as engine:
        scored = None if prefix_cache else 2  # who wants log-probabilities of a prompt has it computed
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS, logprobs=3, prompt_logprobs=scored)
        outputs = await engine.generate_batch(prompts(), params, progress=False)
        return outputs, engine.stats().num_preemptions


def reference(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities of what follows each token, [n, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def assert_entries(entries: Sequence[TokenLogprobs], expected: torch.Tensor, token_ids: list[int]) -> None:
    assert len(entries) == len(token_ids)
    for entry, row, token in zip(entries, expected, token_ids, strict=True):
        assert token in entry
        ids = list(entry)
        assert [entry[i].logprob for i in ids] == pytest.approx(row[ids].tolist(), abs=2e-5, rel=5e-6)


@pytest.mark.parametrize(
    ("kind", "prefix_cache"),
    [
        pytest.param(kind, prefix_cache, marks=() if ALWAYS.get(kind) is prefix_cache else LEFT_TO_CI)
        for kind in CASES
        for prefix_cache in (True, False)
    ],
)
async def test_tokens_and_logprobs_are_those_of_transformers(kind: str, prefix_cache: bool, tmp_path: Path) -> None:
    model = save_random(kind, tmp_path)
    outputs, num_preemptions = await generate(tmp_path, prefix_cache=prefix_cache)
    assert num_preemptions > 0, "the pool was meant to force preemption"
    for prompt, output in zip(prompts(), outputs, strict=True):
        expected = reference(model, prompt + output.token_ids)
        answers, entries = expected[len(prompt) - 1 : -1], output.outputs[0].logprobs
        assert entries is not None
        assert_entries(entries, answers, output.token_ids)
        allowed = answers.clone()
        allowed[:, EOS_TOKEN_ID] = -torch.inf  # which min_tokens keeps away
        assert output.token_ids == allowed.argmax(-1).tolist()
        if not prefix_cache:
            assert output.prompt_logprobs is not None
            scored = [entry for entry in output.prompt_logprobs if entry is not None]
            assert_entries(scored, expected[: len(prompt) - 1], prompt[1:])
    assert any(output.num_cached_tokens for output in outputs) is prefix_cache
    if ALWAYS.get(kind) is None:
        assert outputs[0].token_ids == generated(model, prompts()[0])


def generated(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """What `generate` of transformers, with its cache, makes of a prompt."""
    with torch.inference_mode():
        generate: Any = model.generate
        ids = generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=MAX_TOKENS, max_new_tokens=MAX_TOKENS, pad_token_id=EOS_TOKEN_ID
        )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("kind", ["gemma2"])
async def test_grammars_seeds_and_draft_tokens_work_as_with_any_model(kind: str, tmp_path: Path) -> None:
    """With windows that are shorter than the prompts: draft tokens are checked in one step, and change nothing."""
    save_random(kind, tmp_path)
    again = [7, 9, 11, 13] * 8
    requests = [
        (again, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20)),
        (prompts()[0], SamplingParams(temperature=0.8, seed=5, top_k=20, max_tokens=12, min_tokens=12)),
        (
            prompts()[4],
            SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["yes, it is", "no"])),
        ),
    ]
    found: list[list[RequestOutput]] = []
    for num_draft_tokens in (0, 3):
        options: dict[str, Any] = {"num_speculative_tokens": num_draft_tokens, "max_model_len": 128, "num_kv_cache_blocks": 80}
        async with AsyncEngine(str(tmp_path), tokenizer=FakeTokenizer(), check_invariants=True, **options) as engine:
            outputs = [engine.generate(prompt, params) for prompt, params in requests]
            found.append([[output async for output in stream][-1] for stream in outputs])
            stats = engine.stats()
            assert (stats.num_draft_tokens > 0) == (num_draft_tokens > 0)
    assert [output.token_ids for output in found[0]] == [output.token_ids for output in found[1]]
    assert found[0][2].text in ("yes, it is", "no")
