"""`aioengine bench serve`: online load on one engine, by rate, ramp or concurrency."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench import console
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import Client, EngineClient
from aioengine_bench.datasets import BenchRequest, check_lengths, load_dataset
from aioengine_bench.host import Host
from aioengine_bench.http_client import HttpClient, list_models
from aioengine_bench.load import LoadGenerator, LoadResult
from aioengine_bench.metrics import details, percentile_name, summarize
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import RemoteSpec

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
        )
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


def engine_settings(engine: AsyncEngine) -> dict[str, Any]:
    """What of the engine's settings a figure depends on."""
    resolved = engine.resolved_config
    stats = engine.stats()
    return {
        **dataclasses.asdict(resolved.worker),
        "max_num_seqs": resolved.scheduler.max_num_seqs,
        "max_num_batched_tokens": resolved.scheduler.max_num_batched_tokens,
        "max_model_len": resolved.scheduler.max_model_len,
        "async_scheduling": resolved.scheduler.async_scheduling,
        "enable_prefix_caching": resolved.cache.enable_prefix_caching,
        "block_size": resolved.cache.block_size,
        "num_kv_cache_blocks": stats.num_total_blocks + 1,
    }


async def serve(settings: ServeSettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial. Raises ConfigError."""
    if settings.remote is not None:
        return await serve_remote(settings, settings.remote)
    date = timestamp()
    check_saving(settings.save, result_keys(settings), default_name=default_file_name(settings, date))
    async with host.started_engine(settings.config, settings.publish) as engine:
        requests = load_dataset(settings.dataset, engine.tokenizer, vocab_size=engine.model_info.vocab_size)
        check_lengths(requests, engine.resolved_config.scheduler.max_model_len)
        times = due_times(settings, requests)
        client = EngineClient(engine, settings.sampling)
        await warm_up(client, requests, settings.num_warmups)
        load = await run_load(settings, client, requests)
        stats = engine.stats()
        result = make_result(settings, load, num_requests=len(requests), date=date, rps_changes=settings.arrivals.rps_changes(times)) | {
            "num_preemptions": stats.num_preemptions,
            "engine": engine_settings(engine),
            "environment": environment(),
        }
    report(settings, result)
    check_some_completed(result, "serve")
    return load.interrupted


async def serve_remote(settings: ServeSettings, remote: RemoteSpec) -> bool:
    """As `serve`, of a server behind OpenAI's API."""
    date = timestamp()
    check_saving(settings.save, [*result_keys(settings), "base_url", "endpoint"], default_name=default_file_name(settings, date))
    card = choose_model(await list_models(remote), remote)
    tokenizer, vocab_size = await asyncio.to_thread(load_tokenizer_of, settings.config)
    requests = load_dataset(settings.dataset, tokenizer, vocab_size=vocab_size)
    if isinstance(max_model_len := card.get("max_model_len"), int):
        check_lengths(requests, max_model_len)
    times = due_times(settings, requests)
    client = HttpClient(remote, model=card["id"], sampling=settings.sampling, tokenizer=tokenizer)
    try:
        await warm_up(client, requests, settings.num_warmups)
        load = await run_load(settings, client, requests)
    finally:
        await client.close()
    rps_changes = settings.arrivals.rps_changes(times)
    result = make_result(settings, load, num_requests=len(requests), date=date, rps_changes=rps_changes) | {
        "model_id": card["id"],
        "num_preemptions": None,
        "engine": {},
        "environment": environment(),
        "base_url": remote.base_url,
        "endpoint": remote.path,
    }
    report(settings, result)
    check_some_completed(result, f"serve {remote.base_url}")
    return load.interrupted


def choose_model(cards: Sequence[dict[str, Any]], remote: RemoteSpec) -> dict[str, Any]:
    """The entry of `/v1/models` that is asked for. Raises ConfigError naming those there are."""
    for card in cards:
        if isinstance(card.get("id"), str) and remote.model in ("", card["id"]):
            return card
    names = ", ".join(str(card.get("id")) for card in cards) or "none"
    raise ConfigError(f"{remote.base_url} does not serve {remote.model!r}; it serves {names}")


def load_tokenizer_of(config: EngineConfig) -> tuple[TextTokenizer, int]:
    """And the size of its vocabulary. The model "fake" is that of `aioengine serve --fake`. Raises ModelError."""
    if config.model == "fake":
        from aioengine.testing import FakeTokenizer

        return FakeTokenizer(), FakeTokenizer.vocab_size
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.models.info import read_model_info, resolve_model

    files = resolve_model(config.tokenizer or config.model)
    return load_tokenizer(files.folder), read_model_info(files).vocab_size


def report(settings: ServeSettings, result: dict[str, Any]) -> None:
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


def default_file_name(settings: ServeSettings, date: str) -> str:
    """vLLM's pattern: {label}-{rate}qps[-concurrencyN]-{model}-{date}.json."""
    concurrency = f"concurrency{settings.max_concurrency}" if settings.max_concurrency is not None else ""
    model = settings.config.model.rstrip("/").rsplit("/", 1)[-1]
    return file_name([settings.save.label or settings.backend, f"{settings.arrivals.request_rate:g}qps", concurrency, model], date)
