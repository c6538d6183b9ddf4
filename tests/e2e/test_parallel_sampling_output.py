"""Continuations, deltas and log-probabilities of the prompt from a model: what each request gives alone, under any schedule."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.engine.inputs.parallel_sampling import child_params
from aioengine.sampling_params import RequestOutputKind

PROMPTS = [[2 + (7 * index) % 250 for index in range(length)] for length in (5, 33, 48)]
PARAMS = SamplingParams(
    n=3,
    seed=11,
    temperature=0.9,
    max_tokens=20,
    logprobs=2,
    prompt_logprobs=1,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    bad_words_token_ids=((40,), (41, 42)),
    logit_bias={60: 3.0},
    skip_special_tokens=False,
)

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": False, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    {"num_kv_cache_blocks": 12, "max_num_batched_tokens": 16, "max_num_seqs": 8},
]


def start(model: Path, **options: Any) -> AsyncEngine:
    settings = {"weights": "dense", "dtype": "float32", "block_size": 8, "num_kv_cache_blocks": 200, "max_model_len": 96, **options}
    return AsyncEngine(str(model), check_invariants=True, **settings)


async def generate_alone(model: Path) -> list[list[RequestOutput]]:
    """[prompt][continuation]: each of them as a request of its own."""
    async with start(model, async_scheduling=False, enable_prefix_caching=False) as engine:
        return [[(await engine.generate_batch([prompt], child, progress=False))[0] for child in child_params(PARAMS)] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[list[RequestOutput]]:
    return asyncio.run(generate_alone(tiny_model))


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_continuations_are_what_their_seeds_give_alone(
    tiny_model: Path, alone: list[list[RequestOutput]], schedule: dict[str, Any]
) -> None:
    async with start(tiny_model, **schedule) as engine:
        outputs = await engine.generate_batch(PROMPTS, PARAMS, progress=False)
        assert (engine.stats().num_preemptions > 0) == (schedule.get("num_kv_cache_blocks") is not None)
        for output, expected in zip(outputs, alone, strict=True):
            for completion, single in zip(output.outputs, expected, strict=True):
                assert completion.token_ids == single.token_ids
                assert completion.text == single.text
                assert not {40} & set(completion.token_ids)
                assert completion.logprobs is not None
                assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            assert output.prompt_logprobs is not None
            assert expected[0].prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            for got, want in zip(output.prompt_logprobs[1:], expected[0].prompt_logprobs[1:], strict=True):
                assert got is not None
                assert want is not None
                assert list(got) == list(want)
                assert [entry.logprob for entry in got.values()] == pytest.approx([e.logprob for e in want.values()], abs=1e-4)


async def test_deltas_of_a_model_add_up(tiny_model: Path, alone: list[list[RequestOutput]]) -> None:
    params = dataclasses.replace(PARAMS, output_kind=RequestOutputKind.DELTA)
    async with start(tiny_model) as engine:
        deltas = [output async for output in engine.generate(PROMPTS[1], params)]
    for index, single in enumerate(alone[1]):
        pieces = [output.outputs[index] for output in deltas]
        assert "".join(piece.text for piece in pieces) == single.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == single.token_ids
