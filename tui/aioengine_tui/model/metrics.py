"""Rates, percentiles and short histories over bounded memory. Reading never changes anything, so replays stay equal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

HISTORY_BUCKET_S = 0.5
HISTORY_LENGTH = 240  # two minutes

Series = Literal[
    "steps",  # a second
    "prefill_tokens",  # a second: of prompts, without what preemptions made necessary again
    "decode_tokens",  # a second
    "kv_usage",  # 0..1
    "running",
    "waiting",
    "preempted",
    "hit_rate",  # 0..1, of the tokens looked up in the bucket; None where there were none
    "ttft",  # seconds, mean of the bucket; None where there were none
    "queue_wait",  # seconds from arrival to the first step, of those that were admitted
    "itl",  # seconds, mean of the bucket; None where there were none
    "overlap",  # 0..1; None where no step came back
]
SERIES: tuple[Series, ...] = get_args(Series)


class RateWindow:
    """Sums of what happened in the last `seconds`."""

    def __init__(self, *, num_values: int, seconds: float, capacity: int = 8192) -> None:
        self.num_values = num_values
        self.seconds = seconds
        self._entries: deque[tuple[float, ...]] = deque(maxlen=capacity)  # (time, value, ...)
        self._first_time: float | None = None

    def add(self, time: float, *values: float) -> None:
        if self._first_time is None:
            self._first_time = time
        entries = self._entries
        while entries and entries[0][0] < time - self.seconds:
            entries.popleft()
        entries.append((time, *values))

    def start(self, time: float) -> None:
        """What happens from here on is seen: the window does not reach further back."""
        self._first_time = time

    def sums(self, now: float) -> list[float]:
        sums = [0.0] * self.num_values
        start = now - self.seconds
        for entry in reversed(self._entries):
            if entry[0] <= start:
                break
            for index in range(self.num_values):
                sums[index] += entry[index + 1]
        return sums

    def rates(self, now: float) -> list[float]:
        """A second, over the time since the start, at most `seconds`; less where the capacity does not reach back so far."""
        if not self._entries or self._first_time is None:
            return [0.0] * self.num_values
        span = min(self.seconds, now - self._first_time)
        if len(self._entries) == self._entries.maxlen:
            span = min(span, now - self._entries[0][0])
        if span <= 0:
            return [0.0] * self.num_values
        return [total / span for total in self.sums(now)]

    def copy(self) -> RateWindow:
        other = RateWindow(num_values=self.num_values, seconds=self.seconds)
        other._entries, other._first_time = self._entries.copy(), self._first_time
        return other


class SampleWindow:
    """Weighted samples of the last `seconds`, for percentiles."""

    def __init__(self, *, seconds: float, capacity: int = 2048) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, float, int]] = deque(maxlen=capacity)  # (time, value, weight)

    def add(self, time: float, value: float, weight: int = 1) -> None:
        self._samples.append((time, value, weight))

    def percentiles(self, now: float, *quantiles: float) -> list[float | None]:
        """The value below or at which the given share (0..1) of the samples lies; None where there is no sample."""
        return quantiles_of(self.recent(now), *quantiles)

    def recent(self, now: float) -> list[tuple[float, int]]:
        """(value, weight) of the samples of the last `seconds`."""
        start = now - self.seconds
        return [(value, weight) for time, value, weight in self._samples if time > start]

    def copy(self) -> SampleWindow:
        other = SampleWindow(seconds=self.seconds)
        other._samples = self._samples.copy()
        return other


def quantiles_of(samples: Iterable[tuple[float, int]], *quantiles: float) -> list[float | None]:
    """Of (value, weight): the value below or at which the given share (0..1) lies; None where there is no sample."""
    ranked = sorted(samples)
    if not ranked:
        return [None] * len(quantiles)
    total = sum(weight for _, weight in ranked)
    return [_weighted_quantile(ranked, total * quantile) for quantile in quantiles]


def _weighted_quantile(samples: Sequence[tuple[float, int]], rank: float) -> float:
    reached = 0
    for value, weight in samples:
        reached += weight
        if reached >= rank:
            return value
    return samples[-1][0]


@dataclass(slots=True)
class _Bucket:
    index: int
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    queries: int = 0
    hits: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    queue_wait_sum: float = 0.0
    queue_wait_count: int = 0
    itl_sum: float = 0.0
    itl_count: int = 0
    host: float = 0.0
    hidden: float = 0.0

    def value(self, series: Series) -> float | None:
        match series:
            case "steps" | "prefill_tokens" | "decode_tokens":
                return float(getattr(self, series)) / HISTORY_BUCKET_S
            case "kv_usage" | "running" | "waiting" | "preempted":
                return float(getattr(self, series))
            case "hit_rate":
                return self.hits / self.queries if self.queries else None
            case "ttft":
                return self.ttft_sum / self.ttft_count if self.ttft_count else None
            case "queue_wait":
                return self.queue_wait_sum / self.queue_wait_count if self.queue_wait_count else None
            case "itl":
                return self.itl_sum / self.itl_count if self.itl_count else None
            case "overlap":
                return self.hidden / self.host if self.host > 0 else None


_GAUGES: tuple[Series, ...] = ("kv_usage", "running", "waiting", "preempted")
_SUMS: tuple[Series, ...] = ("steps", "prefill_tokens", "decode_tokens")


class History:
    """The last two minutes in buckets of half a second. Buckets without events hold the gauges and no sums."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=HISTORY_LENGTH)

    def at(self, time: float) -> _Bucket:
        """The bucket of `time`; a time before the latest bucket counts into that one."""
        index = int(time // HISTORY_BUCKET_S)
        buckets = self._buckets
        if not buckets or index > buckets[-1].index:
            latest = buckets[-1] if buckets else _Bucket(index)
            buckets.append(
                _Bucket(index, kv_usage=latest.kv_usage, running=latest.running, waiting=latest.waiting, preempted=latest.preempted)
            )
        return buckets[-1]

    def values(self, series: Series, now: float, length: int = HISTORY_LENGTH) -> list[float | None]:
        """The newest `length` values, oldest first, up to the bucket before the one of `now` (which is still filling).

        None: before the first event, and where a mean has no sample.
        """
        last = int(now // HISTORY_BUCKET_S) - 1
        values: list[float | None] = [None] * length
        newer = last + 1  # values from here on are filled
        for bucket in reversed(self._buckets):
            if bucket.index > last:
                continue
            idle = bucket.value(series) if series in _GAUGES else 0.0 if series in _SUMS else None
            for index in range(max(bucket.index + 1, last + 1 - length), newer):
                values[index - last - 1 + length] = idle
            if bucket.index <= last - length:
                break
            values[bucket.index - last - 1 + length] = bucket.value(series)
            newer = bucket.index
        return values

    def copy(self) -> History:
        other = History()
        other._buckets = self._buckets.copy()
        if other._buckets:  # only the latest one still changes
            latest = other._buckets.pop()
            other._buckets.append(_copy_bucket(latest))
        return other


def _copy_bucket(bucket: _Bucket) -> _Bucket:
    return _Bucket(*(getattr(bucket, name) for name in _Bucket.__slots__))


class OverlapMeter:
    """How much of the host's work (schedule, update) happened while the worker was computing.

    The worker's times of a step come with its result, after the host work that ran beside it; so host spans wait here
    until a worker span ends behind them. The worker is FIFO: a later step cannot cover them any more.
    """

    def __init__(self) -> None:
        self._pending: deque[list[float]] = deque(maxlen=64)  # [start, end, hidden so far]

    def add_host(self, start: float, end: float) -> None:
        self._pending.append([start, end, 0.0])

    def add_worker(self, start: float, end: float) -> tuple[float, float]:
        """Returns (seconds of host work that are final now, seconds of them that were hidden)."""
        host = hidden = 0.0
        kept: list[list[float]] = []
        for span in self._pending:
            span[2] += max(0.0, min(end, span[1]) - max(start, span[0]))
            if span[1] <= end:
                host += span[1] - span[0]
                hidden += span[2]
            else:
                kept.append(span)
        self._pending.clear()
        self._pending.extend(kept)
        return host, hidden

    def copy(self) -> OverlapMeter:
        other = OverlapMeter()
        other._pending.extend(span.copy() for span in self._pending)
        return other
