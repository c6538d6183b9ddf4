"""`aioengine bench latency`: one fixed batch, again and again, and how long each takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from aioengine.engine.async_engine import AsyncEngine
from aioengine_bench import console
from aioengine_bench.client import check_complete, sampling_params
from aioengine_bench.datasets import BenchRequest, check_lengths
from aioengine_bench.host import Host
from aioengine_bench.metrics import mean, percentile, standard_deviation
from aioengine_bench.random_prompts import RandomPrompts
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.settings import LatencySettings
from aioengine_bench.specs import SamplingSpec
from aioengine_bench.target import engine_settings

PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_result(
    settings: LatencySettings, latencies: list[float], *, date: str, interrupted: bool, engine: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **latency_figures(latencies),
        "date": date,
        "benchmark": "latency",
        "model_id": settings.config.model,
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        "batch_size": settings.batch_size,
        "interrupted": interrupted,
        "engine": engine,
        "environment": environment(),
    }


def latency_figures(latencies: list[float]) -> dict[str, Any]:
    """The figures of the latencies in seconds, under vLLM's keys."""
    return {
        "avg_latency": mean(latencies),
        "std_latency": standard_deviation(latencies),
        "latencies": latencies,
        "percentiles": {str(percent): percentile(latencies, percent) for percent in PERCENTILES},
    }


async def latency(settings: LatencySettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial."""
    date = timestamp()
    keys = make_result(settings, [], date=date, interrupted=False, engine={})
    check_saving(settings.save, keys, default_name=_default_name(settings, date))
    async with host.started_engine(settings.config, settings.publish) as engine:
        prompts = RandomPrompts(engine.tokenizer, vocab_size=engine.model_info.vocab_size, random=Random(settings.seed))
        batch = [BenchRequest(prompts.make(settings.input_len), settings.output_len) for _ in range(settings.batch_size)]
        check_lengths(batch, engine.resolved_config.scheduler.max_model_len)
        latencies: list[float] = []
        interrupted = False
        total = settings.num_iters_warmup + settings.num_iters
        with console.progress_bar(total, description="latency", unit="batch", disable=settings.disable_progress) as bar:
            try:
                for number in range(total):
                    seconds = await _time_batch(engine, batch, settings.sampling)
                    if number >= settings.num_iters_warmup:
                        latencies.append(seconds)
                    bar.update()
            except asyncio.CancelledError:
                interrupted = True
        result = make_result(settings, latencies, date=date, interrupted=interrupted, engine=engine_settings(engine))
    _report(settings, result)
    return interrupted


async def _time_batch(engine: AsyncEngine, batch: list[BenchRequest], sampling: SamplingSpec) -> float:
    engine.reset_prefix_cache()  # the same prompts come again, and shall be computed again
    params = [sampling_params(sampling, request) for request in batch]
    start = time.perf_counter()
    outputs = await engine.generate_batch([request.prompt_token_ids for request in batch], params, progress=False)
    seconds = time.perf_counter() - start
    for request, output in zip(batch, outputs, strict=True):
        check_complete(output, request.max_tokens, ignore_eos=request.ignore_eos)
    return seconds


def _default_name(settings: LatencySettings, date: str) -> str:
    return file_name([settings.save.label or "latency", settings.config.model.rstrip("/").rsplit("/", 1)[-1]], date)


def _report(settings: LatencySettings, result: dict[str, Any]) -> None:
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    lines = [
        console.heading("Latency Benchmark Result"),
        console.line("Batches measured", len(result["latencies"])),
        console.line("Mean latency (s)", result["avg_latency"], 4),
        console.line("Standard deviation (s)", result["std_latency"], 4),
        *[console.line(f"P{percent} latency (s)", value, 4) for percent, value in result["percentiles"].items()],
    ]
    if result["interrupted"]:
        lines.append(f"Interrupted after {len(result['latencies'])} of {settings.num_iters} batches.")
    lines.append("=" * len(lines[0]))
    print("\n".join(lines), file=out)
    default_name = _default_name(settings, result["date"])
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)
