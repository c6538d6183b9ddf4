"""What `SamplingParams` refuses, and in which words; the checks that need the model are in `engine/test_inputs.py`."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from aioengine import InvalidRequestError, SamplingParams
from aioengine.checks.values import shorten
from aioengine.sampling_params import StructuredOutputsParams

OF_BITS = "structured_outputs.json is not valid JSON: it must hold JSON values, with integers of at most 4096 bits"
ENDLESS: dict[str, Any] = {}
ENDLESS["self"] = [ENDLESS, ENDLESS]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs must be StructuredOutputsParams or None, got {'regex': 'a+'}"),
    ({"bad_words": "word"}, "bad_words must be a list of strings, got 'word'"),
    ({"bad_words": ["", "b"]}, "bad_words must hold non-empty strings, got ''"),
    # A negative id would be a place in the logits of another request.
    ({"bad_words_token_ids": ((3, -1),)}, "bad_words_token_ids must hold integers >= 0, got -1"),
    ({"bad_words_token_ids": (3,)}, "bad_words_token_ids must be a list, got 3"),
    ({"stop": 5}, "stop must be a list of strings, got 5"),
    ({"stop": [1]}, "stop must hold non-empty strings, got 1"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
    ({"stop_token_ids": [True]}, "stop_token_ids must hold integers >= 0, got True"),
    ({"allowed_token_ids": 5}, "allowed_token_ids must be a list, got 5"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    ({"logit_bias": [1]}, "logit_bias must be a mapping, got [1]"),
    ({"logit_bias": {"7": 1.0}}, "logit_bias must have token ids >= 0 as keys, got '7'"),
    ({"extra_args": 5}, "extra_args must be a mapping, got 5"),
    ({"stop": "x", "detokenize": False}, "stop ['x'] needs the text"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens (5) must not exceed max_tokens (4)"),
    # What a table of a fixed width, or the wire form, cannot hold.
    ({"top_k": 2**63}, "top_k must be an integer in [-1, 2**31 - 1] (0 and -1 keep all tokens), got 9223372036854775808"),
    ({"top_k": 10**5000}, "top_k must be an integer in [-1, 2**31 - 1] (0 and -1 keep all tokens), got an integer of 16610 bits"),
    ({"seed": 2**64}, "seed must be an integer in [0, 2**64 - 1] or None, got 18446744073709551616"),
    ({"max_tokens": 2**63}, "max_tokens must be an integer in [1, 2**63 - 1] or None, got"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer >= 1, -1 or None, got 0"),
    ({"temperature": 1e39}, "temperature must be in [0, 1e+06], got 1e+39"),
    ({"temperature": 10**400}, "temperature must be in [0, 1e+06], got an integer of 1329 bits"),
    ({"top_p": 10**400}, "top_p must be in (0, 1], got an integer of 1329 bits"),
    ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
    ({"min_p": float("nan")}, "min_p must be in [0, 1], got nan"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty must be in [0.01, 2], got 5e-324"),
    ({"repetition_penalty": 10**400}, "repetition_penalty must be in [0.01, 2], got an integer of 1329 bits"),
    ({"logit_bias": {7: 10**400}}, "logit_bias for token 7 must be in [-100, 100], got an integer of 1329 bits"),
    ({"logit_bias": {7: float("nan"), 8: 1.0}}, "logit_bias for token 7 must be in [-100, 100], got nan"),
    ({"logit_bias": {7: float("-inf")}}, "logit_bias for token 7 must be in [-100, 100], got -inf"),
    ({"n": np.float64(2)}, "n must be an integer in [1, 1024], got np.float64(2.0)"),
    ({"stop": "\ud800"}, "stop is not valid Unicode: '\\ud800' at position 0"),
    ({"bad_words": ["a\udc00"]}, "bad_words is not valid Unicode: '\\udc00' at position 1"),
    ({"extra_args": {1: 2}}, "extra_args must have non-empty strings as keys, got 1"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ({"detokenize": 10**400}, "detokenize must be True or False, got an integer of 1329 bits"),
    # The wrong container, or one without an end.
    ({"stop_token_ids": b"ab"}, "stop_token_ids must be a list, got b'ab'"),
    ({"stop_token_ids": {1: 2}}, "stop_token_ids must be a list, got {1: 2}"),
    ({"stop_token_ids": itertools.count()}, "stop_token_ids must have at most 4096 items, got more"),
    ({"stop": itertools.repeat("a")}, "stop must have at most 256 items, got more"),
    ({"stop": ["a" * 5000]}, "stop must have at most 4096 characters together, got 5000"),
    ({"bad_words_token_ids": [[1] * 65]}, "bad_words_token_ids must have at most 64 items, got more"),
    ({"allowed_token_ids": range(2**20)}, "allowed_token_ids must have at most 524288 items, got more: range(0, 1048576)"),
    # Together they forbid every token.
    ({"allowed_token_ids": [5], "bad_words_token_ids": ((5,),)}, "no token is left to sample: bad_words_token_ids ((5,),) forbid every"),
    ({"allowed_token_ids": [5], "bad_words_token_ids": ((5, 5),)}, "no token is left to sample: after 1 of allowed_token_ids (5,) the bad"),
    (
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": ((5, 5), (6, 6), (5, 6, 5), (6, 5, 6))},
        "no token is left to sample: after 2 of allowed_token_ids (5, 6)",
    ),
    (
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
        "no token is left to sample: every token of allowed_token_ids (5,)",
    ),
    (
        {"allowed_token_ids": [5, 6], "stop_token_ids": [6], "min_tokens": 2, "bad_words_token_ids": ((5,),)},
        "no token is left to sample: every token of allowed_token_ids (5, 6)",
    ),
]

STRUCTURED_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {1: 2}}, "structured_outputs.json must have strings as keys, got 1"),
    ({"json": {"a": [{"b": 10**5000}]}}, f"{OF_BITS}, got an integer of 16610 bits at /a/*/b"),
    (
        {"json": {"a": [{"b": "\ud800"}]}},
        "structured_outputs.json is not valid JSON: a text in it is not valid Unicode: '\\ud800'",
    ),
    ({"json": {"\ud800": 1}}, "structured_outputs.json is not valid JSON: a key in it is not valid Unicode"),
    ({"json": '{"const": "\\uD800"}'}, "structured_outputs.json is not valid JSON: a text in it is not valid Unicode"),
    ({"json": {"enum": {1, 2}}}, "structured_outputs.json is not valid JSON: it must hold JSON values"),
    ({"json": ENDLESS}, "structured_outputs.json has more than 65536 values"),
    ({"json": 5}, "structured_outputs.json must be a mapping or a non-empty text, got 5"),
    ({"regex": 5}, "structured_outputs.regex must be a non-empty string, got 5"),
    ({"regex": "\ud800"}, "structured_outputs.regex is not valid Unicode: '\\ud800' at position 0"),
    ({"choice": ["a", "\ud800"]}, "structured_outputs.choice is not valid Unicode"),
    ({"choice": "ab"}, "structured_outputs.choice must be a list of strings, got 'ab'"),
    ({"choice": []}, "structured_outputs.choice must hold non-empty strings, got []"),
    ({"json_object": 1}, "structured_outputs.json_object must be True or False, got 1"),
    ({}, "structured_outputs needs exactly one of"),
]


@pytest.mark.parametrize(("options", "message"), STRUCTURED_REFUSED, ids=lambda value: shorten(value)[:40])
def test_a_wrong_value_of_structured_outputs_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}"):
        StructuredOutputsParams(**options)


def test_a_schema_with_integers_that_the_wire_does_not_have_becomes_text() -> None:
    params = StructuredOutputsParams(json={"default": 2**70, "maxLength": 3})
    assert params.json == '{"default": 1180591620717411303424, "maxLength": 3}'


def test_flags_of_structured_outputs_may_be_none() -> None:
    nothing: Any = None
    given = StructuredOutputsParams(regex="a", json_object=nothing, disable_any_whitespace=nothing)
    assert given == StructuredOutputsParams(regex="a")


def test_a_schema_is_a_copy() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"type": "string", "maxLength": np.int64(3)}}, "required": ("a",)}
    params = StructuredOutputsParams(json=schema)
    schema["properties"]["a"]["type"] = "integer"
    assert params.json == {"properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("stop", {"b", "a", "c"}, ("a", "b", "c")),
        ("stop_token_ids", {9, 3, 300}, (3, 9, 300)),
        ("allowed_token_ids", iter([3, 1, 2]), (3, 1, 2)),
        ("bad_words_token_ids", [{2, 1}, np.array([5])], ((1, 2), (5,))),
    ],
)
def test_sets_come_in_one_order_and_iterators_are_read_once(name: str, given: Any, expected: Any) -> None:
    assert getattr(SamplingParams(**{name: given}), name) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": ((5, 5), (5, 6), (6, 5))},  # 6, 6, 6 ...
        {"allowed_token_ids": [5], "bad_words_token_ids": ((5, 5),), "max_tokens": 1},
        {"allowed_token_ids": [5], "bad_words_token_ids": ((5, 5),), "stop_token_ids": [5]},  # it ends before
        {"allowed_token_ids": [5], "stop_token_ids": [5]},
        {"allowed_token_ids": [5, 6], "stop_token_ids": [6], "min_tokens": 2},
        {"bad_words_token_ids": [[i] for i in range(100)]},  # how many tokens there are is not known here
    ],
    ids=str,
)
def test_parameters_that_leave_a_way_are_taken(options: dict[str, Any]) -> None:
    SamplingParams(**options)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: shorten(value)[:60] if isinstance(value, dict) else "")
def test_a_wrong_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}"):
        SamplingParams(**options)


def test_collections_are_copied_and_none_is_an_empty_one() -> None:
    given: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "bad_words": ["b"],
        "bad_words_token_ids": [[2, 3]],
        "allowed_token_ids": [4],
        "logit_bias": {5: 1.0},
        "extra_args": {"x": 6},
    }
    params = SamplingParams(**given)
    for value in given.values():
        value.clear()
    expected = SamplingParams(
        stop=("a",),
        stop_token_ids=(1,),
        bad_words=("b",),
        bad_words_token_ids=((2, 3),),
        allowed_token_ids=(4,),
        logit_bias={5: 1.0},
        extra_args={"x": 6},
    )
    assert params == expected
    nothing: dict[str, Any] = dict.fromkeys(given)
    assert SamplingParams(**nothing) == SamplingParams()
