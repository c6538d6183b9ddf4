"""`aioengine bench simulate`: reads the traffic and the costs, runs one simulation or many, prints and saves like `bench serve`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.events.recording.reader import read_recording
from aioengine.replay.recording import read_settings
from aioengine.testing import FakeTokenizer, make_model_info
from aioengine_bench import console
from aioengine_bench.datasets import load_dataset
from aioengine_bench.goal import Goal, best, percentiles_for
from aioengine_bench.load import LoadResult
from aioengine_bench.metrics import percentile_name
from aioengine_bench.results import check_saving, environment, save_result, timestamp, with_metadata
from aioengine_bench.serve import default_file_name, describe_reasons, due_times, make_result
from aioengine_bench.settings import ServeSettings
from aioengine_bench.simulate.arrivals import Arrival, block_hashes
from aioengine_bench.simulate.cost import HostCost, StepCost, fit, roofline
from aioengine_bench.simulate.figures import RunningFigures
from aioengine_bench.simulate.plan import Plan, Value, combinations
from aioengine_bench.simulate.run import DetailedRecorder
from aioengine_bench.simulate.run_plan import MAX_MODEL_LEN, run_plan
from aioengine_bench.simulate.settings import SimulateSettings
from aioengine_bench.simulate.traces import from_recording, read_trace, repeat

_MAX_DETAILED = 50_000  # requests of which every token's time is kept; of more, figures
_DEFAULT_NUM_BLOCKS = 16_384


@dataclass(frozen=True, slots=True)
class _Input:
    plan: Plan
    arrivals: Sequence[Arrival]
    source: str
    notes: list[str] = field(default_factory=list)


def run_simulate(settings: SimulateSettings, serve: ServeSettings) -> None:
    """Print and save. serve: of the options that `bench serve` has too. Raises ConfigError."""
    date = timestamp()
    serve = dataclasses.replace(serve, percentiles=percentiles_for(serve.percentiles, settings.goals))
    given = _read_input(settings, serve)
    default_name = default_file_name(serve, date)
    check_saving(serve.save, ["benchmark", "simulated"], default_name=default_name)
    if serve.save.detailed and (settings.num_requests or len(given.arrivals)) > _MAX_DETAILED:
        raise ConfigError(f"--save-detailed keeps every token's time, for {_MAX_DETAILED} requests at most: leave it out")
    changes = list(combinations({**settings.sweep, **settings.vary}))
    if len(changes) > 1 and settings.record is not None:
        raise ConfigError("--record is for one simulation: leave out --sweep and --vary")
    results = [_simulate_one(settings, serve, given, change, date) for change in changes]
    out = console.output_stream(stdout_is_taken=serve.save.claims_stdout)
    for note in given.notes:
        print(f"Note: {note}", file=out)
    for change, result in zip(changes, results, strict=True):
        if reasons := result["failure_reasons"]:
            which = "".join(f" with {name}={value}" for name, value in change.items())
            print(f"Note: failed{which}: {describe_reasons(reasons)}", file=out)
    chosen = 0
    if len(results) == 1:
        print(console.serving_block(results[0], _metrics(serve, results[0]), [percentile_name(p) for p in serve.percentiles]), file=out)
    else:
        print(_table(changes, results, settings.goals), file=out)
    if settings.goals:
        chosen, is_met = best(results, settings.goals)
        names = ", ".join(f"{name}={value}" for name, value in changes[chosen].items()) or "the settings as they are"
        print(f"{'Best that meets the goal' if is_met else 'Nothing meets the goal; closest'}: {names}", file=out)
    for index, result in enumerate(results):
        result["is_best"] = bool(settings.goals) and index == chosen
    result = results[0] if len(results) == 1 else {**results[chosen], "runs": results}
    path = save_result(with_metadata(result, serve.save.metadata), serve.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)


# ---------------------------------------------------------------------------------------------------- what goes in
def _read_input(settings: SimulateSettings, serve: ServeSettings) -> _Input:
    notes: list[str] = []
    if settings.from_recording is not None:
        recording = read_recording(settings.from_recording)
        known, trace = read_settings(recording.header), from_recording(recording)
        cost, host, error = fit(recording)
        notes.append(f"costs fitted to {settings.from_recording}: half of its steps within {error:.1%}")
        if known.scheduler.num_speculative_tokens:
            raise ConfigError("a recording with draft tokens cannot be simulated: whether one is right depends on the text")
        plan = Plan(known.scheduler, known.cache, known.num_kv_cache_blocks, cost, host)
        if settings.changes.get("block_size", known.cache.block_size) != known.cache.block_size:
            raise ConfigError("the block hashes of a recording are those of its block_size, which cannot be changed")
        return _Input(_finish(plan, settings), trace.arrivals, settings.from_recording, notes + trace.problems())
    step_cost, host = _costs(settings, notes)
    plan = _finish(_plan_of(serve.config, step_cost, host), settings)
    if settings.trace is not None:
        trace = read_trace(settings.trace, limit=settings.num_requests)
        return _Input(plan, trace.arrivals, Path(settings.trace).name, notes + trace.problems())
    requests = load_dataset(serve.dataset, FakeTokenizer(), vocab_size=FakeTokenizer.vocab_size)
    times = due_times(serve, requests)
    arrivals = [
        Arrival(
            index, due, request.prompt_len, request.max_tokens, block_hashes=block_hashes(request.prompt_token_ids, plan.cache.block_size)
        )
        for index, (request, due) in enumerate(zip(requests, times, strict=True))
    ]
    return _Input(plan, arrivals, serve.dataset.label, notes)


def _costs(settings: SimulateSettings, notes: list[str]) -> tuple[StepCost, HostCost]:
    if settings.cost is not None:
        cost, host, error = fit(read_recording(settings.cost))
        notes.append(f"costs fitted to {settings.cost}: half of its steps within {error:.1%}")
        return cost, host
    model, _, device = settings.roofline.partition(",")
    notes.append(f"costs from the roofline of {model} on {device}: an estimate that no run has confirmed")
    return roofline(model, device), HostCost(0.0005, 0.0001, 0.0005)


def _plan_of(config: EngineConfig, cost: StepCost, host: HostCost) -> Plan:
    info = make_model_info(max_position_embeddings=MAX_MODEL_LEN)
    resolved = config.resolve(info, cuda_available=config.device.startswith("cuda"), free_memory_bytes=1 << 34)
    return Plan(resolved.scheduler, resolved.cache, resolved.cache.num_kv_cache_blocks or _DEFAULT_NUM_BLOCKS, cost, host)


def _finish(plan: Plan, settings: SimulateSettings) -> Plan:
    return plan.with_settings({"replicas": settings.replicas, "speed": settings.speed, **settings.changes})


# ---------------------------------------------------------------------------------------------------- one run
def _simulate_one(
    settings: SimulateSettings, serve: ServeSettings, given: _Input, change: Mapping[str, Value], date: str
) -> dict[str, Any]:
    plan = given.plan.with_settings(change)
    num_requests = settings.num_requests or len(given.arrivals)
    arrivals: Iterable[Arrival] = repeat(given.arrivals, num_requests)
    if plan.speed != 1:
        arrivals = (dataclasses.replace(arrival, time=arrival.time / plan.speed) for arrival in arrivals)
    start = time.perf_counter()
    name = ", ".join(f"{key}={value}" for key, value in change.items())
    recorder = DetailedRecorder() if num_requests <= _MAX_DETAILED else RunningFigures(serve.slo_ms)
    with console.progress_bar(num_requests, description=f"simulating {name}".strip(), disable=serve.disable_progress) as bar:
        run, replicas = run_plan(plan, arrivals, recorder, routing=settings.routing, record=settings.record, on_arrival=bar.update)
    if isinstance(recorder, DetailedRecorder):
        end = max((record.end_time for record in recorder.records), default=0.0)
        result = make_result(serve, LoadResult(recorder.records, 0.0, end), num_requests=num_requests, date=date)
    else:
        summary = recorder.summary(percentiles=serve.percentiles, metrics=serve.metrics)
        result = make_result(serve, LoadResult([], 0.0, 0.0), num_requests=num_requests, date=date, summary=summary)
    return result | {
        "num_not_sent": 0,
        "backend": "aioengine-simulate",
        "endpoint_type": "aioengine-simulate",
        "benchmark": "simulate",
        "dataset_name": given.source,
        "num_preemptions": run.num_preemptions,
        "num_steps": run.num_steps,
        "prefix_cache_hits": sum(replica.scheduler.make_stats().prefix_cache_hits for replica in replicas),
        "prefix_cache_queries": sum(replica.scheduler.make_stats().prefix_cache_queries for replica in replicas),
        "simulated": {
            "scheduler": dataclasses.asdict(plan.scheduler),
            "block_size": plan.cache.block_size,
            "enable_prefix_caching": plan.cache.enable_prefix_caching,
            "num_kv_cache_blocks": plan.num_kv_cache_blocks,
            "replicas": plan.replicas,
            "routing": settings.routing,
            "speed": plan.speed,
            "cost": dataclasses.asdict(plan.cost),  # type: ignore[call-overload]
            "host": dataclasses.asdict(plan.host),
            "changes": dict(change),
        },
        "notes": given.notes,
        "simulation_s": time.perf_counter() - start,
        "engine": {},
        "environment": environment(),
    }


# ---------------------------------------------------------------------------------------------------- what comes out
def _metrics(serve: ServeSettings, result: Mapping[str, Any]) -> list[str]:
    return [name for name in serve.metrics if f"mean_{name}_ms" in result]


def _table(changes: Sequence[Mapping[str, Value]], results: Sequence[Mapping[str, Any]], goals: Sequence[Goal]) -> str:
    keys = ["median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", *(goal.key for goal in goals)]
    keys = [key for key in dict.fromkeys(keys) if key in results[0]]
    columns = [" ".join(changes[0]), "tok/s", "failed", "preemptions", *keys]
    rows = [
        [
            " ".join(str(value) for value in change.values()),
            console.number(result["output_throughput"], 1),
            str(result["failed"]),
            str(result["num_preemptions"]),
            *(console.number(result[key]) for key in keys),
        ]
        for change, result in zip(changes, results, strict=True)
    ]
    return console.table(columns, rows)
