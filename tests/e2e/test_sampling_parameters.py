"""Every sampling parameter through the engine: the same tokens under every schedule, and prompt_logprobs as transformers has them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.outputs import TokenLogprobs
from aioengine.sampling_params import StructuredOutputsParams
from aioengine_kernels.cpu import status as native_status
from tests.covering import every_pair

PARAMETERS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.8},
    {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 0.8},
    {"logit_bias": {50: 8.0, 51: 8.0, 52: -100.0}, "frequency_penalty": 1.0},
    {"allowed_token_ids": list(range(60, 72)), "min_tokens": 6},
    {"bad_words": ["e", "ab"], "bad_words_token_ids": ((60,), (61, 62), (100, 101))},
    {"allowed_token_ids": [70, 71, 72], "bad_words_token_ids": ((70, 71), (71, 71), (72, 72, 70))},
    {"prompt_logprobs": 2, "logprobs": 1},
    {"prompt_logprobs": 0, "presence_penalty": 1.0},
    {},
]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """All parameters, greedy and seeded; prompts share a prefix, so that one that wants prompt_logprobs finds it cached."""
    rng = random.Random(3)
    shared = [rng.randrange(2, 258) for _ in range(48)]
    made = []
    for index, options in enumerate(PARAMETERS * 2):
        prompt = shared[: rng.choice([16, 33, 48])] + [rng.randrange(2, 258) for _ in range(rng.randint(1, 30))]
        sampled: dict[str, Any] = {"temperature": 0.0} if index < len(PARAMETERS) else {"temperature": 0.9, "seed": index, "top_p": 0.95}
        made.append((prompt, SamplingParams(max_tokens=rng.randint(12, 24), ignore_eos=True, **sampled, **options)))
    return made


async def run(model: Path, *, alone: bool, weights: str = "dense", **options: Any) -> tuple[list[RequestOutput], int]:
    async with AsyncEngine(
        str(model), weights=weights, dtype="float32", check_invariants=True, max_model_len=256, max_num_seqs=8, **options
    ) as engine:
        if alone:
            outputs = []
            for prompt, params in requests():
                outputs += await engine.generate_batch([prompt], params, progress=False)
        else:
            prompts, params_list = zip(*requests(), strict=True)
            outputs = await engine.generate_batch(prompts, params_list, progress=False)
        return outputs, engine.stats().num_preemptions


PLAIN: dict[str, Any] = {"alone": True, "async_scheduling": False, "enable_prefix_caching": False, "enable_chunked_prefill": False}


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> list[RequestOutput]:
    return asyncio.run(run(tiny_model, **PLAIN))[0]


def assert_same_prompt_logprobs(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)
        for entry, wanted in zip(output.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (entry is None) == (wanted is None)
            if entry is not None and wanted is not None:
                assert [(token, value.rank) for token, value in entry.items()] == [(token, value.rank) for token, value in wanted.items()]
                assert [value.logprob for value in entry.values()] == pytest.approx([v.logprob for v in wanted.values()], abs=1e-3)


@pytest.mark.parametrize(("overlap", "pool", "chunk"), every_pair([True, False], ["big", "tiny"], [None, 16, 5]))
async def test_every_schedule_gives_the_tokens_and_the_prompt_logprobs_of_the_plain_run(
    tiny_model: Path, oracle: list[RequestOutput], overlap: bool, pool: str, chunk: int | None
) -> None:
    outputs, num_preemptions = await run(
        tiny_model,
        alone=False,
        async_scheduling=overlap,
        num_kv_cache_blocks=18 if pool == "tiny" else 600,
        enable_chunked_prefill=chunk is not None,
        long_prefill_token_threshold=chunk or 0,
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in oracle]
    assert_same_prompt_logprobs(outputs, oracle)
    assert (num_preemptions > 0) == (pool == "tiny")


@pytest.mark.skipif(native_status() is not None, reason=f"no native CPU kernels: {native_status()}")
@pytest.mark.parametrize("weights", ["exact", "fast"])
async def test_with_packed_weights_the_bits_are_the_same(tiny_model: Path, weights: str) -> None:
    def bits(outputs: list[RequestOutput]) -> list[Any]:
        return [(output.token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]

    plain, _ = await run(tiny_model, weights=weights, **PLAIN)
    crowded, num_preemptions = await run(tiny_model, weights=weights, alone=False, num_kv_cache_blocks=18, long_prefill_token_threshold=7)
    assert bits(crowded) == bits(plain)
    assert num_preemptions > 0


def test_the_parameters_do_what_they_say(oracle: list[RequestOutput]) -> None:
    for (_, params), output in zip(requests(), oracle, strict=True):
        tokens = output.token_ids
        assert len(tokens) == params.max_tokens
        if params.allowed_token_ids is not None:
            assert set(tokens) <= set(params.allowed_token_ids)
        for word in params.bad_words_token_ids:
            assert word not in [tuple(tokens[i : i + len(word)]) for i in range(len(tokens))]
        for text in params.bad_words:
            assert text not in output.text
        assert 52 not in tokens or 52 not in params.logit_bias


async def test_prompt_logprobs_are_those_of_transformers_cold_and_with_a_warm_prefix_cache(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = requests()[0][0]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wants = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3)
    async with AsyncEngine(str(tiny_model), weights="dense", dtype="float32", max_model_len=256, long_prefill_token_threshold=9) as engine:
        (cold,) = await engine.generate_batch([prompt], wants, progress=False)
        (cached,) = await engine.generate_batch([prompt], SamplingParams(temperature=0, max_tokens=3), progress=False)
        (warm,) = await engine.generate_batch([prompt], wants, progress=False)
    assert cached.num_cached_tokens > 0, "what a request with prompt_logprobs computed is there for others"
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 0)
    assert cached.prompt_logprobs is None
    for output in (cold, warm):
        assert output.token_ids == cached.token_ids
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for position in range(1, len(prompt)):
            entry: TokenLogprobs | None = output.prompt_logprobs[position]
            assert entry is not None
            scores, order = expected[position - 1], expected[position - 1].argsort(descending=True).tolist()
            assert list(entry) == list(dict.fromkeys([prompt[position], *order[:3]]))
            for token, value in entry.items():
                assert value.logprob == pytest.approx(scores[token].item(), abs=1e-4)
                assert value.rank == order.index(token) + 1


async def test_nothing_left_to_sample_ends_that_request_alone(tiny_model: Path) -> None:
    # Token 70 is "e". That nothing may follow it shows only where the grammar stands then.
    regex = StructuredOutputsParams(regex="ef+")
    impossible = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[70], structured_outputs=regex)
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = requests()[0][0]
    async with AsyncEngine(str(tiny_model), weights="dense", dtype="float32", max_model_len=256, check_invariants=True) as engine:
        (expected,) = await engine.generate_batch([prompt], plain, progress=False)

        async def last(params: SamplingParams) -> RequestOutput:
            return [output async for output in engine.generate(prompt, params)][-1]

        failed, other = await asyncio.gather(last(impossible), last(plain))
    assert other.token_ids == expected.token_ids
    assert failed.token_ids == [70]
    assert failed.outputs[0].finish_reason == "error"
    assert "no token is left to sample" in (failed.outputs[0].error or "")
