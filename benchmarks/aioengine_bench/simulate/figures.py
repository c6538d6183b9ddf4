"""The figures of a run of any length, taken as it goes: of a million requests neither the records nor their tokens' times are kept.

A request that has ended leaves six numbers behind, and a gap between two tokens a count in a histogram of narrow classes. All
other figures are those that `metrics.summarize` makes of the records.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.outputs import EngineCoreOutput
from aioengine_bench.metrics import METRICS, Totals, meets, metric_figures, percentile_name, total_figures
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.timeline import RequestRecord

_CLASSES_A_DOUBLING = 256  # a value is known to 0.14 %
_WINDOW_S = 1.0


class Histogram:
    """Counts of positive values in classes of equal ratio. Mean and standard deviation are exact."""

    def __init__(self) -> None:
        self.num_values = 0
        self._counts: Counter[int] = Counter()
        self._sum = self._sum_of_squares = 0.0

    def add(self, value: float, count: int) -> None:
        self._counts[math.floor(math.log2(max(value, 1e-12)) * _CLASSES_A_DOUBLING)] += count
        self.num_values += count
        self._sum += value * count
        self._sum_of_squares += value * value * count

    def figures(self, metric: str, percentiles: Sequence[float]) -> dict[str, float | None]:
        """As `metrics.metric_figures`, of values in seconds."""
        mean = self._sum / self.num_values if self.num_values else None
        variance = None if mean is None else max(0.0, self._sum_of_squares / self.num_values - mean * mean)
        found = {
            f"mean_{metric}_ms": mean,
            f"median_{metric}_ms": self.percentile(50),
            f"std_{metric}_ms": None if variance is None else math.sqrt(variance),
            **{f"{percentile_name(percent)}_{metric}_ms": self.percentile(percent) for percent in percentiles},
        }
        return {key: None if value is None else value * 1000 for key, value in found.items()}

    def percentile(self, percent: float) -> float | None:
        """The middle of the class in which it lies."""
        rank, before = (self.num_values - 1) * percent / 100, 0
        for index in sorted(self._counts):
            before += self._counts[index]
            if before > rank:
                return math.pow(2.0, (index + 0.5) / _CLASSES_A_DOUBLING)
        return None


class _Live:
    """A request that has not ended."""

    __slots__ = ("arrival", "first", "last", "num_tokens")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.first = self.last = -1.0  # before its first token
        self.num_tokens = 0


class RunningFigures:
    """A recorder like `Recorder`, in constant memory a request."""

    def __init__(self, slo_ms: Mapping[str, float]) -> None:
        self._slo_ms = slo_ms
        self._live: dict[str, _Live] = {}
        self._ms = {metric: array("d") for metric in METRICS if metric != "itl"}
        self._totals = Totals(good=0 if slo_ms else None)
        self._failures = Counter[str]()
        self._gaps = Histogram()
        self._ends: list[float] = []  # a heap: ends that lie behind the last arrival
        self._last_end = 0.0
        self._window: deque[tuple[float, int]] = deque()
        self._num_in_window = self._most_in_window = 0
        self._most_concurrent = self._most_before = 0  # and what it was before the last arrival, which may fail at once

    def note_arrival(self, arrival: Arrival) -> None:
        self._live[arrival.request_id] = _Live(arrival)
        while self._ends and self._ends[0] <= arrival.time:
            heapq.heappop(self._ends)
        self._most_before = self._most_concurrent
        self._most_concurrent = max(self._most_concurrent, len(self._live) + len(self._ends))

    def note_failure(self, arrival: Arrival, error: str) -> None:
        del self._live[arrival.request_id]
        self._most_concurrent = self._most_before
        self._last_end = max(self._last_end, arrival.time)
        self._failures[error] += 1
        self._totals.failed += 1

    def take(self, outputs: Sequence[EngineCoreOutput], now: float) -> None:
        """What one step gave. Times do not fall, for one replica."""
        lives, gaps = self._live, dict[float, int]()
        for output in outputs:
            live = lives[output.request_id]
            live.num_tokens += 1
            last, live.last = live.last, now
            if last >= 0:
                gaps[last] = gaps.get(last, 0) + 1
            else:
                live.first = now
            if output.finish_reason is not None:
                del lives[output.request_id]
                self._finish(live, output.num_cached_tokens)
        for last, count in gaps.items():  # one entry for all that were in the step before
            self._gaps.add(now - last, count)
        self._note_tokens(len(outputs), now)

    def _note_tokens(self, num_tokens: int, now: float) -> None:
        window = self._window
        window.append((now, num_tokens))
        self._num_in_window += num_tokens
        while window[0][0] < now - _WINDOW_S * (1 + 1e-9):
            self._num_in_window -= window.popleft()[1]
        self._most_in_window = max(self._most_in_window, self._num_in_window)

    def _finish(self, live: _Live, num_cached_tokens: int) -> None:
        arrival, totals = live.arrival, self._totals
        times = (live.first, live.last) if live.num_tokens > 1 else (live.last,)
        sizes = (1, live.num_tokens - 1)[: len(times)]
        record = RequestRecord(arrival.index, arrival.prompt_len, arrival.time, arrival.time, times, sizes)
        for metric, values in self._ms.items():
            value = getattr(record, metric)
            if value is not None:
                values.append(value * 1000)
        if totals.good is not None:
            totals.good += meets(record, self._slo_ms)
        totals.completed += 1
        totals.input_tokens += arrival.prompt_len
        totals.output_tokens += live.num_tokens
        totals.cached_tokens += num_cached_tokens
        self._last_end = max(self._last_end, live.last)
        heapq.heappush(self._ends, live.last)

    def summary(self, *, percentiles: Sequence[float], metrics: Sequence[str] = METRICS) -> dict[str, Any]:
        """As `metrics.summarize`, of the requests so far."""
        duration = self._last_end
        result = total_figures(
            self._totals,
            duration,
            failure_reasons=dict(self._failures.most_common()),
            client_queue_time_ms=0.0 if self._totals.completed else None,
            max_tokens_per_s=self._most_in_window / min(_WINDOW_S, duration) if duration > 0 else 0.0,
            max_requests=self._most_concurrent,
        )
        for metric in metrics:
            result |= self._gaps.figures(metric, percentiles) if metric == "itl" else metric_figures(metric, self._ms[metric], percentiles)
        return result
