"""Models in which some layers have a sliding window: at every setting the tokens and log-probabilities of transformers.

Prompts are several windows long, so that blocks behind a window go back to the pool while their request runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_kernels.cpu import status as native_status
from tests.covering import every_pair
from tests.tiny_tokenizer import byte_level_tokenizer

NUM_REQUESTS = 8
WINDOW = 20
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # far from uniform logits: no ties between the best tokens
    "eos_token_id": 0,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "sliding_window": WINDOW,
}


def config_of(family: str, layer_types: list[str]) -> Any:
    import transformers

    shape = {**SHAPE, "num_hidden_layers": len(layer_types)}
    if family == "mistral":
        return transformers.MinistralConfig(**shape, layer_types=layer_types)
    if family == "qwen2":
        del shape["head_dim"]
        return transformers.Qwen2Config(**shape, use_sliding_window=True, max_window_layers=2)
    return transformers.Qwen3Config(**shape, use_sliding_window=True, layer_types=layer_types)


def save_random_model(family: str, folder: Path, *, layer_types: list[str] = LAYER_TYPES) -> None:
    """With a byte-level tokenizer, as a folder that any engine can load."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = byte_level_tokenizer(["<eos>", "<bos>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>").save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, layer_types)).save_pretrained(folder)


FAMILIES = ["mistral", "qwen2", "qwen3"]
Expected = list[tuple[list[int], list[float]]]  # of each request: its tokens, and their log-probabilities


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy ones with shared prefixes, some of which are longer than a window and all its blocks."""
    rng = random.Random(5)
    shared = [rng.randrange(2, 258) for _ in range(70)]
    made = []
    for index in range(NUM_REQUESTS):
        prompt = shared[: (0, 16, 48, 70)[index % 4]] + [rng.randrange(2, 258) for _ in range(rng.randint(1, 40))]
        made.append((prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(20, 50), ignore_eos=True, logprobs=0)))
    return made


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's random model."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_random_model(family, made[family])
        return made[family]

    return make


@pytest.fixture(scope="module")
def expected_of(folder_of: Callable[[str], Path]) -> Callable[[str], Expected]:
    """What transformers generates for each request alone."""
    from transformers import AutoModelForCausalLM

    made: dict[str, Expected] = {}

    def make(family: str) -> Expected:
        if family not in made:
            model = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32).eval()
            made[family] = [generate(model, prompt, params.max_tokens) for prompt, params in requests()]
        return made[family]

    return make


def generate(model: Any, prompt: list[int], max_tokens: int | None) -> tuple[list[int], list[float]]:
    assert max_tokens is not None
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            min_new_tokens=0,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(out.logits).log_softmax(-1)
    return tokens, logprobs[range(len(tokens)), tokens].tolist()


async def run(folder: Path, **options: Any) -> tuple[list[RequestOutput], int]:
    """Outputs in order, and how often something was preempted."""
    async with AsyncEngine(str(folder), check_invariants=True, max_model_len=256, max_num_batched_tokens=32, **options) as engine:
        prompts, params = zip(*requests(), strict=True)
        outputs = await engine.generate_batch(prompts, params, progress=False)
        return outputs, engine.stats().num_preemptions


def check(outputs: list[RequestOutput], expected: Expected) -> None:
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens
        entries = output.outputs[0].logprobs
        assert entries is not None
        ours = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
        assert ours == pytest.approx(logprobs, abs=2e-3)


SWITCH = [True, False]
WEIGHTS = ["dense", *(["exact"] if native_status() is None else [])]


@pytest.mark.parametrize(
    ("family", "weights", "pool", "chunk", "prefix_cache", "overlap"),
    every_pair(FAMILIES, WEIGHTS, ["big", "tiny"], [0, 16], SWITCH, SWITCH),
)
async def test_every_schedule_gives_the_tokens_of_transformers(
    folder_of: Callable[[str], Path],
    expected_of: Callable[[str], Expected],
    family: str,
    weights: str,
    pool: str,
    chunk: int,
    prefix_cache: bool,
    overlap: bool,
) -> None:
    outputs, num_preemptions = await run(
        folder_of(family),
        weights=weights,
        dtype="float32",
        # The longest request needs 9 blocks for the full layers and at most 5 for each of the two groups with a window.
        num_kv_cache_blocks=20 if pool == "tiny" else 600,
        enable_prefix_caching=prefix_cache,
        async_scheduling=overlap,
        long_prefill_token_threshold=chunk,
        max_num_seqs=NUM_REQUESTS,
    )
    check(outputs, expected_of(family))
    assert (num_preemptions > 0) == (pool == "tiny")
