"""/metrics against the engine's own books: the same counts, the same sums, under the names that vLLM's board asks for."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioengine.engine.async_engine import AsyncEngine
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.server.metrics import EngineMetrics, MetricsFold
from aioengine.testing import FakeExecutor, FakeTokenizer
from tests.server.sockets import serving

# What the panels of vLLM's own Grafana board ask for (examples/observability/prometheus_grafana of vLLM): series and labels.
BOARD = """
vllm:e2e_request_latency_seconds_bucket{model_name} vllm:e2e_request_latency_seconds_sum{model_name}
vllm:e2e_request_latency_seconds_count{model_name} vllm:prompt_tokens_total{model_name} vllm:generation_tokens_total{model_name}
vllm:inter_token_latency_seconds_bucket{model_name} vllm:inter_token_latency_seconds_sum{model_name}
vllm:inter_token_latency_seconds_count{model_name} vllm:num_requests_running{model_name} vllm:num_requests_waiting{model_name}
vllm:time_to_first_token_seconds_bucket{model_name} vllm:time_to_first_token_seconds_sum{model_name}
vllm:time_to_first_token_seconds_count{model_name} vllm:kv_cache_usage_perc{model_name}
vllm:request_prompt_tokens_bucket{model_name} vllm:request_generation_tokens_bucket{model_name}
vllm:request_success_total{model_name,finished_reason} vllm:request_queue_time_seconds_sum{model_name}
vllm:request_prefill_time_seconds_sum{model_name} vllm:request_decode_time_seconds_sum{model_name}
vllm:request_max_num_generation_tokens_sum{model_name}
"""
# What other boards and tools read, and what nobody else has.
ALSO = """
vllm:prefix_cache_queries_total{model_name,engine} vllm:prefix_cache_hits_total{model_name,engine} vllm:num_preemptions_total{engine}
vllm:iteration_tokens_total_bucket{engine} vllm:request_inference_time_seconds_count{engine} vllm:request_params_max_tokens_count{engine}
vllm:request_time_per_output_token_seconds_count{engine} vllm:cache_config_info{block_size,num_gpu_blocks}
aioengine_admission_stop_total{reason} aioengine_step_seconds_bucket{phase} aioengine_metrics_events_missed_total{engine}
"""


def series(page: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def total(found: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in found[name])


async def test_every_panel_of_vllms_board_finds_its_series() -> None:
    async with serving(settings={"served_model_names": ("mine",)}) as served:
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        page = (await served.get("/metrics")).body.decode()
    found = series(page)
    for name, labels in re.findall(r"(\S+)\{(\S+)\}", BOARD + ALSO):
        assert name in found, name
        for given, _ in found[name]:
            assert set(labels.split(",")) <= set(given), (name, given)
            assert given.get("model_name", "mine") == "mine"
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} >= {"stop", "length", "abort"}


class Books:
    """What the events said, added up in the plainest way."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = self.num_generated = 0
        self.stops: dict[str, int] = {}
        self.finished: dict[str, int] = {}
        self.execute_s = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.num_steps += bool(event.output.total_num_scheduled_tokens)
            self.num_tokens += event.output.total_num_scheduled_tokens
            self.stops[event.admission_stop] = self.stops.get(event.admission_stop, 0) + 1
        if isinstance(event, StepResultEvent):
            self.num_generated += sum(event.num_new_tokens.values())
            if event.execute_start is not None and event.execute_end is not None:
                self.execute_s += event.execute_end - event.execute_start
        if isinstance(event, (StepEvent, StepResultEvent)):
            for info in event.finished:
                self.finished[info.finish_reason] = self.finished.get(info.finish_reason, 0) + 1


async def load(engine: AsyncEngine) -> list[RequestOutput]:
    """Short and long, batched, queued, preempted, aborted ones; each one's last output."""

    async def one(index: int) -> RequestOutput:
        params = SamplingParams(max_tokens=10 + 5 * (index % 5), ignore_eos=True)
        outputs = [output async for output in engine.generate(chr(97 + index) * (4 + index), params, request_id=f"r{index}")]
        return outputs[-1]

    tasks = [asyncio.create_task(one(index)) for index in range(20)]
    await asyncio.sleep(0.005)
    engine.abort("r19")
    return list(await asyncio.gather(*tasks))


async def test_counts_and_sums_are_those_of_the_requests_and_of_the_events() -> None:
    books = Books()
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128, "block_size": 4}
    executor = FakeExecutor(forward_s=0.001, block_size=4)
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), num_kv_cache_blocks=30, **options) as engine:
        engine.bus.add_observer(books)
        metrics = EngineMetrics(engine, model_name="m")
        metrics.start()
        outputs = await load(engine)
        await asyncio.sleep(0.05)
        found = series(metrics.render()[0].decode())
        stats = engine.stats()
    ran = [output for output in outputs if output.metrics.first_token_time is not None]

    def seconds(name: str) -> float:
        return float(sum(getattr(output.metrics, f"{name}_s") for output in ran))

    assert stats.num_preemptions > 0, "the load is one that preempts"
    assert total(found, "vllm:num_preemptions_total") == stats.num_preemptions
    assert total(found, "vllm:prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in ran)
    assert total(found, "vllm:generation_tokens_total") == books.num_generated
    assert total(found, "vllm:generation_tokens_total") >= sum(len(output.token_ids) for output in outputs)
    assert total(found, "vllm:request_prompt_tokens_sum") == sum(len(output.prompt_token_ids) for output in outputs)
    assert total(found, "vllm:iteration_tokens_total_count") == books.num_steps
    assert total(found, "vllm:iteration_tokens_total_sum") == books.num_tokens
    reasons = {labels["finished_reason"]: value for labels, value in found["vllm:request_success_total"] if value}
    assert reasons == books.finished == {"length": 19, "abort": 1}
    assert {labels["reason"]: value for labels, value in found["aioengine_admission_stop_total"]} == books.stops
    phases = {labels["phase"]: value for labels, value in found["aioengine_step_seconds_sum"]}
    assert phases["execute"] == pytest.approx(books.execute_s)
    scheduled = [output for output in outputs if output.metrics.queue_s is not None]
    assert total(found, "vllm:request_queue_time_seconds_count") == len(scheduled)
    assert total(found, "vllm:request_queue_time_seconds_sum") == pytest.approx(sum(o.metrics.queue_s or 0 for o in scheduled))
    for name, series_name in (("prefill", "prefill_time"), ("decode", "decode_time")):
        assert total(found, f"vllm:request_{series_name}_seconds_sum") == pytest.approx(seconds(name), abs=0.002 * len(ran))
    ttft = sum(output.metrics.time_to_first_token_s or 0 for output in ran)
    assert total(found, "vllm:time_to_first_token_seconds_sum") == pytest.approx(ttft, abs=0.002 * len(ran))
    gaps = books.num_generated - len(ran)
    assert total(found, "vllm:inter_token_latency_seconds_count") == gaps
    assert total(found, "aioengine_metrics_events_missed_total") == 0
    assert total(found, "vllm:num_requests_running") == total(found, "vllm:num_requests_waiting") == 0


async def test_events_that_were_missed_are_counted_and_nobody_stays_for_ever() -> None:
    """The fold is behind the steps and may lose some: then it starts from what lives."""
    fold = MetricsFold(max_model_len=128)
    events: list[Event] = []
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "block_size": 4, "max_num_batched_tokens": 32}
    async with AsyncEngine(executor=FakeExecutor(block_size=4), tokenizer=FakeTokenizer(), num_kv_cache_blocks=40, **options) as engine:
        engine.bus.add_observer(events.append)
        await load(engine)
        snapshot = engine.snapshot()
    for event in events[: len(events) // 2]:
        fold.fold(event)
    assert fold._lives
    fold.fold(snapshot)
    assert not fold._lives
    for event in events[len(events) // 2 :]:
        fold.fold(event)  # of requests that it does not know


async def test_the_names_are_the_same_whatever_form_a_scraper_asks_for() -> None:
    """A real Prometheus asks for OpenMetrics, in which the library would write vllm_num_requests_running."""
    real = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5"
    newer = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=1.0.0;escaping=underscores;q=0.5"
    async with serving() as served:
        for accept in ("", "*/*", "text/plain", real, newer):
            answer = await served.get("/metrics", {"accept": accept})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert b"\nvllm:num_requests_running{" in answer.body
            assert b"vllm_" not in answer.body
