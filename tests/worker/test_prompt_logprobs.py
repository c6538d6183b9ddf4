"""Log-probabilities of prompt tokens: each position once, whatever the chunks, and the same numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.outputs import ModelRunnerOutput, TokenLogprobs
from aioengine.worker import prompt_logprobs
from aioengine.worker.device import CpuDevice

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]
OTHER = [27, 18, 28, 18, 28, 45, 9]
MakeDriver = Callable[..., Any]


class Collector:
    """Puts the chunks of a driver's steps together."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.entries: dict[str, list[TokenLogprobs]] = {}

    def step(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self.driver.step(scheduled)
        for req_id, entries in output.prompt_logprobs.items():
            self.entries.setdefault(req_id, []).extend(entries)
        return output


def whole(make_driver: MakeDriver, wanted: int = 3, **config: Any) -> list[TokenLogprobs]:
    collector = Collector(make_driver(**config))
    collector.driver.add("r", PROMPT, prompt_logprobs=wanted)
    collector.step({"r": len(PROMPT)})
    return collector.entries["r"]


def assert_same(entries: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Up to the model's own rounding, which depends on how many tokens it is given at once."""
    assert [list(entry) for entry in entries] == [list(entry) for entry in expected]
    for entry, other in zip(entries, expected, strict=True):
        for token, value in entry.items():
            assert value.rank == other[token].rank
            assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.parametrize("wanted", [0, 3, 20])
def test_each_entry_is_that_of_a_request_that_samples_there(make_driver: MakeDriver, wanted: int) -> None:
    entries = whole(make_driver, wanted)
    assert len(entries) == len(PROMPT) - 1
    for position in range(1, len(PROMPT)):
        driver = make_driver(logprobs_mode="raw_logprobs")
        driver.add("r", PROMPT[:position], allowed_token_ids=[PROMPT[position]], logprobs=wanted)
        driver.generate("r", 1)
        assert_same([entries[position - 1]], driver.logprobs["r"])


def test_logits_instead_of_logprobs_when_the_mode_says_so(make_driver: MakeDriver) -> None:
    logits, logprobs = whole(make_driver, logprobs_mode="processed_logits"), whole(make_driver)
    for scores, entry in zip(logits, logprobs, strict=True):
        shift = {round(scores[token].logprob - entry[token].logprob, 3) for token in entry}
        assert len(shift) == 1
        assert shift != {0.0}


@pytest.mark.parametrize("chunk", [1, 3, 4, 13])
def test_chunks_give_the_same_entries(make_driver: MakeDriver, chunk: int) -> None:
    collector = Collector(make_driver())
    collector.driver.add("r", PROMPT, prompt_logprobs=3)
    for start in range(0, len(PROMPT), chunk):
        before = len(collector.entries.get("r", []))
        collector.step({"r": min(chunk, len(PROMPT) - start)})
        assert len(collector.entries["r"]) == min(start + chunk, len(PROMPT) - 1), before
    assert_same(collector.entries["r"], whole(make_driver))
    for _ in range(3):
        assert collector.step({"r": 1}).prompt_logprobs == {}


@pytest.mark.parametrize("after", [1, 5, 13, 14])
def test_positions_that_are_computed_again_are_not_reported_again(make_driver: MakeDriver, after: int) -> None:
    collector = Collector(make_driver(max_num_seqs=2))
    driver = collector.driver
    driver.add("r", PROMPT, prompt_logprobs=3)
    driver.add("other", OTHER)
    collector.step({"r": after})
    driver.preempt("r")
    collector.step({"other": 7})
    collector.step({"other": 1, "r": 4})
    driver.preempt("r")
    collector.step({"other": 1})
    for chunk in (6, 2, 6):
        collector.step({"r": chunk})
    assert_same(collector.entries["r"], whole(make_driver))


def test_only_those_who_asked_pay(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    assert driver.step({"a": 14}).prompt_logprobs == {}
    assert driver.model.num_logits_rows <= 1 + 3  # of a captured graph's warm-up there are none
    collector = Collector(make_driver())
    for req_id, options in (("a", {}), ("b", {"prompt_logprobs": 0}), ("c", {"prompt_logprobs": 2})):
        collector.driver.add(req_id, PROMPT, **options)
    collector.step({"a": 14, "b": 3, "c": 9})
    assert {req_id: len(entries) for req_id, entries in collector.entries.items()} == {"b": 3, "c": 9}
    assert_same(collector.entries["c"], whole(make_driver, 2)[:9])


def test_an_id_that_comes_again_starts_anew(make_driver: MakeDriver) -> None:
    collector = Collector(make_driver())
    for _ in range(2):
        collector.driver.add("r", PROMPT, prompt_logprobs=1)
        collector.step({"r": 14})
        collector.driver.finish("r")
        collector.driver.known_to_worker.discard("r")
    assert len(collector.entries["r"]) == 2 * (len(PROMPT) - 1)
    collector.step({})
    assert not collector.driver.runner.states.wants_prompt_logprobs, "steps look for prompt positions though nobody wants them"


def test_a_prompt_of_one_token_has_nothing_to_report(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT[:1], prompt_logprobs=1)
    assert driver.step({"r": 1}).prompt_logprobs == {}


def test_logits_exist_for_a_bounded_number_of_rows_at_once(make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(make_driver)
    monkeypatch.setattr(prompt_logprobs, "_ROWS_AT_ONCE", 4)
    driver = make_driver()
    sizes = []
    compute = driver.model.compute_logits

    def measured(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        logits: torch.Tensor = compute(hidden)
        return logits

    driver.model.compute_logits = measured
    driver.add("r", PROMPT, prompt_logprobs=3)
    assert_same(driver.step({"r": 14}).prompt_logprobs["r"], expected)
    assert sizes == [4, 4, 4, 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_position_is_reported_once_and_in_order(make_driver: MakeDriver, seed: int) -> None:
    rng = random.Random(seed)
    collector = Collector(make_driver())
    driver = collector.driver
    ids = ["a", "b"]
    for req_id in ids:
        driver.add(req_id, PROMPT, prompt_logprobs=3)
    while any(driver.num_tokens(req_id) < len(PROMPT) + 2 for req_id in ids):
        for req_id in ids:
            if driver.computed[req_id] and rng.random() < 0.2:
                driver.preempt(req_id)
        able = [req_id for req_id in ids if req_id not in driver.just_preempted and rng.random() < 0.7]
        collector.step({r: rng.randint(1, min(6, driver.num_tokens(r) - driver.computed[r])) for r in able})
    expected = whole(make_driver)
    for req_id in ids:
        assert_same(collector.entries[req_id], expected)


@pytest.mark.parametrize("pipeline", ["device"], indirect=True)
def test_the_device_is_never_waited_for(make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step with prompt log-probabilities sends goes through pinned memory: a copy of any other array waits for the device."""

    def refuse(device: Any, array: Any) -> Any:
        raise AssertionError("a blocking copy")

    driver = make_driver()
    monkeypatch.setattr(CpuDevice, "to_device", refuse)
    monkeypatch.setattr(CpuDevice, "to_host", refuse)
    driver.add("r", PROMPT, prompt_logprobs=2)
    output = driver.step({"r": len(PROMPT)})
    assert len(output.prompt_logprobs["r"]) == len(PROMPT) - 1


# ------------------------------------------------------------------ NaN
def poison(driver: Any, tokens: set[int]) -> None:
    """From now on hidden states of these tokens give NaN logits."""
    for token in tokens:
        driver.model.embedding[token] = math.nan


def test_a_request_with_nan_logits_fails_and_the_others_go_on(make_driver: MakeDriver) -> None:
    expected = make_driver()
    expected.add("a", OTHER, logprobs=1)
    expected.generate("a", 4)
    driver = make_driver()
    driver.add("r", PROMPT, logprobs=1)
    driver.add("a", OTHER, logprobs=1)
    poison(driver, {PROMPT[5]})
    output = driver.step({"r": 14, "a": 7})
    assert list(output.failed_req_ids) == ["r"]
    assert "not numbers (NaN" in output.failed_req_ids["r"]
    assert output.sampled_token_ids[0] == []
    assert len(output.sampled_token_ids[1]) == 1
    assert list(output.logprobs) == ["a"]
    # The scheduler may have planned its next token already; it fails again, and nobody minds.
    driver.outputs["r"].append(0)
    output = driver.step({"r": 1, "a": 1})
    assert list(output.failed_req_ids) == ["r"]
    driver.finish("r")
    driver.step({"a": 1})
    driver.step({"a": 1})
    assert driver.outputs["a"] == expected.outputs["a"]
    assert driver.runner.states.num_free_slots == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_largest_value_that_is_no_number_fails_its_request(value: float) -> None:
    """Whatever the mode: raw logits of +inf are not NaN."""
    empty = torch.zeros(0, dtype=torch.int64)
    rows = prompt_logprobs.PromptRows(["r", "a"], [2, 1], [1, 1], indices=empty, token_ids=empty)
    values = np.array([[-1.0, -0.5], [-1.0, value], [-np.inf, -0.5]])
    entries = prompt_logprobs.read_prompt_entries(rows, [np.array([[1, 2]] * 3), values, np.array([2, 2, 2])])
    assert list(entries.failed) == ["r"]
    assert list(entries.logprobs) == ["a"]


def test_nan_in_the_middle_of_a_prompt_fails_who_asked_for_its_logprobs(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT, prompt_logprobs=1)
    driver.add("a", OTHER, prompt_logprobs=1)
    poison(driver, {PROMPT[5]})
    output = driver.step({"r": 10, "a": 7})
    assert list(output.failed_req_ids) == ["r"]
    assert list(output.prompt_logprobs) == ["a"]
