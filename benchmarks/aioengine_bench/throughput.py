"""`aioengine bench throughput`: everything at once, and how long until the last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.errors import ConfigError
from aioengine_bench import console
from aioengine_bench.client import EngineClient
from aioengine_bench.datasets import check_lengths, load_dataset
from aioengine_bench.host import Host
from aioengine_bench.load import LoadGenerator, LoadResult
from aioengine_bench.metrics import count_reasons, details, median_run, percentile
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.serve import check_some_completed, describe_reasons, warm_up
from aioengine_bench.settings import ThroughputSettings
from aioengine_bench.target import engine_settings


def run_figures(load: LoadResult) -> dict[str, Any]:
    """One run under vLLM's keys, and the counts that its totals hide. Only completed requests count in rates."""
    done = [record for record in load.records if record.outcome == "completed"]
    num_input, num_output = sum(record.prompt_len for record in done), sum(record.output_len for record in done)

    def rate(amount: int) -> float | None:
        return amount / load.duration if load.duration > 0 else None

    return {
        "elapsed_time": load.duration,
        "num_requests": len(done),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": rate(len(done)),
        "tokens_per_second": rate(num_input + num_output),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "output_tokens_per_second": rate(num_output),
        "total_cached_tokens": sum(record.num_cached_tokens for record in done),
        "failed": sum(record.outcome == "failed" for record in load.records),
        "aborted": sum(record.outcome == "aborted" for record in load.records),
        "failure_reasons": count_reasons(load.records),
        "interrupted": load.interrupted,
    }


def make_result(settings: ThroughputSettings, runs: Sequence[LoadResult], *, date: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The median run by elapsed time; complete runs go before interrupted ones."""
    figures = [run_figures(run) for run in runs]
    complete = [run for run in figures if not run["interrupted"]] or figures
    result = {
        **median_run(complete, "elapsed_time"),
        "date": date,
        "benchmark": "throughput",
        "model_id": settings.config.model,
        "dataset_name": settings.dataset.label,
        "interrupted": runs[-1].interrupted,
        "runs": figures,
        "engine": engine,
        "environment": environment(),
    }
    return result | (details(runs[-1].records) if settings.save.detailed else {})


async def throughput(settings: ThroughputSettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial. Raises ConfigError."""
    date = timestamp()
    keys = make_result(settings, [LoadResult([], 0.0, 0.0)], date=date, engine={})
    check_saving(settings.save, keys, default_name=_default_name(settings, date))
    runs: list[LoadResult] = []
    async with host.started_engine(settings.config, settings.publish) as engine:
        requests = load_dataset(settings.dataset, engine.tokenizer, vocab_size=engine.model_info.vocab_size)
        if any(request.arrival_time is not None for request in requests):
            raise ConfigError(f"the dataset {settings.dataset.label!r} brings its own arrival times: use `aioengine bench serve`")
        check_lengths(requests, engine.resolved_config.scheduler.max_model_len)
        client = EngineClient(engine, settings.sampling, final_only=not settings.stream)
        await warm_up(client, requests, settings.num_warmups)
        for number in range(settings.num_runs):
            engine.reset_prefix_cache()
            name = "throughput" if settings.num_runs == 1 else f"run {number + 1} of {settings.num_runs}"
            with console.progress_bar(len(requests), description=name, disable=settings.disable_progress) as bar:
                runs.append(await LoadGenerator(client, on_done=lambda record: bar.update()).run(requests, [0.0] * len(requests)))
            if runs[-1].interrupted:
                break
        result = make_result(settings, runs, date=date, engine=engine_settings(engine))
    _report(settings, result, num_requests=len(requests))
    for figures in result["runs"]:
        check_some_completed({**figures, "completed": figures["num_requests"]}, "throughput")
    return runs[-1].interrupted


def _default_name(settings: ThroughputSettings, date: str) -> str:
    return file_name([settings.save.label or "throughput", settings.config.model.rstrip("/").rsplit("/", 1)[-1]], date)


def _report(settings: ThroughputSettings, result: dict[str, Any], *, num_requests: int) -> None:
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    runs = result["runs"]
    lines = [
        console.heading("Throughput Benchmark Result"),
        console.line("Successful requests", result["num_requests"]),
        console.line("Failed requests", result["failed"]),
        console.line("Aborted requests", result["aborted"]),
        console.line("Elapsed time (s)", result["elapsed_time"]),
        console.line("Total input tokens", result["total_input_tokens"]),
        console.line("  of them from the prefix cache", result["total_cached_tokens"]),
        console.line("Total generated tokens", result["total_output_tokens"]),
        console.line("Request throughput (req/s)", result["requests_per_second"]),
        console.line("Output token throughput (tok/s)", result["output_tokens_per_second"]),
        console.line("Total token throughput (tok/s)", result["tokens_per_second"]),
    ]
    if len(runs) > 1:
        rates = [run["output_tokens_per_second"] for run in runs if run["output_tokens_per_second"] is not None]
        spread = f"{console.number(percentile(rates, 0))} - {console.number(percentile(rates, 100))}"
        lines.append(console.line(f"Output tok/s of {len(runs)} runs (median above)", spread))
    lines.append("=" * len(lines[0]))
    if result["failure_reasons"]:
        lines.append(f"Not completed: {describe_reasons(result['failure_reasons'])}")
    if result["interrupted"]:
        lines.append(f"Interrupted in run {len(runs)} of {settings.num_runs}: {runs[-1]['num_requests']} of {num_requests} were completed.")
    print("\n".join(lines), file=out)
    default_name = _default_name(settings, result["date"])
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)
