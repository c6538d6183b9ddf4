"""Steps whose rows all take the largest logit ask the model for the tokens, not for the logits; others never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioengine.executor.base import GrammarOutput
from aioengine.worker.pipeline.host import HostPipeline

MakeDriver = Callable[..., Any]
PROMPTS = {"a": [3, 14, 15, 9], "b": [26, 5, 35]}
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"logprobs": 0},
    {"presence_penalty": 0.5},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": [1, 2, 3]},
    {"bad_words_token_ids": ((9,),)},
    {"min_tokens": 20, "stop_token_ids": (5,)},
]


def run(driver: Any, num_steps: int = 5) -> dict[str, list[int]]:
    for _ in range(num_steps):
        driver.step({name: driver.num_tokens(name) - driver.computed[name] for name in PROMPTS})
    return {name: driver.outputs[name] for name in PROMPTS}


def give_tokens(driver: Any) -> list[int]:
    """From now on the model knows them itself. -> the number of rows of each time that it was asked."""
    asked: list[int] = []

    def tokens_of(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        logits: torch.Tensor = hidden @ driver.model.head
        return logits.argmax(dim=-1)

    driver.model.greedy_tokens = tokens_of
    return asked


def test_plain_greedy_rows_need_no_logits(make_driver: MakeDriver) -> None:
    driver, plain = make_driver(), make_driver()
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
        plain.add(name, prompt)
    asked = give_tokens(driver)
    assert run(driver) == run(plain)
    if isinstance(driver.runner._pipeline, HostPipeline):  # on a device tokens stay there
        assert asked == [2] * 5
        assert driver.model.num_logits_rows == 0
    else:
        assert asked == []


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: "+".join(options))
def test_one_row_that_wants_more_takes_all_of_them_to_the_sampler(make_driver: MakeDriver, options: dict[str, Any]) -> None:
    driver, plain = make_driver(), make_driver()
    for each in (driver, plain):
        each.add("a", PROMPTS["a"])
        each.add("b", PROMPTS["b"], **options)
    asked = give_tokens(driver)
    assert run(driver) == run(plain)
    assert asked == []
    assert driver.logprobs == plain.logprobs


def test_a_row_with_a_grammar_takes_all_of_them_to_the_sampler(make_driver: MakeDriver) -> None:
    driver = make_driver()
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    asked = give_tokens(driver)
    driver.runner.execute_model(driver.plan({name: len(prompt) for name, prompt in PROMPTS.items()}))
    only_five = bytes([1 << 5]) + bytes(63)
    output = driver.sample(GrammarOutput({"b": only_five}))
    assert output.sampled_token_ids[output.req_id_to_index["b"]] == [5]
    assert asked == []
