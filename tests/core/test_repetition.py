"""`repetition_detection`: an output whose tail repeats ends, at the same token as vLLM's definition says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine import InvalidRequestError, RepetitionDetectionParams, SamplingParams
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.core.stop import RepetitionDetector
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput
from aioengine.request import RequestStatus
from aioengine.testing import make_request, make_scheduler


def detects(tokens: Sequence[int], max_size: int, min_size: int, count: int) -> int | None:
    """How many tokens the detector takes in until it says so."""
    detector = RepetitionDetector(RepetitionDetectionParams(max_size, min_size, count))
    return next((number for number, token in enumerate(tokens, 1) if detector.push(token)), None)


def by_definition(tokens: Sequence[int], max_size: int, min_size: int, count: int) -> int | None:
    for end in range(1, len(tokens) + 1):
        for size in range(max(min_size, 1), max_size + 1):
            tail = list(tokens[max(0, end - size * count) : end])
            if len(tail) == size * count and tail == tail[-size:] * count:
                return end
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_long_run_of_one_token_repeats_with_the_longest_period_too(size: int) -> None:
    """What is kept of a token's places reaches back one whole period, however often the token came."""
    assert detects([5] * 100, size, size, 6) == 6 * size


@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(2, 5),
)
@settings(max_examples=300, deadline=None)
def test_it_is_the_definition_token_by_token(tokens: list[int], max_size: int, min_size: int, count: int) -> None:
    min_size = min(min_size, max_size)
    assert detects(tokens, max_size, min_size, count) == by_definition(tokens, max_size, min_size, count)


@pytest.mark.parametrize(
    ("tokens", "sizes", "at"),
    [
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], (3, 2, 3), 9),
        ([1, 2, 3, 1, 2, 3], (3, 2, 3), None),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4], (3, 2, 3), None),
        ([1, 2, 3, 4, 5, 6, 5, 6, 5, 6], (3, 2, 3), 10),
        ([10, 20, 10, 20, 10, 20], (5, 3, 3), None),  # as [10, 20, 10, 20] twice it is too short
        ([7, 7, 7, 7], (1, 0, 4), 4),
        ([1, 2] * 6, (4, 4, 3), 12),  # a longer pattern, made of a shorter one
    ],
)
def test_examples(tokens: list[int], sizes: tuple[int, int, int], at: int | None) -> None:
    assert detects(tokens, *sizes) == at


def run(answers: Sequence[int], *, eos: int = 256, depth: int = 1, **params: Any) -> tuple[Any, list[EngineCoreOutput]]:
    """A request that is answered with these tokens, with `depth` steps in flight."""
    scheduler = make_scheduler(eos_token_ids=frozenset({eos}))
    request = make_request(5, **{"max_tokens": 100, **params})
    scheduler.add_request(request)
    outputs: list[EngineCoreOutput] = []
    answer = iter(answers)
    planned: list[SchedulerOutput] = []
    while not request.is_finished:
        while len(planned) < depth and (out := scheduler.schedule()) is not None:
            planned.append(out)
        out = planned.pop(0)
        ids = list(out.num_scheduled_tokens)
        outputs += scheduler.update_from_output(
            out, ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [[next(answer)] for _ in ids])
        )
    return request, outputs


LOOP = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_ends_at_the_token_that_completes_the_repetition(depth: int) -> None:
    request, outputs = run([9, 8, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2], depth=depth, repetition_detection=LOOP)
    assert request.output_token_ids == [9, 8, 1, 2, 1, 2, 1, 2]
    assert request.status == RequestStatus.FINISHED_REPETITION
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("repetition", "repetition_detected")


def test_the_prompt_is_no_part_of_the_repetition() -> None:
    scheduler = make_scheduler()
    request = make_request([1, 2, 1, 2, 1, 2], max_tokens=3, repetition_detection=LOOP)
    scheduler.add_request(request)
    for token in (1, 2, 1):
        out = scheduler.schedule()
        assert out is not None
        ids = list(out.num_scheduled_tokens)
        scheduler.update_from_output(out, ModelRunnerOutput(ids, {ids[0]: 0}, [[token]]))
    assert request.finish_reason == "length"


def test_it_waits_for_min_tokens_and_gives_way_to_a_stop_token_and_to_the_length() -> None:
    request, _ = run([1, 2] * 20, min_tokens=9, repetition_detection=LOOP)
    assert (request.finish_reason, request.num_output_tokens) == ("repetition", 9)
    request, _ = run([1, 2] * 20, max_tokens=6, repetition_detection=LOOP)
    assert (request.finish_reason, request.num_output_tokens) == ("length", 6)
    request, _ = run([1, 256] * 20, repetition_detection=LOOP)
    assert (request.finish_reason, request.num_output_tokens) == ("stop", 2)
    request, _ = run([1, 9] * 20, stop_token_ids=[9], min_tokens=6, repetition_detection=LOOP)
    assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == ("stop", 9, 6)


def test_a_pattern_size_of_zero_looks_for_nothing() -> None:
    request, _ = run([1] * 50, max_tokens=20, repetition_detection=RepetitionDetectionParams())
    assert request.finish_reason == "length"
    assert request.tail_repeats is None


def test_tokens_behind_the_end_of_a_run_of_draft_tokens_are_dropped() -> None:
    scheduler = make_scheduler(num_speculative_tokens=8, prompt_lookup_min=1, async_scheduling=False)
    request = make_request([1, 2, 3, 1, 2, 3], max_tokens=60, repetition_detection=RepetitionDetectionParams(3, 1, 3))
    scheduler.add_request(request)
    while not request.is_finished:
        out = scheduler.schedule()
        assert out is not None
        num_draft_tokens = len(next(iter(out.scheduled_spec_decode_tokens.values()), []))
        sampled = [(request.num_tokens + i) % 3 + 1 for i in range(num_draft_tokens + 1)]
        ids = list(out.num_scheduled_tokens)
        scheduler.update_from_output(out, ModelRunnerOutput(ids, {ids[0]: 0}, [sampled]))
    assert request.output_token_ids == [1, 2, 3] * 3
    assert request.finish_reason == "repetition"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_pattern_size": -1}, r"max_pattern_size must be an integer in \[0, 1024\], got -1"),
        ({"max_pattern_size": 10**400}, "max_pattern_size"),
        ({"max_pattern_size": 2.0}, "max_pattern_size"),
        ({"max_pattern_size": True}, "max_pattern_size"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, r"min_pattern_size \(4\) must not exceed max_pattern_size \(3\)"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be at least 2, got 1"),
        ({"max_pattern_size": 3, "min_count": 65537}, r"min_count must be an integer in \[0, 65536\]"),
        ({"max_pattern_size": 3, "min_count": None}, "min_count"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        RepetitionDetectionParams(**fields)


def test_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="repetition_detection must be RepetitionDetectionParams or None"):
        SamplingParams(repetition_detection={"max_pattern_size": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["constant", "varied"])
def test_a_token_costs_little_at_any_length(text: str) -> None:
    """At worst a look-up for each size of a pattern; 1024 of them are some 0.1 ms."""
    detector = RepetitionDetector(RepetitionDetectionParams(1024, 1024, 65536))
    start = time.process_time()
    for number in range(6000):
        detector.push(7 if text == "constant" else number * number % 251)
    per_token_us = (time.process_time() - start) / 6000 * 1e6
    assert per_token_us < (1500 if text == "constant" else 60)
    assert len(detector._positions.get(7, ())) <= 2048
