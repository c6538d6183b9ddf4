"""What goes wrong with one row of the tables ends that request; the others get what they get without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aioengine.executor.base import GrammarOutput
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.logits_processor import ProcessorRow

MakeDriver = Callable[..., Any]
PROMPTS = {"a": [3, 14, 15, 9], "bad": [26, 5, 35], "c": [8, 9, 7, 9, 32]}

# What the door refuses; behind it a row has to hold on its own.
UNFIT: list[dict[str, Any]] = [
    {"top_k": 2**63},
    {"temperature": 1e39},
    {"temperature": 10**400},
    {"seed": 2**64},
    {"seed": None},
    {"min_tokens": 2**63, "stop_token_ids": (5,)},
    {"logprobs": 2**70},
    {"min_p": "x"},
    {"top_p": "x"},
    {"logit_bias": {1: 1e39}},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {2**70: 1.0}},
    {"allowed_token_ids": (-1,)},
    {"bad_words_token_ids": ((3, -2),)},
    {"bad_words_token_ids": ((2**70,),)},
    {"repetition_penalty": 1e39},
    {"stop_token_ids": ("x",), "min_tokens": 2},
]


def run(driver: Any, names: Sequence[str], num_steps: int = 3) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Tokens, and who failed and why; who fails is scheduled on, as it is while the failure travels."""
    failed: dict[str, str] = {}
    for step in range(num_steps):
        live = [name for name in names if name not in failed or step == 0]
        output = driver.step({name: driver.num_tokens(name) - driver.computed[name] for name in live})
        failed |= output.failed_req_ids
        assert all(not output.sampled_token_ids[output.req_id_to_index[name]] for name in output.failed_req_ids)
    return {name: driver.outputs[name] for name in names}, failed


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda options: "+".join(map(str, options)))
def test_parameters_that_fit_no_table(make_driver: MakeDriver, unfit: dict[str, Any]) -> None:
    driver, alone = make_driver(), make_driver()
    for name in ("a", "c"):
        alone.add(name, PROMPTS[name], temperature=0.7, seed=3)
    expected, nobody = run(alone, ["a", "c"])
    assert nobody == {}
    for name in PROMPTS:
        driver.add(name, PROMPTS[name], temperature=0.7, seed=3)
    driver.params["bad"] = SamplingParams(seed=1).with_values(**unfit)
    tokens, failed = run(driver, list(PROMPTS))
    assert list(failed) == ["bad"]
    assert "the request cannot be run: " in failed["bad"]
    assert {name: tokens[name] for name in ("a", "c")} == expected
    driver.finish("bad")
    driver.step({})
    assert driver.runner.states.failed == {}, "nothing is kept of it"


def test_a_mask_that_is_too_short(make_driver: MakeDriver) -> None:
    driver, alone = make_driver(), make_driver()
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
        alone.add(name, prompt)
    masks = {"a": b"\xff" * 8, "c": b"\xff" * 8}
    outputs = []
    for each, given in ((driver, {**masks, "bad": b"\xff"}), (alone, {**masks, "bad": b"\xff" * 8})):
        each.runner.execute_model(each.plan({name: len(prompt) for name, prompt in PROMPTS.items()}))
        outputs.append(each.sample(GrammarOutput(given)))
    output, expected = outputs
    assert list(output.failed_req_ids) == ["bad"]
    assert "1 bytes does not cover 61 tokens" in output.failed_req_ids["bad"]
    for name in ("a", "c"):
        index = output.req_id_to_index[name]
        assert output.sampled_token_ids[index] == expected.sampled_token_ids[index]


class Picky:
    """Cannot take what one request brings, and has written to the logits by then."""

    def __init__(self, config: ResolvedConfig) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        logits[:, 11] += 1.0
        for row in rows:
            if row.sampling_params.extra_args.get("token") == "no number":
                raise TypeError("a token is a number")
        return logits


class TestProcessors:
    @pytest.fixture
    def pipeline(self) -> str:
        """They run on the host's pipeline only."""
        return "host"

    def test_a_processor_that_cannot_take_one_request(self, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys
        import types

        module = types.ModuleType("picky_processors")
        module.Picky = Picky  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "picky_processors", module)
        results = []
        for token in ("no number", None):
            driver = make_driver(logits_processors=("picky_processors:Picky",))
            for name, prompt in PROMPTS.items():
                extra = {"token": token} if name == "bad" else {}
                driver.add(name, prompt, temperature=0.8, seed=4, logprobs=2, extra_args=extra)
            results.append((*run(driver, list(PROMPTS), 1), driver.logprobs))
        (tokens, failed, logprobs), (expected, nobody, expected_logprobs) = results
        assert nobody == {}
        assert list(failed) == ["bad"]
        assert "TypeError: a token is a number" in failed["bad"]
        for name in ("a", "c"):
            assert tokens[name] == expected[name]
            assert logprobs[name] == expected_logprobs[name]
