"""`aioengine bench serve`: online load on one engine, by rate, ramp or concurrency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench import console
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import Client
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.files import check_writable, write_file
from aioengine_bench.host import Host
from aioengine_bench.load import LoadGenerator, LoadResult
from aioengine_bench.metrics import details, percentile_name, queue_figures, request_line, summarize
from aioengine_bench.results import check_saving, encode_result, file_name, save_result, timestamp, with_metadata
from aioengine_bench.settings import ServeSettings
from aioengine_bench.target import opened_target

BACKEND = "aioengine"


def due_times(settings: ServeSettings, requests: Sequence[BenchRequest]) -> list[float]:
    """When each request is due. A trace has its own times, which a rate would contradict. Raises ConfigError."""
    recorded = [request.arrival_time for request in requests if request.arrival_time is not None]
    if not recorded:
        return settings.arrivals.times(len(requests), Random(settings.dataset.seed))
    if settings.arrivals != ArrivalProcess():
        raise ConfigError(f"the dataset {settings.dataset.label!r} brings its own arrival times: leave out the rate")
    return recorded


async def warm_up(client: Client, requests: Sequence[BenchRequest], num_warmups: int) -> None:
    """Send other prompts of the same lengths first, so that the measured ones find nothing of theirs in the prefix cache.

    Raises whatever fails here: a run whose very first request fails says nothing.
    """
    for index in range(num_warmups):
        request = requests[index % len(requests)]
        reversed_prompt = BenchRequest(request.prompt_token_ids[::-1], min(request.max_tokens, 16))
        async for _ in client.send(reversed_prompt, request_id=f"warm-up-{index}"):
            pass


async def run_load(settings: ServeSettings, client: Client, requests: Sequence[BenchRequest]) -> LoadResult:
    """One measured run."""
    with console.progress_bar(len(requests), description="serving", disable=settings.disable_progress) as bar:
        generator = LoadGenerator(
            client,
            max_concurrency=settings.max_concurrency,
            on_done=lambda record: bar.update(),
            request_id_prefix=settings.request_id_prefix,
            stops=settings.stops,
        )
        return await generator.run(requests, due_times(settings, requests))


def make_result(
    settings: ServeSettings,
    load: LoadResult,
    *,
    num_requests: int,
    date: str,
    rps_changes: Sequence[dict[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The run under vLLM's keys, in vLLM's order; what only this tool has comes after. summary: in place of that of `load`'s records."""
    ramp = settings.arrivals.ramp_up
    rate = settings.arrivals.request_rate
    if summary is None:
        summary = summarize(
            load.records, duration=load.duration, percentiles=settings.percentiles, metrics=settings.metrics, slo_ms=settings.slo_ms
        ) | queue_figures(load.records, settings.percentiles)
    result: dict[str, Any] = {
        "date": date,
        "endpoint_type": settings.backend,
        "backend": settings.backend,
        "label": settings.save.label,
        "model_id": settings.config.model,
        "tokenizer_id": settings.config.tokenizer or settings.config.model,
        "num_prompts": num_requests,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": "inf" if math.isinf(settings.arrivals.burstiness) else settings.arrivals.burstiness,
        "max_concurrency": settings.max_concurrency,
        "ramp_up_strategy": ramp.strategy if ramp else None,
        "ramp_up_start_rps": ramp.start_rps if ramp else None,
        "ramp_up_end_rps": ramp.end_rps if ramp else None,
        **summary,
        "rps_change_events": list(rps_changes),
        "benchmark": "serve",
        "dataset_name": settings.dataset.label,
        "interrupted": load.interrupted,
        "stop_reason": load.stop_reason,
        "num_not_sent": num_requests - len(load.records),
        "goodput_slo_ms": dict(settings.slo_ms),
    }
    if settings.save.detailed:
        result.update(details(load.records))
    return result


def result_keys(settings: ServeSettings) -> list[str]:
    """The keys of every result of these settings."""
    nothing = make_result(settings, LoadResult([], 0.0, 0.0), num_requests=0, date="")
    return [*nothing, "num_preemptions", "engine", "environment"]


def check_some_completed(result: Mapping[str, Any], what: str) -> None:
    """Raise AioEngineError if all requests failed: the result, which is saved, is no measurement."""
    if result["failed"] and not result["completed"]:
        raise AioEngineError(f"{what}: none of {result['failed']} requests was completed: {describe_reasons(result['failure_reasons'])}")


def describe_reasons(reasons: Mapping[str, int], *, most: int = 3) -> str:
    """ "3 x RequestFailed: ...; 1 x ..." """
    texts = [f"{count} x {reason}" for reason, count in reasons.items()]
    return "; ".join(texts[:most]) + (f"; and {len(texts) - most} other reasons" if len(texts) > most else "")


async def serve(settings: ServeSettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial. Raises ConfigError."""
    date = timestamp()
    remote_keys = [] if settings.remote is None else ["base_url", "endpoint"]
    check_saving(settings.save, [*result_keys(settings), *remote_keys], default_name=default_file_name(settings, date))
    if settings.requests_jsonl is not None:
        check_writable(Path(settings.requests_jsonl))
    async with opened_target(settings, host) as target:
        requests = target.requests(settings.dataset)
        times = due_times(settings, requests)
        await warm_up(target.client, requests, settings.num_warmups)
        load = await run_load(settings, target.client, requests)
        result = make_result(settings, load, num_requests=len(requests), date=date, rps_changes=settings.arrivals.rps_changes(times))
        result |= target.facts()
    report(settings, result, load)
    check_some_completed(result, "serve" if settings.remote is None else f"serve {settings.remote.base_url}")
    return load.interrupted


def request_lines(settings: ServeSettings, load: LoadResult) -> bytes:
    """One JSON line for each request that was sent, in the order of the dataset."""
    records = sorted(load.records, key=lambda record: record.index)
    start = min((record.send_time for record in records), default=0.0)
    lines = [
        encode_result(request_line(record, start_time=start, request_id=f"{settings.request_id_prefix}{record.index}"))
        for record in records
    ]
    return b"".join(line + b"\n" for line in lines)


def report(settings: ServeSettings, result: dict[str, Any], load: LoadResult) -> None:
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    print(console.serving_block(result, settings.metrics, [percentile_name(p) for p in settings.percentiles]), file=out)
    if settings.max_concurrency is not None:
        waited = console.number(result["median_client_queue_time_ms"])
        print(f"Latencies count from the send: waiting for --max-concurrency is not in them (median {waited} ms).", file=out)
    if result["stop_reason"] is not None:
        print(f"Stopped: {result['stop_reason']}. {result['num_not_sent']} requests were not sent.", file=out)
    if result["interrupted"]:
        print(f"Interrupted: {result['completed']} of {result['num_prompts']} requests were completed.", file=out)
    path = save_result(
        with_metadata(result, settings.save.metadata), settings.save, default_name=default_file_name(settings, result["date"])
    )
    if path is not None:
        print(f"Saved to {path}", file=out)
    if settings.requests_jsonl is not None:
        write_file(Path(settings.requests_jsonl), request_lines(settings, load))
        print(f"{len(load.records)} requests in {settings.requests_jsonl}", file=out)


def default_file_name(settings: ServeSettings, date: str) -> str:
    """vLLM's pattern: {label}-{rate}qps[-concurrencyN]-{model}-{date}.json."""
    concurrency = f"concurrency{settings.max_concurrency}" if settings.max_concurrency is not None else ""
    model = settings.config.model.rstrip("/").rsplit("/", 1)[-1]
    return file_name([settings.save.label or settings.backend, f"{settings.arrivals.request_rate:g}qps", concurrency, model], date)
