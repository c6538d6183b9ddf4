"""`aioengine bench sweep`: the same requests at many loads, on engines with different settings, several times each.

One engine serves all loads of a combination of settings; its prefix cache is reset before every run. Each run is a file
of its own in the result folder, so that an interrupted sweep goes on with `--resume` where it stopped. A file says what it
was made from (`identity.py`); it is taken for no other run, and no other run overwrites it.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import ConfigError
from aioengine_bench import console
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import EngineClient
from aioengine_bench.datasets import BenchRequest, check_lengths, load_dataset
from aioengine_bench.files import check_writable, write_file
from aioengine_bench.host import Host
from aioengine_bench.identity import identity_hash, run_identity
from aioengine_bench.metrics import median_run
from aioengine_bench.report import Input, make_page
from aioengine_bench.results import check_saving, environment, file_name, read_results, save_result, timestamp, with_metadata
from aioengine_bench.serve import check_some_completed, make_result, result_keys, run_load, warm_up
from aioengine_bench.settings import Load, ServeSettings, SweepSettings
from aioengine_bench.specs import SaveOptions
from aioengine_bench.target import engine_settings

_NUM_SATURATION_RATES = 6
# A run of finite length ends with requests that are still being answered: the rate it reaches is a little below what was offered.
_KEPT_UP_SHARE = 0.9
_SUMMARY_KEYS = ("date", "benchmark", "model_id", "dataset_name", "num_runs", "interrupted", "rows", "saturation", "environment")
_SUMMARY = "summary.json"


def run_name(params: Mapping[str, Any], load: Load, run: int, identity: str) -> str:
    """The file of a run. What a person looks for comes first; `identity` tells apart whatever else can differ."""
    parts = [f"{key}={value}" for key, value in sorted(params.items())]
    return file_name(["_".join(["sweep", *parts, load.label, f"run{run}"])], identity)


def saturation_rates(sequential_rate: float, capacity: float) -> list[float]:
    """Rates from what one request after the other reaches to a tenth beyond what the engine reached under full load."""
    low, high = min(sequential_rate, capacity), capacity * 1.1
    step = (high - low) / (_NUM_SATURATION_RATES - 1)
    return [low + step * index for index in range(_NUM_SATURATION_RATES)]


def median_result(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the repeats of one combination the median by output throughput; interrupted ones count if there are no others."""
    complete = [result for result in results if not result.get("interrupted")]
    return median_run(complete or results, "output_throughput")


def saturation_point(medians: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest offered rate that the engine kept up with: it completed nearly as many requests a second. None: at no rate."""
    kept = [
        result
        for result in medians
        if isinstance(result["request_rate"], (int, float))
        and (result["request_throughput"] or 0.0) >= _KEPT_UP_SHARE * result["request_rate"]
    ]
    best = max(kept, key=lambda result: float(result["request_rate"]), default=None)
    return None if best is None else {key: best[key] for key in ("request_rate", "request_throughput", "output_throughput")}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, by the first one."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


class Sweep:
    """One sweep as it runs: what has been measured, and where it goes."""

    def __init__(self, settings: SweepSettings) -> None:
        self.settings = settings
        self.results: dict[tuple[str, str], list[dict[str, Any]]] = {}  # (settings, load) -> the repeats
        self.saturation: dict[str, dict[str, Any] | None] = {}  # by settings, where it was looked for
        self.interrupted = False

    async def run(self, host: Host) -> None:
        """Everything, until it is done or interrupted."""
        for params in self.settings.serve_params:
            config = dataclasses.replace(self.settings.base.config, **params)
            async with host.started_engine(config, self.settings.base.publish) as engine:
                await self._run_engine(engine, params)
            if self.interrupted:
                return

    async def _run_engine(self, engine: AsyncEngine, params: Mapping[str, Any]) -> None:
        base = self.settings.base
        requests = load_dataset(base.dataset, engine.tokenizer, vocab_size=engine.model_info.vocab_size)
        check_lengths(requests, engine.resolved_config.scheduler.max_model_len)
        for load in self.settings.loads():
            await self._run_load(engine, params, load, requests)
        if self.settings.find_saturation and not self.interrupted:
            key = _params_label(params)
            known = [median_result(self.results[key, load.label]) for load in self.settings.loads()]
            sequential, capacity = (result["request_throughput"] or 0.0 for result in known)
            if capacity > 0:
                for rate in saturation_rates(sequential, capacity):
                    await self._run_load(engine, params, Load(request_rate=rate), requests)
                self.saturation[key] = saturation_point([one for params_, _, one in self.medians() if params_ == key])

    async def _run_load(self, engine: AsyncEngine, params: Mapping[str, Any], load: Load, requests: Sequence[BenchRequest]) -> None:
        repeats = self.results.setdefault((_params_label(params), load.label), [])
        is_warm = False
        for run in range(1, self.settings.num_runs + 1):
            if self.interrupted:
                return
            settings = self._run_settings(params, load, seed=run)
            made_from = run_identity(settings, seed=run)
            name = run_name(params, load, run, identity_hash(made_from))
            result = self._finished_result(name, made_from)
            if result is None:
                if not is_warm:
                    await warm_up(EngineClient(engine, settings.sampling), requests, settings.num_warmups)
                    is_warm = True
                result = await self._run_once(engine, params, settings, requests, made_from, name)
            repeats.append(result)

    def _run_settings(self, params: Mapping[str, Any], load: Load, *, seed: int) -> ServeSettings:
        """What one run is: the base settings with its load. Another seed a run: repeats of one arrival pattern would not show
        what the pattern does.
        """
        base = self.settings.base
        return dataclasses.replace(
            base,
            config=dataclasses.replace(base.config, **params),
            arrivals=ArrivalProcess(request_rate=load.request_rate, burstiness=base.arrivals.burstiness),
            max_concurrency=load.max_concurrency,
            dataset=dataclasses.replace(base.dataset, seed=base.dataset.seed + seed),
            save=dataclasses.replace(base.save, save=True, folder=str(self.settings.folder), filename=None, output_json=None),
        )

    def _finished_result(self, name: str, made_from: Mapping[str, Any]) -> dict[str, Any] | None:
        """The latest complete result of exactly this run, if the sweep is resumed and there is one."""
        if not self.settings.resume:
            return None
        stem = name.removesuffix(".json")
        for path in sorted(self.settings.folder.glob(f"{glob.escape(stem)}*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                result = read_results(path)[0]
            except ConfigError:  # made by a run that was killed: empty
                continue
            if result.get("made_from") == made_from and not result.get("interrupted"):
                return result
        return None

    async def _run_once(
        self,
        engine: AsyncEngine,
        params: Mapping[str, Any],
        settings: ServeSettings,
        requests: Sequence[BenchRequest],
        made_from: dict[str, Any],
        name: str,
    ) -> dict[str, Any]:
        engine.reset_prefix_cache()
        outcome = await run_load(settings, EngineClient(engine, settings.sampling), requests)
        self.interrupted = outcome.interrupted
        result = make_result(settings, outcome, num_requests=len(requests), date=timestamp()) | {
            "serve_params": dict(params),
            "made_from": made_from,
            "engine": engine_settings(engine),
            "environment": environment(),
        }
        save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=name)
        return result

    def medians(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(settings, load, median result) of every combination that has run."""
        return [(params, load, median_result(repeats)) for (params, load), repeats in self.results.items() if repeats]


def _params_label(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(params.items())) or "default"


async def sweep(settings: SweepSettings, host: Host) -> bool:
    """Run, print, save. True if it was interrupted: what has run is saved, and `resume` goes on. Raises ConfigError."""
    out = console.output_stream(stdout_is_taken=settings.base.save.claims_stdout)
    if settings.dry_run:
        for params in settings.serve_params:
            for load in settings.loads():
                print(f"{_params_label(params)}; {load.label}; {settings.num_runs} runs", file=out)
        if settings.find_saturation:
            print(f"then {_NUM_SATURATION_RATES} rates between the two, for each setting", file=out)
        return False
    date = timestamp()
    save = _summary_options(settings)
    check_saving(save, _SUMMARY_KEYS, default_name=_SUMMARY)
    check_saving(
        dataclasses.replace(save, output_json=None), [*result_keys(settings.base), "serve_params", "made_from"], default_name=_SUMMARY
    )
    page = settings.folder / "report.html"
    check_writable(page)
    state = Sweep(settings)
    await state.run(host)
    medians = state.medians()
    print(_table(medians), file=out)
    for label, point in state.saturation.items():
        print(_saturation_line(label, point), file=out)
    result = {
        "date": date,
        "benchmark": "sweep",
        "model_id": settings.base.config.model,
        "dataset_name": settings.base.dataset.label,
        "num_runs": settings.num_runs,
        "interrupted": state.interrupted,
        "rows": [{"settings": params, "load": load, **_row(one)} for params, load, one in medians],
        "saturation": state.saturation,
        "environment": environment(),
    }
    path = save_result(with_metadata(result, save.metadata), save, default_name=_SUMMARY)
    write_file(page, make_page([Input("sweep", [one for _, _, one in medians])], title="aioengine sweep").encode())
    print(f"Saved to {path} and {page}", file=out)
    if state.interrupted:
        print("Interrupted: --resume goes on with the runs that are missing.", file=out)
    for label, load_label, one in medians:
        check_some_completed(one, f"{label}, {load_label}")
    return state.interrupted


def _summary_options(settings: SweepSettings) -> SaveOptions:
    """The summary is written anew each time, from files that are all kept."""
    save = settings.base.save
    return dataclasses.replace(save, save=True, folder=str(settings.folder), filename=save.filename or _SUMMARY)


def _saturation_line(params: str, point: Mapping[str, Any] | None) -> str:
    if point is None:
        return f"Saturation ({params}): below the lowest rate that was tried"
    offered, reached = (console.number(point[key]) for key in ("request_rate", "request_throughput"))
    tokens = console.number(point["output_throughput"], 1)
    return f"Saturation ({params}): the engine kept up with {offered} requests/s ({reached} completed, {tokens} tok/s), and with none above"


_ROW_KEYS = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_e2el_ms",
    "request_goodput",
    "completed",
    "failed",
)


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    tpot = result.get("median_tpot_ms")
    figures = {key: result.get(key) for key in _ROW_KEYS}
    return figures | {"tokens_per_s_per_user": 1000 / tpot if tpot else None, "interrupted": result.get("interrupted", False)}


def _table(medians: Sequence[tuple[str, str, dict[str, Any]]]) -> str:
    columns = [
        "settings",
        "load",
        "req/s",
        "tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "E2EL p50",
        "goodput",
        "done",
        "failed",
        "tok/s/user",
    ]
    points = {(params, load): _pareto_point(result) for params, load, result in medians}
    front = set(pareto_front([point for point in points.values() if point is not None]))
    rows = []
    for params, load, result in medians:
        row = _row(result)
        star = " *" if points[params, load] in front else ""
        cut = " (interrupted)" if row["interrupted"] else ""
        rows.append([params, load + star + cut, *(console.number(row[key]) for key in (*_ROW_KEYS, "tokens_per_s_per_user"))])
    return (
        console.table(columns, rows)
        + "\n* none is better in both tokens a second in all and for each user; latencies in ms, medians of the runs"
    )


def _pareto_point(result: Mapping[str, Any]) -> tuple[float, float] | None:
    tpot, throughput = result.get("median_tpot_ms"), result.get("output_throughput")
    return (1000 / tpot, throughput) if tpot and throughput else None
