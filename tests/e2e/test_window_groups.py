"""Layers with windows through the whole engine: the tokens of transformers, whatever the scheduler does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioengine import AsyncEngine, SamplingParams
from tests.models.support import Case, random_model
from tests.tiny_tokenizer import byte_level_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 12
CASES = {
    "windows only": Case(transformers.MistralConfig(**SHAPE, sliding_window=WINDOW), transformers.MistralForCausalLM),
}
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=CASES)
def folder_and_answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model's folder, prompts (two begin alike), and what transformers answers to each alone."""
    model: Any = random_model(CASES[request.param])
    folder = tmp_path_factory.mktemp("windows")
    model.save_pretrained(folder)
    tokenizer = byte_level_tokenizer(["<eos>", "<bos>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(folder)
    torch.manual_seed(3)
    prompts: list[list[int]] = [torch.randint(2, 258, (length,)).tolist() for length in (5, 90, 33, 12, 61)]
    prompts.append(prompts[1][:70] + prompts[0])
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            generate: Any = model.generate  # a method of transformers that torch.nn.Module hides
            out = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None)
        answers.append(out[0, len(prompt) :].tolist())
    return folder, prompts, answers


@pytest.mark.parametrize(("weights", "caching", "num_blocks"), [("dense", True, "few"), ("exact", False, "few"), ("exact", True, "many")])
async def test_tokens_are_transformers_in_chunks_in_a_small_pool_and_again_from_the_cache(
    folder_and_answers: tuple[Path, list[list[int]], list[list[int]]], weights: Any, caching: bool, num_blocks: str
) -> None:
    folder, prompts, answers = folder_and_answers
    block_size = 4 if weights == "dense" else 16  # of the native kernels
    few = 11 if block_size == 4 else 5  # one prompt of 90 tokens alone would take more if it held all its blocks
    async with AsyncEngine(
        str(folder),
        weights=weights,
        dtype="float32",
        enable_prefix_caching=caching,
        num_kv_cache_blocks=400 if num_blocks == "many" else few,
        check_invariants=True,
        block_size=block_size,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        max_model_len=160,
    ) as engine:
        assert [group.sliding_window for group in engine.resolved_config.cache.kv_cache_groups] == [WINDOW]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(2):
            outputs = await engine.generate_batch(prompts, params, progress=False)
            assert [output.token_ids for output in outputs] == answers
        stats = engine.stats()
    assert (stats.prefix_cache_hits > 0) == caching or num_blocks == "few"
