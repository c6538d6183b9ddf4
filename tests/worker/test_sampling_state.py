"""What a request's parameters remember of its tokens: over steps, chunks, preemptions and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]
OTHER = [27, 18, 28, 18, 28, 45, 9]
NUM_TOKENS = 12
MakeDriver = Callable[..., Any]

PARAMETERS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0, "repetition_penalty": 0.5},
    {"repetition_penalty": 2.0},
    {"frequency_penalty": -2.0, "bad_words_token_ids": ((9,), (46, 46), (5, 3, 5))},
    {"logit_bias": {4: 12.0, 9: 11.0}, "presence_penalty": 1.5},
    {"allowed_token_ids": [1, 2, 3, 30, 31], "frequency_penalty": 1.0, "bad_words_token_ids": ((1, 2), (2, 1), (3, 3))},
]


def watch_logits(driver: Any) -> list[torch.Tensor]:
    """The raw logits of every step, as they come."""
    seen: list[torch.Tensor] = []
    compute = driver.model.compute_logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden)
        seen.append(logits.clone())
        return logits

    driver.model.compute_logits = recorded
    return seen


@pytest.mark.parametrize("options", PARAMETERS, ids=lambda options: "+".join(options))
def test_every_token_is_the_best_one_of_the_edited_logits(
    make_driver: MakeDriver, expected_logits: Callable[..., list[float]], options: dict[str, Any]
) -> None:
    driver = make_driver()
    driver.add("r", PROMPT, **options)
    seen = watch_logits(driver)
    tokens = driver.generate("r", NUM_TOKENS)
    for index, (logits, token) in enumerate(zip(seen, tokens, strict=True)):
        edited = expected_logits(logits[0].tolist(), PROMPT, tokens[:index], options)
        assert edited[token] == max(edited), f"token {index}"
    plain = make_driver()
    plain.add("r", PROMPT)
    assert plain.generate("r", NUM_TOKENS) != tokens, "the parameters have no effect here"


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("options", PARAMETERS, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_preemption_forgets_no_token(make_driver: MakeDriver, after: int, options: dict[str, Any], temperature: float) -> None:
    options = {**options, "temperature": temperature, "seed": 5}
    alone = make_driver()
    alone.add("r", PROMPT, **options)
    driver = make_driver(max_num_seqs=2)
    driver.add("r", PROMPT, **options)
    driver.add("other", OTHER, presence_penalty=1.0, allowed_token_ids=[50, 51, 52, 53])
    if after:
        driver.generate("r", after)
    else:
        driver.step({"r": 5})
    driver.preempt("r")
    driver.generate("other", 3)  # in the slot that was r's
    driver.preempt("other")
    driver.step({"r": 6})
    assert driver.generate("r", NUM_TOKENS, chunk=4) == alone.generate("r", NUM_TOKENS)


def test_the_next_request_of_a_slot_has_parameters_of_its_own(make_driver: MakeDriver) -> None:
    plain = make_driver(max_num_seqs=1)
    plain.add("b", OTHER)
    driver = make_driver(max_num_seqs=1)
    for number, options in enumerate(PARAMETERS):
        driver.add(f"r{number}", PROMPT, **options)
        driver.generate(f"r{number}", 2)
        driver.finish(f"r{number}")
    driver.step({})
    slot = np.zeros(1, dtype=np.int64)
    assert driver.runner.states.sampling.gather(slot, slot).logit_edits is None, "a request that is gone costs time"
    driver.add("b", OTHER)
    assert driver.generate("b", 6) == plain.generate("b", 6)
