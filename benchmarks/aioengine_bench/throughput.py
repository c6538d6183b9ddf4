"""`aioengine bench throughput`: everything at once, and how long until the last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aioengine.config import EngineConfig
from aioengine.engine.publishing import PublishOptions
from aioengine_bench import console
from aioengine_bench.client import EngineClient, SamplingSpec
from aioengine_bench.datasets import DatasetSpec, load_dataset
from aioengine_bench.host import Host
from aioengine_bench.load import LoadGenerator, LoadResult
from aioengine_bench.metrics import details, percentile
from aioengine_bench.results import SaveOptions, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.serve import engine_settings, warm_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """stream: consume every output as it comes, as an online client does, in place of the final one only."""

    config: EngineConfig
    dataset: DatasetSpec
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    save: SaveOptions = field(default_factory=SaveOptions)
    num_warmups: int = 1
    num_runs: int = 1
    stream: bool = False
    publish: PublishOptions = field(default_factory=PublishOptions)
    disable_progress: bool = False


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
        "interrupted": load.interrupted,
    }


def median_run(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run in the middle by elapsed time, whole: figures of different runs are not mixed. Complete runs go first."""
    complete = [run for run in runs if not run["interrupted"]] or runs
    return sorted(complete, key=lambda run: run["elapsed_time"])[(len(complete) - 1) // 2]


async def throughput(settings: ThroughputSettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial. Raises ConfigError."""
    date = timestamp()
    runs: list[dict[str, Any]] = []
    load: LoadResult | None = None
    async with host.started_engine(settings.config, settings.publish) as engine:
        requests = load_dataset(settings.dataset, engine.tokenizer, vocab_size=engine.model_info.vocab_size)
        client = EngineClient(engine, settings.sampling, final_only=not settings.stream)
        await warm_up(client, requests, settings.num_warmups)
        for number in range(settings.num_runs):
            engine.reset_prefix_cache()
            name = "throughput" if settings.num_runs == 1 else f"run {number + 1} of {settings.num_runs}"
            with console.progress_bar(len(requests), description=name, disable=settings.disable_progress) as bar:
                load = await LoadGenerator(client, on_done=lambda record: bar.update()).run(requests, [0.0] * len(requests))
            runs.append(run_figures(load))
            if load.interrupted:
                break
        result: dict[str, Any] = {
            **median_run(runs),
            "date": date,
            "benchmark": "throughput",
            "model_id": settings.config.model,
            "dataset_name": settings.dataset.label,
            "interrupted": runs[-1]["interrupted"],
            "runs": runs,
            "engine": engine_settings(engine),
            "environment": environment(),
        }
    assert load is not None
    if settings.save.detailed:
        result.update(details(load.records))
    _report(settings, result)
    return load.interrupted


def _report(settings: ThroughputSettings, result: dict[str, Any]) -> None:
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
    print("\n".join(lines), file=out)
    name = file_name([settings.save.label or "throughput", settings.config.model.rstrip("/").rsplit("/", 1)[-1]], result["date"])
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=name)
    if path is not None:
        print(f"Saved to {path}", file=out)
