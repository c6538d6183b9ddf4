"""The door before a real worker: what is accepted fits its tables, and whatever it makes of one request, its mate has its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from aioengine import AsyncEngine, SamplingParams
from tests import door


@pytest.fixture(scope="module")
def rig(tiny_model: Path) -> Iterator[door.Rig]:
    rig = door.Rig(AsyncEngine(str(tiny_model), weights="dense", dtype="float32", max_model_len=48, max_num_seqs=8, seed=0))
    yield rig
    rig.close()


# What is at the limits of what the door lets through; one after the other beside a mate.
AT_THE_LIMITS: list[dict[str, Any]] = [
    {"top_k": 2**31 - 1, "temperature": 1e6, "min_p": 5e-324, "top_p": 5e-324, "seed": 2**64 - 1},
    {"temperature": 0.01, "repetition_penalty": 0.01, "frequency_penalty": 2.0, "presence_penalty": -2.0, "logprobs": 20},
    {"temperature": 0, "repetition_penalty": 0.01, "min_tokens": 3, "max_tokens": 2**63 - 1, "prompt_logprobs": 20},
    {"min_p": 1.0, "top_p": 1e-7, "n": 8, "logit_bias": dict.fromkeys(range(258), 100.0)},
    {"allowed_token_ids": range(258), "bad_words_token_ids": [[i] for i in range(257)], "temperature": 1e-5},
    {"bad_words_token_ids": [[i] * 64 for i in range(258)], "stop_token_ids": range(100, 258), "truncate_prompt_tokens": -1},
    {"min_p": 1e-320, "top_k": 1, "stop": ["a" * 4096], "extra_args": {"x": 10**400}},
]


@pytest.mark.parametrize("fields", AT_THE_LIMITS, ids=lambda fields: "+".join(fields))
def test_what_is_at_the_limits_runs_beside_a_mate(rig: door.Rig, fields: dict[str, Any]) -> None:
    assert rig.check(SamplingParams(**fields), {})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=door.params_fields.filter(door.is_small), structured=door.structured_fields, options=door.request_options)
@example(fields={"top_k": 2**63}, structured=None, options={})
@example(fields={"temperature": 1e39, "allowed_token_ids": [5]}, structured=None, options={})
def test_every_request_is_refused_or_harms_nobody(
    rig: door.Rig, fields: dict[str, Any], structured: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    params = door.make_params(fields, structured)
    if params is not None:
        rig.check(params, options)
