"""From the records of a run to its figures: rates, peaks, percentiles, goodput. Pure functions of hand-checkable input.

Rates divide by the duration of the run. Only completed requests count, except where something else is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine_bench.timeline import RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUES = ("queue_time", "client_queue_time")
SLO_METRICS = ("ttft", "tpot", "e2el")


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Linear interpolation between the closest ranks, as numpy does; None for no values."""
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, got {percent}")
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of the whole population, as numpy's default."""
    average = mean(values)
    return None if average is None else math.sqrt(math.fsum((value - average) ** 2 for value in values) / len(values))


def median_run(runs: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The figures of the median run by `key`: of an odd number of runs those of the one in the middle, whole; of an even
    number the means of the two in the middle. What is no number is the lower one's. A run without the figure counts as 0.
    """
    ordered = sorted(runs, key=lambda run: run[key] or 0.0)
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return {name: _middle(value, above.get(name)) for name, value in below.items()}


def _middle(below: Any, above: Any) -> Any:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (below, above))
    return (below + above) / 2 if numbers and below != above else below


def count_reasons(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Why requests were not completed, the most frequent reason first."""
    counts: dict[str, int] = {}
    for record in records:
        if record.outcome != "completed":
            reason = record.error or record.outcome
            counts[reason] = counts.get(reason, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def percentile_name(percent: float) -> str:
    """99 -> "p99", 99.9 -> "p99.9"."""
    return f"p{percent:g}"


def metric_values(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """The values of one metric in seconds; requests for which it is undefined give none, ITL gives one a gap."""
    if metric == "itl":
        return [gap for record in records for gap in record.itl]
    values = [getattr(record, metric) for record in records]
    return [value for value in values if value is not None]


def run_duration(records: Sequence[RequestRecord]) -> float:
    """From the first time a request was due to the last content of any, failed and aborted ones included."""
    if not records:
        return 0.0
    return max(record.end_time for record in records) - min(record.due_time for record in records)


def peak_tokens_per_s(records: Sequence[RequestRecord], duration: float) -> float:
    """The highest output rate within any window of about a second.

    The window is one second, shortened so that a whole number of them spans the run. Then some window holds at least the
    average, and the peak cannot be below the mean, as it can be with fixed seconds of which the last is cut off.
    """
    arrivals = sorted((time, size) for record in records for time, size in zip(record.chunk_times, record.chunk_sizes, strict=True))
    if not arrivals or duration <= 0:
        return 0.0
    window = duration / math.ceil(duration)
    most = tokens = first = 0
    for time, size in arrivals:
        tokens += size
        while arrivals[first][0] < time - window * (1 + 1e-9):
            tokens -= arrivals[first][1]
            first += 1
        most = max(most, tokens)
    return most / window


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """The most requests that were out at one moment, whatever became of them."""
    # At equal times an end goes before a send: the one has made room for the other.
    changes = sorted(change for record in records for change in ((record.send_time, 1), (record.end_time, -1)))
    current = most = 0
    for _, step in changes:
        current += step
        most = max(most, current)
    return most


def meets(record: RequestRecord, slo_ms: Mapping[str, float]) -> bool:
    """Completed, and within every limit. A metric that is undefined (TPOT of one token) breaks no limit."""
    if record.outcome != "completed":
        return False
    values = {name: getattr(record, name) for name in slo_ms}
    return all(value is None or value * 1000 <= slo_ms[name] for name, value in values.items())


def summarize(
    records: Sequence[RequestRecord],
    *,
    duration: float | None = None,
    percentiles: Sequence[float] = (99,),
    metrics: Sequence[str] = METRICS,
    slo_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run under vLLM's names. `duration`: of the run, if known better than from the records.

    What is undefined (a percentile of nothing, a rate of no time) is None.
    """
    done = [record for record in records if record.outcome == "completed"]
    duration = run_duration(records) if duration is None else duration
    totals = Totals(
        completed=len(done),
        failed=sum(record.outcome == "failed" for record in records),
        aborted=sum(record.outcome == "aborted" for record in records),
        good=sum(meets(record, slo_ms) for record in done) if slo_ms else None,
        input_tokens=sum(record.prompt_len for record in done),
        output_tokens=sum(record.output_len for record in done),
        cached_tokens=sum(record.num_cached_tokens for record in done),
    )
    result = total_figures(
        totals,
        duration,
        failure_reasons=count_reasons(records),
        client_queue_time_ms=percentile([record.client_queue_time * 1000 for record in done], 50),
        max_tokens_per_s=peak_tokens_per_s(done, duration),
        max_requests=peak_concurrency(records),
    )
    for metric in metrics:
        result |= metric_figures(metric, [value * 1000 for value in metric_values(done, metric)], percentiles)
    return result


@dataclass(slots=True)
class Totals:
    """Of a run. good: those within the limits; None: there are no limits. Tokens are those of completed requests."""

    completed: int = 0
    failed: int = 0
    aborted: int = 0
    good: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


def total_figures(
    totals: Totals,
    duration: float,
    *,
    failure_reasons: Mapping[str, int],
    client_queue_time_ms: float | None,
    max_tokens_per_s: float,
    max_requests: int,
) -> dict[str, Any]:
    """The figures of a run but for its latencies."""

    def rate(amount: float) -> float | None:
        return amount / duration if duration > 0 else None

    return {
        "duration": duration,
        "completed": totals.completed,
        "failed": totals.failed,
        "aborted": totals.aborted,
        "failure_reasons": dict(failure_reasons),
        "median_client_queue_time_ms": client_queue_time_ms,
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "total_cached_tokens": totals.cached_tokens,
        "request_throughput": rate(totals.completed),
        "request_goodput": None if totals.good is None else rate(totals.good),
        "output_throughput": rate(totals.output_tokens),
        "total_token_throughput": rate(totals.input_tokens + totals.output_tokens),
        "max_output_tokens_per_s": max_tokens_per_s,
        "max_concurrent_requests": max_requests,
    }


def metric_figures(metric: str, values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of a latency."""
    ordered = sorted(values_ms)
    return {
        f"mean_{metric}_ms": mean(ordered),
        f"median_{metric}_ms": percentile(ordered, 50),
        f"std_{metric}_ms": standard_deviation(ordered),
        **{f"{percentile_name(percent)}_{metric}_ms": percentile(ordered, percent) for percent in percentiles},
    }


def queue_figures(records: Iterable[RequestRecord], percentiles: Sequence[float]) -> dict[str, float | None]:
    """What completed requests waited: `queue_time` in the engine, of those that tell it, and `client_queue_time` in the client."""
    done = [record for record in records if record.outcome == "completed"]
    result: dict[str, float | None] = {}
    for name in QUEUES:
        result |= metric_figures(name, [value * 1000 for value in metric_values(done, name)], percentiles)
    return result


def request_line(record: RequestRecord, *, start_time: float, request_id: str) -> dict[str, Any]:
    """All that is known of one request, times in seconds; the names are those of `vllm bench`'s own per-request objects."""
    return {
        "request_id": request_id,
        "success": record.outcome == "completed",
        "outcome": record.outcome,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "prompt_len": record.prompt_len,
        "expected_output_len": record.max_tokens,
        "output_tokens": record.output_len,
        "cached_tokens": record.num_cached_tokens,
        "start_time": record.send_time - start_time,
        "client_queue_time": record.client_queue_time,
        "queue_time": record.queue_time,
        "ttft": record.ttft,
        "tpot": record.tpot,
        "latency": record.e2el,
        "itl": record.itl,
        "generated_text": record.text,
    }


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """One entry a request, in the order of the dataset; times in seconds, `start_times` from the first send."""
    ordered = sorted(records, key=lambda record: record.index)
    start = min((record.send_time for record in ordered), default=0.0)
    return {
        "input_lens": [record.prompt_len for record in ordered],
        "output_lens": [record.output_len for record in ordered],
        "ttfts": [record.ttft for record in ordered],
        "itls": [record.itl for record in ordered],
        "start_times": [record.send_time - start for record in ordered],
        "client_queue_times": [record.client_queue_time for record in ordered],
        "cached_tokens": [record.num_cached_tokens for record in ordered],
        "outcomes": [record.outcome for record in ordered],
        "generated_texts": [record.text for record in ordered],
        "errors": [record.error for record in ordered],
    }
