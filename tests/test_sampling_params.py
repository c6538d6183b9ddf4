"""What `SamplingParams` refuses, and in which words; the checks that need the model are in `engine/test_inputs.py`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aioengine import InvalidRequestError, SamplingParams

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
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else "")
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
