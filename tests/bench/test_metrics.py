"""The definitions, on timelines that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine_bench.metrics import (
    details,
    mean,
    meets,
    metric_values,
    peak_concurrency,
    peak_tokens_per_s,
    percentile,
    percentile_name,
    run_duration,
    standard_deviation,
    summarize,
)
from aioengine_bench.timeline import RequestRecord
from tests.bench.conftest import MakeRecord


def test_latencies_of_one_request(make_record: MakeRecord) -> None:
    record = make_record(10.0, [10.5, 10.6, 10.8, 11.1])
    assert record.ttft == pytest.approx(0.5)
    assert record.e2el == pytest.approx(1.1)
    assert record.itl == pytest.approx([0.1, 0.2, 0.3])
    assert record.tpot == pytest.approx(0.6 / 3)
    assert record.output_len == 4


def test_with_several_tokens_a_chunk_itl_is_not_tpot(make_record: MakeRecord) -> None:
    record = make_record(0.0, [1.0, 2.0], sizes=[2, 3])
    assert record.itl == pytest.approx([1.0])
    assert record.tpot == pytest.approx(1.0 / 4)


def test_tpot_of_one_token_is_undefined(make_record: MakeRecord) -> None:
    record = make_record(0.0, [0.25])
    assert record.tpot is None
    assert record.itl == []
    assert record.ttft == record.e2el == 0.25


def test_text_without_a_token_is_content_but_no_token(make_record: MakeRecord) -> None:
    """What was held back of a stop string may come after the last token."""
    record = make_record(0.0, [1.0, 2.0, 2.5], sizes=[1, 1, 0])
    assert record.output_len == 2
    assert record.e2el == 2.5


def test_without_content_nothing_is_defined(make_record: MakeRecord) -> None:
    record = make_record(3.0, [], outcome="failed")
    assert (record.ttft, record.tpot, record.e2el, record.itl) == (None, None, None, [])
    assert record.end_time == 3.0


def test_client_queueing_is_in_no_latency(make_record: MakeRecord) -> None:
    record = make_record(5.0, [6.0], due=2.0)
    assert record.client_queue_time == 3.0
    assert record.ttft == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)
    assert standard_deviation(values) == pytest.approx(float(np.std(values)), abs=1e-6)


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentile([], 99) is None
    assert mean([]) is None
    assert standard_deviation([]) is None
    with pytest.raises(ValueError, match="between 0 and 100, got 101"):
        percentile([1.0], 101)


def test_percentile_names() -> None:
    assert [percentile_name(p) for p in (99, 99.9, 50.0)] == ["p99", "p99.9", "p50"]


def test_only_completed_requests_count(make_record: MakeRecord) -> None:
    records = [
        make_record(0.0, [1.0, 2.0], prompt_len=10),
        make_record(0.0, [1.0], prompt_len=100, outcome="failed"),
        make_record(0.0, [0.5], prompt_len=100, outcome="aborted"),
        make_record(0.0, [3.0, 4.0], prompt_len=20),
    ]
    result = summarize(records)
    assert (result["completed"], result["failed"], result["aborted"]) == (2, 1, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 4)
    assert result["duration"] == 4.0
    assert result["request_throughput"] == pytest.approx(2 / 4)
    assert result["output_throughput"] == pytest.approx(4 / 4)
    assert result["total_token_throughput"] == pytest.approx(34 / 4)
    assert result["mean_ttft_ms"] == pytest.approx(2000)
    assert result["median_itl_ms"] == pytest.approx(1000)
    assert result["p99_ttft_ms"] == pytest.approx(1000 + 0.99 * 2000)
    assert result["max_concurrent_requests"] == 4


def test_a_run_without_any_success_has_figures_that_are_undefined() -> None:
    result = summarize([])
    assert result["completed"] == 0
    assert result["output_throughput"] is None
    assert result["mean_ttft_ms"] is result["p99_itl_ms"] is None


def test_goodput_needs_all_limits_to_be_kept(make_record: MakeRecord) -> None:
    slo = {"ttft": 500.0, "tpot": 100.0}
    good = make_record(0.0, [0.5, 0.6])
    late = make_record(0.0, [0.51, 0.6])
    slow = make_record(0.0, [0.1, 0.3])
    single = make_record(0.0, [0.4])  # its TPOT is undefined, which breaks no limit
    failed = make_record(0.0, [0.1], outcome="failed")
    assert [meets(record, slo) for record in (good, late, slow, single, failed)] == [True, False, False, True, False]
    result = summarize([good, late, slow, single, failed], duration=2.0, slo_ms=slo)
    assert result["request_goodput"] == pytest.approx(2 / 2.0)
    assert summarize([good])["request_goodput"] is None


def test_peak_is_seen_in_a_burst(make_record: MakeRecord) -> None:
    records = [make_record(0.0, [0.1, 0.2, 0.3]), make_record(0.0, [9.5, 10.0])]
    assert peak_tokens_per_s(records, 10.0) == pytest.approx(3.0)


_TIMES = st.floats(0, 7.3, allow_nan=False)


@given(st.lists(st.lists(_TIMES, min_size=1, max_size=5), min_size=1, max_size=8))
def test_peaks_are_not_below_means(chunks: list[list[float]]) -> None:
    records = [RequestRecord(index, 1, 0.0, 0.0, tuple(sorted(times)), tuple([1] * len(times))) for index, times in enumerate(chunks)]
    duration = run_duration(records)
    result = summarize(records)
    if duration > 0:
        assert result["max_output_tokens_per_s"] >= result["output_throughput"] * (1 - 1e-9)
        mean_concurrency = math.fsum(record.end_time - record.send_time for record in records) / duration
        assert result["max_concurrent_requests"] >= mean_concurrency * (1 - 1e-9)


def test_a_request_that_makes_room_for_another_is_not_beside_it(make_record: MakeRecord) -> None:
    records = [make_record(0.0, [1.0]), make_record(1.0, [2.0]), make_record(1.5, [3.0])]
    assert peak_concurrency(records) == 2


def test_duration_begins_when_the_first_request_is_due(make_record: MakeRecord) -> None:
    assert run_duration([make_record(2.0, [5.0], due=1.0), make_record(1.5, [3.0])]) == 4.0


def test_itl_of_many_requests_is_one_list(make_record: MakeRecord) -> None:
    assert metric_values([make_record(0.0, [1.0, 1.5]), make_record(0.0, [2.0, 4.0])], "itl") == [0.5, 2.0]


def test_details_are_in_the_order_of_the_dataset(make_record: MakeRecord) -> None:
    records = [make_record(2.0, [3.0], index=1, prompt_len=7), make_record(1.0, [4.0, 5.0], index=0, prompt_len=9)]
    lists = details(records)
    assert lists["input_lens"] == [9, 7]
    assert lists["output_lens"] == [2, 1]
    assert lists["ttfts"] == [3.0, 1.0]
    assert lists["itls"] == [[1.0], []]
    assert lists["start_times"] == [0.0, 1.0]
