"""`/metrics`: the engine in Prometheus' form, under the names of vLLM's dashboard, so that its Grafana board works unchanged.

Gauges and totals are read from the engine when they are asked for. Distributions are folded from the step events by a task of its
own, behind the steps; how many events it missed, if it ever does, is a metric too.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine.async_engine import AsyncEngine
from aioengine.events.step_event import EngineSnapshot, Event, FinishedInfo, RequestInfo, StepEvent, StepResultEvent

_MAX_BUFFERED_EVENTS = 8192

# vLLM's own bounds, so that its recorded queries mean the same.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PHASES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them."""
        rows: list[tuple[str, float]] = []
        so_far = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            rows.append(("+Inf" if bound == float("inf") else f"{float(bound)!r}", so_far))
        return rows


class _Life:
    """When things happened to one live request, in seconds of the engine's clock."""

    __slots__ = ("arrival", "first_token", "last_token", "max_tokens", "num_prompt_tokens", "scheduled")

    def __init__(self, arrival: float, num_prompt_tokens: int, max_tokens: int) -> None:
        self.arrival = arrival
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None


class MetricsFold:
    """Folds step events into distributions and totals. Knows neither Prometheus nor the engine."""

    def __init__(self, *, max_model_len: int) -> None:
        lengths = _one_two_five(max_model_len)
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token_latency = Histogram(_ITL)
        self.e2e_latency = Histogram(_LATENCY)
        self.queue_time = Histogram(_LATENCY)
        self.prefill_time = Histogram(_LATENCY)
        self.decode_time = Histogram(_LATENCY)
        self.inference_time = Histogram(_LATENCY)
        self.time_per_output_token = Histogram(_ITL)
        self.max_tokens = Histogram(lengths)
        self.prompt_tokens = Histogram(lengths)
        self.generation_tokens = Histogram(lengths)
        self.iteration_tokens = Histogram(_ITERATION_TOKENS)
        self.phases = {name: Histogram(_PHASES) for name in ("schedule", "execute", "sample", "update")}
        self.admission_stops: dict[str, int] = {}
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._lives: dict[str, _Life] = {}

    def fold(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._fold_step(event)
            case StepResultEvent():
                self._fold_result(event)
            case EngineSnapshot():
                self._fold_snapshot(event)

    def _fold_step(self, event: StepEvent) -> None:
        self._add(event.added)
        self._finish(event.finished, event.time)
        self.admission_stops[event.admission_stop] = self.admission_stops.get(event.admission_stop, 0) + 1
        self.phases["schedule"].observe(event.schedule_end - event.schedule_start)
        output = event.output
        if output.total_num_scheduled_tokens:
            self.iteration_tokens.observe(output.total_num_scheduled_tokens)
        for request in output.scheduled_new_reqs:
            life = self._lives.get(request.req_id)
            if life is not None and life.scheduled is None:
                life.scheduled = event.schedule_start
                self.queue_time.observe(max(0.0, event.schedule_start - life.arrival))

    def _fold_result(self, event: StepResultEvent) -> None:
        self._add(event.added)
        for name in ("execute", "sample", "update"):
            start, end = getattr(event, f"{name}_start"), getattr(event, f"{name}_end")
            if start is not None and end is not None:
                self.phases[name].observe(end - start)
        self._fold_tokens(event.num_new_tokens, event.time)
        self._finish(event.finished, event.time)

    def _fold_tokens(self, num_new_tokens: dict[str, int], now: float) -> None:
        """The only thing that is done for every request in every step: those that had their last token together, as nearly all
        have, are observed together.
        """
        self.num_generation_tokens += sum(num_new_tokens.values())
        lives = self._lives
        since, num_together = 0.0, 0
        for request_id, count in num_new_tokens.items():
            life = lives.get(request_id)
            if life is None or count == 0:
                continue
            last_token, life.last_token = life.last_token, now
            if last_token is None:
                life.first_token = now
                self.num_prompt_tokens += life.num_prompt_tokens
                self.time_to_first_token.observe(now - life.arrival)
            elif count > 1:
                self.inter_token_latency.observe((now - last_token) / count, count)
            elif last_token == since:
                num_together += 1
            else:
                if num_together:
                    self.inter_token_latency.observe(now - since, num_together)
                since, num_together = last_token, 1
        if num_together:
            self.inter_token_latency.observe(now - since, num_together)

    def _fold_snapshot(self, event: EngineSnapshot) -> None:
        """After a gap: who is not in it has ended unseen; who is, and is not known, came unseen."""
        live = {request.request_id: request for request in event.requests}
        self._lives = {request_id: life for request_id, life in self._lives.items() if request_id in live}
        for request_id, request in live.items():
            if request_id not in self._lives:
                self._lives[request_id] = _Life(request.arrival_time, request.num_prompt_tokens, request.max_tokens)

    def _add(self, added: Sequence[RequestInfo]) -> None:
        for info in added:
            self._lives[info.request_id] = _Life(info.arrival_time, info.num_prompt_tokens, info.max_tokens)

    def _finish(self, finished: Sequence[FinishedInfo], now: float) -> None:
        for info in finished:
            self.finished[info.finish_reason] = self.finished.get(info.finish_reason, 0) + 1
            life = self._lives.pop(info.request_id, None)
            if life is None:
                continue
            self.e2e_latency.observe(now - life.arrival)
            self.prompt_tokens.observe(life.num_prompt_tokens)
            self.generation_tokens.observe(info.num_output_tokens)
            self.max_tokens.observe(life.max_tokens)
            if life.scheduled is not None and life.first_token is not None:
                self.prefill_time.observe(life.first_token - life.scheduled)
                self.decode_time.observe(now - life.first_token)
                self.inference_time.observe(now - life.scheduled)
                if info.num_output_tokens > 1:
                    self.time_per_output_token.observe((now - life.first_token) / (info.num_output_tokens - 1))


class EngineMetrics(Collector):
    """The metrics of one engine. From `start()` on a task folds the engine's events, until the engine is shut down."""

    def __init__(self, engine: AsyncEngine, *, model_name: str) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._fold: MetricsFold | None = None
        self._task: asyncio.Task[None] | None = None
        self._num_missed = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def start(self) -> None:
        """Begin to fold, in the engine's loop. Idempotent."""
        if self._task is None:
            self._fold = MetricsFold(max_model_len=self._engine.resolved_config.scheduler.max_model_len)
            self._task = asyncio.get_running_loop().create_task(self._run(self._fold), name="aioengine-metrics")

    async def _run(self, fold: MetricsFold) -> None:
        with self._engine.events(_MAX_BUFFERED_EVENTS) as events:
            fold.fold(self._engine.snapshot())
            async for event in events:
                if events.num_dropped > self._num_missed:
                    self._num_missed = events.num_dropped
                    fold.fold(self._engine.snapshot())
                fold.fold(event)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type. Always in Prometheus' own form, whatever a scraper likes better: in OpenMetrics' form the
        library writes the colons of vLLM's names as underscores, and no panel of the board finds them.
        """
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    # ------------------------------------------------------------------ prometheus_client asks here
    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._from_stats(stats)
        if self._fold is not None:
            yield from self._from_fold(self._fold)
        yield self._counter("aioengine_metrics_events_missed", "Step events that the metrics did not see in time.", self._num_missed)

    def _from_stats(self, stats: SchedulerStats) -> Iterator[Metric]:
        gauges = (
            ("vllm:num_requests_running", "Number of requests in model execution batches.", stats.num_running_reqs),
            ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", stats.num_waiting_reqs),
            ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", stats.kv_cache_usage),
        )
        for name, text, value in gauges:
            metric = GaugeMetricFamily(name, text, labels=list(self._labels))
            metric.add_metric(list(self._labels.values()), value)
            yield metric
        cache = self._engine.resolved_config.cache
        labels = {**self._labels, "block_size": str(cache.block_size), "num_gpu_blocks": str(stats.num_total_blocks + 1)}
        labels["enable_prefix_caching"] = str(cache.enable_prefix_caching)
        info = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info
        counters = (
            ("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", stats.prefix_cache_hits),
            ("vllm:external_prefix_cache_queries", "KV connector queries, in tokens.", stats.external_prefix_cache_queries),
            ("vllm:external_prefix_cache_hits", "KV connector hits, in tokens.", stats.external_prefix_cache_hits),
            ("vllm:num_preemptions", "Cumulative number of preemptions.", stats.num_preemptions),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were checked.", stats.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.num_accepted_tokens),
            ("aioengine_requests_rejected", "Requests refused because the queue was full.", stats.num_rejected_reqs),
        )
        for name, text, value in counters:
            yield self._counter(name, text, value)

    def _from_fold(self, fold: MetricsFold) -> Iterator[Metric]:
        yield self._counter("vllm:prompt_tokens", "Number of prefill tokens processed.", fold.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Number of generation tokens processed.", fold.num_generation_tokens)
        yield self._counter_by("vllm:request_success", "Count of requests that ended.", "finished_reason", fold.finished)
        yield self._counter_by("aioengine_admission_stop", "Steps by what stopped admission.", "reason", fold.admission_stops)
        histograms = (
            ("vllm:time_to_first_token_seconds", "Time to first token in seconds.", fold.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Inter-token latency in seconds.", fold.inter_token_latency),
            ("vllm:e2e_request_latency_seconds", "End-to-end request latency in seconds.", fold.e2e_latency),
            ("vllm:request_queue_time_seconds", "Time in the WAITING phase.", fold.queue_time),
            ("vllm:request_prefill_time_seconds", "Time from the first schedule to the first token.", fold.prefill_time),
            ("vllm:request_decode_time_seconds", "Time from the first token to the last.", fold.decode_time),
            ("vllm:request_inference_time_seconds", "Time from the first schedule to the last token.", fold.inference_time),
            ("vllm:request_time_per_output_token_seconds", "Decode time of a request by token.", fold.time_per_output_token),
            ("vllm:request_params_max_tokens", "max_tokens of a request.", fold.max_tokens),
            # A continuation is a request of its own here, so the longest of a group is its own length.
            ("vllm:request_max_num_generation_tokens", "Most generation tokens of a request.", fold.generation_tokens),
            ("vllm:request_prompt_tokens", "Number of prefill tokens of a request.", fold.prompt_tokens),
            ("vllm:request_generation_tokens", "Number of generation tokens of a request.", fold.generation_tokens),
            ("vllm:iteration_tokens_total", "Number of tokens of an engine step.", fold.iteration_tokens),
        )
        for name, text, histogram in histograms:
            yield self._histogram(name, text, {"": histogram})
        yield self._histogram("aioengine_step_seconds", "Seconds of a step by phase.", fold.phases, "phase")

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter_by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        metric = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), key], value)
        return metric

    def _histogram(self, name: str, text: str, histograms: dict[str, Histogram], label: str | None = None) -> Metric:
        metric = HistogramMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for key, histogram in histograms.items():
            labels: list[Any] = [*self._labels.values(), *([key] if label else [])]
            metric.add_metric(labels, histogram.buckets(), histogram.total)
        return metric


def _one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `most`."""
    bounds: list[int] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > most:
                return bounds or [1]
            bounds.append(factor * power)
        power *= 10
