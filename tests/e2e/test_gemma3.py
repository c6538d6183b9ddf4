"""Gemma 3 through the engine against transformers: windows shorter than the prompts, contexts to 4k, every schedule; and the real 270M."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine_bench.workloads import load_workload
from aioengine_kernels.cpu import status as native_status
from tests.covering import every_pair
from tests.e2e.questions import CHAT_QUESTIONS
from tests.tiny_tokenizer import byte_level_tokenizer

Gaps = Callable[[Any, list[int], list[int]], list[float]]

WINDOW, MAX_LEN = 24, 4096
TIE = 1e-3  # logits of the tiny model are some 20 in size
WEIGHTS = ["dense", *(["exact", "fast"] if native_status() is None else [])]


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3: five layers with a window and one that sees everything, then two more."""
    folder = tmp_path_factory.mktemp("tiny_gemma3")
    tokenizer = byte_level_tokenizer(["<eos>", "<bos>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=MAX_LEN,
        sliding_window=WINDOW,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.Gemma3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.15))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_oracle(tiny_gemma: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_gemma, dtype=torch.float32).eval()


def requests(count: int = 12) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy ones, with shared prefixes, shorter and longer than the window."""
    rng = random.Random(7)
    shared = [rng.randrange(2, 258) for _ in range(100)]
    prompts = [shared[: rng.choice([0, 16, 33, 100])] + [rng.randrange(2, 258) for _ in range(rng.randint(1, 60))] for _ in range(count)]
    return prompts, [SamplingParams(max_tokens=rng.randint(1, 40), temperature=0, ignore_eos=True) for _ in prompts]


async def run(model: Path, prompts: Any, params: Any, **options: Any) -> tuple[list[RequestOutput], int]:
    async with AsyncEngine(str(model), dtype="float32", check_invariants=True, **options) as engine:
        outputs = await engine.generate_batch(prompts, params, progress=False)
        return outputs, engine.stats().num_preemptions


SWITCH = [True, False]
# Blocks of 16 tokens: enough for all, and enough for two of the longest request.
POOLS = {"big": 2000, "tiny": 120}


@pytest.mark.parametrize(
    ("weights", "overlap", "pool", "chunk", "prefix_cache"), every_pair(WEIGHTS, SWITCH, ["big", "tiny"], [None, 16, 5], SWITCH)
)
async def test_every_schedule_gives_the_tokens_of_transformers(
    tiny_gemma: Path,
    tiny_oracle: Any,
    oracle_gaps: Gaps,
    weights: str,
    overlap: bool,
    pool: str,
    chunk: int | None,
    prefix_cache: bool,
) -> None:
    prompts, params = requests()
    outputs, num_preemptions = await run(
        tiny_gemma,
        prompts,
        params,
        weights=weights,
        async_scheduling=overlap,
        max_model_len=256,
        num_kv_cache_blocks=POOLS[pool],
        enable_prefix_caching=prefix_cache,
        enable_chunked_prefill=chunk is not None,
        long_prefill_token_threshold=chunk or 0,
        max_num_seqs=8,
    )
    if weights == "fast":  # rounds activations, so it is compared with itself, alone: bit for bit
        options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 256, "num_kv_cache_blocks": POOLS["big"]}
        alone, _ = await run(tiny_gemma, prompts[:4], params[:4], weights="fast", **options)
        assert [output.token_ids for output in outputs[:4]] == [output.token_ids for output in alone]
    else:
        for prompt, output in zip(prompts, outputs, strict=True):
            assert max(oracle_gaps(tiny_oracle, prompt, output.token_ids)) < TIE
    if chunk is not None or pool == "big":  # whole prompts wait until they fit, and then may run to their end
        assert (num_preemptions > 0) == (pool == "tiny")


@pytest.mark.parametrize("weights", [pytest.param("dense", marks=pytest.mark.slow), *(["exact"] if "exact" in WEIGHTS else [])])
async def test_a_context_of_4k_gives_the_tokens_of_transformers(
    tiny_gemma: Path, tiny_oracle: Any, oracle_gaps: Gaps, weights: str
) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 258) for _ in range(length)] for length in (MAX_LEN - 24,)]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outputs, _ = await run(tiny_gemma, prompts, params, weights=weights, max_num_batched_tokens=700)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 24
        assert max(oracle_gaps(tiny_oracle, prompt, output.token_ids)) < TIE


# ------------------------------------------------------------------------------------------------------------ the real model
QUESTIONS = [*CHAT_QUESTIONS, "Was ist der Unterschied zwischen Wetter und Klima?", "日本の首都はどこですか。"]
# Of the real model, whose logits are some 20 in size: two float32 implementations differ by less.
REAL_TIE = 1e-3
# How many of the 64 prompts of "mixed" get float32's tokens with activations rounded to 8 bits. Measured: 56.
SAME_WHEN_FAST = 50


def chat(question: str) -> str:
    """As Gemma's template writes it. The file is of the model before it was taught to chat, and has none."""
    return f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def gemma_oracle() -> Any:
    """transformers' model, filled from the same GGUF file by the gguf package's own reader, in float32."""
    from aioengine.models.info import resolve_model
    from tests.models.support import reference_from_gguf

    return reference_from_gguf(resolve_model("gemma3-270m", progress=False)).eval()


async def greedy(prompts: Any, params: Any, *, weights: str, **options: Any) -> list[RequestOutput]:
    async with AsyncEngine("gemma3-270m", weights=weights, max_model_len=2048, **options) as engine:
        return await engine.generate_batch(prompts, params, progress=False)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("weights", [weights for weights in WEIGHTS if weights != "fast"])
async def test_twelve_chats_of_the_real_model_equal_transformers(gemma_oracle: Any, oracle_gaps: Gaps, weights: str) -> None:
    outputs = await greedy([chat(question) for question in QUESTIONS], SamplingParams(temperature=0, max_tokens=32), weights=weights)
    for output in outputs:
        assert max(oracle_gaps(gemma_oracle, output.prompt_token_ids, output.token_ids)) < REAL_TIE


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_text_longer_than_the_window_of_the_real_model_equals_transformers(gemma_oracle: Any, oracle_gaps: Gaps) -> None:
    prompt = "The rivers of the valley meet above the town. " * 90  # some 900 tokens, of which most layers see 512
    for weights in (weights for weights in WEIGHTS if weights != "fast"):
        (output,) = await greedy([prompt], SamplingParams(temperature=0, max_tokens=24), weights=weights)
        assert len(output.prompt_token_ids) > 800
        assert max(oracle_gaps(gemma_oracle, output.prompt_token_ids, output.token_ids)) < REAL_TIE


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_mixed_prompts_of_the_real_model_equal_transformers(gemma_oracle: Any, oracle_gaps: Gaps) -> None:
    """The ids of "mixed" are another vocabulary's, and Gemma's as well, which has more."""
    workload = load_workload("mixed")
    params = [SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True) for request in workload.requests]
    prompts = [request.prompt_token_ids for request in workload.requests]
    exact = await greedy(prompts, params, weights="exact", max_num_seqs=workload.max_num_seqs)
    worst = [max(oracle_gaps(gemma_oracle, output.prompt_token_ids, output.token_ids)) for output in exact]
    assert max(worst) < REAL_TIE
    fast = await greedy(prompts, params, weights="fast", max_num_seqs=workload.max_num_seqs)
    same = sum(a.token_ids == b.token_ids for a, b in zip(fast, exact, strict=True))
    print(f"exact: {sum(gap == 0 for gap in worst)} of {len(worst)} without a tie; fast: {same} equal to exact")
    assert SAME_WHEN_FAST <= same < len(exact)
