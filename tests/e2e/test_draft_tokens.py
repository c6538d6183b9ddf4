"""With draft tokens or without, the same output: n-gram speculative decoding changes how many tokens a step gives, and nothing else.

That is more than distribution preserving, and so stands for it: a token is always sampled from the model's own distribution
with the random number of its own place in the output, and a draft token g is kept exactly if that sample is g, which happens with
probability p(g). There is no other randomness to test.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.errors import ConfigError
from aioengine_kernels.cpu import status as native_status

needs_native = pytest.mark.skipif(native_status() is not None, reason=f"no native CPU kernels: {native_status()}")

VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.8, "frequency_penalty": 0.7, "top_k": 20},
    {"temperature": 0.0, "stop": ["e", "Zq"], "min_tokens": 5},
    {"temperature": 0.8, "stop_token_ids": list(range(60, 100)), "min_tokens": 12, "top_k": 8},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "bad_words": ["e", "ab", " t"], "top_k": 10},
    {"temperature": 0.8, "top_k": 3, "allowed_token_ids": list(range(40, 48))},
    {"temperature": 0.0, "logit_bias": {50: 8.0, 51: 8.0, 52: 8.0}, "prompt_logprobs": 1},
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves, so that there is something to look up, with many kinds of parameters."""
    rng = random.Random(3)
    shared = [rng.randrange(2, 258) for _ in range(20)]
    made = []
    for index in range(2 * len(VARIANTS)):
        own = [rng.randrange(2, 258) for _ in range(rng.randint(2, 9))]
        prompt = [*(shared if index % 3 else []), *own * rng.randint(2, 4)]
        params = VARIANTS[index % len(VARIANTS)]
        max_tokens = max(rng.choice([1, 2, 30, 60]), params.get("min_tokens", 0))
        made.append((prompt, SamplingParams(**{"max_tokens": max_tokens, "logprobs": 2, "seed": index, **params})))
    return made


async def run(model: Path, *, weights: str = "dense", alone: bool = False, **options: Any) -> tuple[list[RequestOutput], SchedulerStats]:
    async with AsyncEngine(str(model), weights=weights, dtype="float32", check_invariants=True, max_model_len=256, **options) as engine:
        prompts, params = zip(*requests(), strict=True)
        outputs = []
        for group in [[index] for index in range(len(prompts))] if alone else [list(range(len(prompts)))]:
            outputs += await engine.generate_batch([prompts[i] for i in group], [params[i] for i in group], progress=False)
        return outputs, engine.stats()


def results(outputs: list[RequestOutput], *, bits: bool) -> list[Any]:
    """What a user gets; with `bits` the log-probabilities too, which are equal only where a row does not depend on its company."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.outputs[0].stop_reason, *((o.outputs[0].logprobs, o.prompt_logprobs) if bits else ()))
        for o in outputs
    ]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, list[RequestOutput]]:
    """Each request alone, one token a step."""
    every = ["dense", *(["exact"] if native_status() is None else [])]
    return {weights: asyncio.run(run(tiny_model, weights=weights, alone=True, async_scheduling=False))[0] for weights in every}


POINTS = [
    # pool, chunk, prefix cache, alone, draft tokens, n-grams
    ("big", None, True, False, 4, (2, 4)),
    ("big", None, False, False, 1, (1, 1)),
    ("big", 3, True, False, 9, (1, 3)),
    ("tiny", None, True, False, 4, (1, 3)),
    ("tiny", 5, True, False, 12, (2, 2)),
    ("tiny", 16, False, False, 6, (1, 2)),
    ("big", None, True, True, 6, (1, 3)),
]


@needs_native
@pytest.mark.parametrize(("pool", "chunk", "prefix_cache", "alone", "num_draft_tokens", "ngrams"), POINTS)
async def test_draft_tokens_change_no_bit_of_the_output(
    tiny_model: Path,
    plain: dict[str, list[RequestOutput]],
    pool: str,
    chunk: int | None,
    prefix_cache: bool,
    alone: bool,
    num_draft_tokens: int,
    ngrams: tuple[int, int],
) -> None:
    outputs, stats = await run(
        tiny_model,
        weights="exact",
        alone=alone,
        num_kv_cache_blocks=11 if pool == "tiny" else 600,  # 10 blocks of 16: the longest request needs 8
        enable_prefix_caching=prefix_cache,
        long_prefill_token_threshold=chunk or 0,
        max_num_seqs=6,
        num_speculative_tokens=num_draft_tokens,
        prompt_lookup_min=ngrams[0],
        prompt_lookup_max=ngrams[1],
    )
    assert results(outputs, bits=True) == results(plain["exact"], bits=True)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    if pool == "tiny" and not alone:
        assert stats.num_preemptions > 0, "the tiny pool was meant to force preemption"


@pytest.mark.parametrize("alone", [True, False])
async def test_draft_tokens_change_no_token_with_dense_weights(
    tiny_model: Path, plain: dict[str, list[RequestOutput]], alone: bool
) -> None:
    outputs, stats = await run(tiny_model, alone=alone, num_speculative_tokens=5, prompt_lookup_min=1, max_num_seqs=8)
    assert results(outputs, bits=False) == results(plain["dense"], bits=False)
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


async def test_repetition_takes_fewer_steps(tiny_model: Path) -> None:
    """Twenty times the same token in a row, by the bias: the draft tokens are all right, and a step gives several tokens."""
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias={50: 100.0})
    num_steps = []
    for num_draft_tokens in (0, 7):
        async with AsyncEngine(str(tiny_model), weights="dense", num_speculative_tokens=num_draft_tokens) as engine:
            outputs = await engine.generate_batch([[5, 6, 7]], params, progress=False)
            assert outputs[0].token_ids == [50] * 60
            num_steps.append(engine.snapshot().step_id)
    assert num_steps[1] < num_steps[0] / 4


async def test_draft_tokens_on_a_device_are_refused() -> None:
    from aioengine import EngineConfig
    from aioengine.testing import make_model_info

    config = EngineConfig(num_speculative_tokens=3, device="cuda")
    with pytest.raises(ConfigError, match=r"num_speculative_tokens \(3\) is for the CPU"):
        config.resolve(make_model_info(), cuda_available=True, free_memory_bytes=1 << 30)
