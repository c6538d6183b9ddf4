"""Structured output of real models: it matches, whatever the schedule, and the schedule changes no token."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.sampling_params import StructuredOutputsParams
from tests.covering import every_pair
from tests.tiny_tokenizer import byte_level_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 10, "maximum": 9999},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}
CHOICES = ["left", "right", "straight on"]
REGEX = r"[A-F]{2,5}-(\d|[x-z])+;"
LARK = """
start: item ("," item)~1..2
item: "<" NAME ">"
NAME: /[a-z]{1,4}/
"""
KINDS: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": REGEX},
    {"choice": CHOICES},
    {"grammar": LARK},
    {"json_object": True},
]


def check_json(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"id", "kind", "tags"}
    assert isinstance(value["id"], int)
    assert 10 <= value["id"] <= 9999
    assert value["kind"] in ("cat", "dog")
    assert 1 <= len(value["tags"]) <= 2
    assert all(isinstance(tag, str) and len(tag) <= 3 for tag in value["tags"])


def check(kind: dict[str, Any], output: RequestOutput) -> None:
    """A complete output matches; one that was cut off is the beginning of something that does."""
    text = output.text
    if output.finish_reason == "length":
        assert "json_object" in kind or "regex" in kind, f"{kind} can always be completed: {text!r}"
        assert text.startswith("{") if "json_object" in kind else re.fullmatch(r"[A-F]{2,5}-([0-9]|[x-z])*", text), text
        return
    assert output.finish_reason == "stop"
    if "json" in kind:
        check_json(text)
    elif "regex" in kind:
        assert re.fullmatch(REGEX, text), text
    elif "choice" in kind:
        assert text in CHOICES
    elif "grammar" in kind:
        assert re.fullmatch("<[a-z]{1,4}>(,<[a-z]{1,4}>){1,2}", text), text
    else:
        assert isinstance(json.loads(text), dict)


def requests() -> list[tuple[list[int], SamplingParams, dict[str, Any] | None]]:
    """Greedy and seeded ones of every kind, and plain ones between them."""
    rng = random.Random(3)
    made = []
    for index in range(12):
        prompt = [rng.randrange(2, 258) for _ in range(rng.randint(1, 50))]
        kind = KINDS[index % 6] if index % 6 < len(KINDS) else None
        sampled: dict[str, Any] = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "seed": index, "top_p": 0.95}
        made.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=60,
                    min_tokens=index % 3,
                    logprobs=2,
                    structured_outputs=None if kind is None else StructuredOutputsParams(**kind),
                    **sampled,
                ),
                kind,
            )
        )
    return made


async def run(model: Path, *, alone: bool = False, **options: Any) -> tuple[list[RequestOutput], int]:
    async with AsyncEngine(
        str(model), weights="dense", dtype="float32", check_invariants=True, max_model_len=256, max_num_seqs=8, **options
    ) as engine:
        prompts, params, _ = zip(*requests(), strict=True)
        if alone:
            outputs = []
            for prompt, param in zip(prompts, params, strict=True):
                outputs += await engine.generate_batch([prompt], param, progress=False)
        else:
            outputs = await engine.generate_batch(prompts, params, progress=False)
        assert len(engine._life.started().structured_output) == 0
        return outputs, engine.stats().num_preemptions


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> list[RequestOutput]:
    outputs, _ = asyncio.run(run(tiny_model, alone=True, async_scheduling=False, enable_prefix_caching=False))
    return outputs


def test_outputs_match(oracle: list[RequestOutput]) -> None:
    for (_, _, kind), output in zip(requests(), oracle, strict=True):
        if kind is not None:
            check(kind, output)
    assert sum(output.finish_reason == "stop" for output in oracle) >= 6


@pytest.mark.parametrize(("overlap", "pool", "chunk"), every_pair([True, False], ["big", "tiny"], [None, 8]))
async def test_every_schedule_gives_the_tokens_of_the_oracle(
    tiny_model: Path, oracle: list[RequestOutput], overlap: bool, pool: str, chunk: int | None
) -> None:
    outputs, num_preemptions = await run(
        tiny_model,
        async_scheduling=overlap,
        num_kv_cache_blocks=18 if pool == "tiny" else 600,
        enable_chunked_prefill=chunk is not None,
        long_prefill_token_threshold=chunk or 0,
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in oracle]
    assert [output.text for output in outputs] == [output.text for output in oracle]
    assert [output.finish_reason for output in outputs] == [output.finish_reason for output in oracle]
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert [next(iter(entry)) for entry in logprobs] == output.token_ids, "the sampled token comes first, allowed or not at rank 1"
    assert (num_preemptions > 0) == (pool == "tiny")


async def test_draft_tokens_for_plain_requests_leave_the_rows_of_the_others_alone(tiny_model: Path, oracle: list[RequestOutput]) -> None:
    outputs, _ = await run(tiny_model, num_speculative_tokens=3, prompt_lookup_min=1, num_kv_cache_blocks=600)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in oracle]


EOS_ID = 0
A, B = byte_level_tokenizer(["<eos>", "<bos>"]).encode("ab").ids
OTHER_MASKS: list[dict[str, Any]] = [
    {"allowed_token_ids": [A, B]},
    {"allowed_token_ids": [A, B], "min_tokens": 20},
    {"allowed_token_ids": [A, B], "temperature": 1.0, "seed": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
    {"bad_words_token_ids": ((EOS_ID,),)},
    {"bad_words_token_ids": ((A, EOS_ID), (B, EOS_ID)), "min_tokens": 20},
    {"logit_bias": {EOS_ID: -100.0, A: 100.0}, "repetition_penalty": 2.0, "frequency_penalty": 2.0},
    {"min_tokens": 20},
    {"stop_token_ids": [5], "min_tokens": 20, "logprobs": 2},
]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"num_speculative_tokens": 3, "prompt_lookup_min": 1}], ids=str)
async def test_whoever_is_complete_ends_by_stop_whatever_else_forbids_the_end(tiny_model: Path, options: dict[str, Any]) -> None:
    cases = [(regex, masks) for regex in ("[ab]{3}", "[ab]{3}c?", "(ab|ba){2}") for masks in OTHER_MASKS]
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex=regex), **masks})
        for regex, masks in cases
    ]
    async with AsyncEngine(str(tiny_model), weights="dense", dtype="float32", max_model_len=64, check_invariants=True, **options) as engine:
        outputs = await engine.generate_batch([[7, 8, 9, 7, 8]] * len(params), params, progress=False)
        going_on = SamplingParams(
            ignore_eos=True, allowed_token_ids=[A, B], max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{3}")
        )
        last = (await engine.generate_batch([[7, 8]], going_on, progress=False))[0]
    for (regex, masks), output in zip(cases, outputs, strict=True):
        assert output.finish_reason == "stop", (regex, masks, output.outputs[0].error)
        assert re.fullmatch(regex, output.text), (regex, masks, output.text)
    assert (last.token_ids[3:], last.finish_reason) == ([EOS_ID] * 5, "length"), "as documented: the end token is repeated"


@pytest.mark.model
async def test_the_built_in_model_fills_in_a_schema(smollm2_files: Any) -> None:
    """49,152 tokens, most of them of several characters; greedy, beside a plain request that must not notice."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    structured = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in JSON with city and country."}]
    async with AsyncEngine("smollm2", max_model_len=256, num_kv_cache_blocks=65) as engine:
        plain = SamplingParams(temperature=0.0, max_tokens=8)
        alone = (await engine.generate_batch([chat], plain, progress=False))[0]
        params = [SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=structured), plain]
        answer, beside = await engine.generate_batch([chat, chat], params, progress=False)
    assert answer.finish_reason == "stop"
    value = json.loads(answer.text)
    assert set(value) == {"city", "country"}
    assert value["city"] == "Paris"
    assert beside.token_ids == alone.token_ids
