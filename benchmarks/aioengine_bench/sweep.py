"""`aioengine bench sweep`: the same requests at many loads, on engines with different settings, several times each.

One engine serves all loads of a combination of settings; its prefix cache is reset before every run. Each run is a file
of its own in the result folder, so that an interrupted sweep goes on with `--resume` where it stopped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import ConfigError
from aioengine_bench import console
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import EngineClient
from aioengine_bench.datasets import BenchRequest, load_dataset
from aioengine_bench.host import Host
from aioengine_bench.report import Input, make_page
from aioengine_bench.results import environment, read_results, save_result, timestamp, with_metadata
from aioengine_bench.serve import ServeSettings, engine_settings, make_result, run_load, warm_up

_NUM_SATURATION_RATES = 6
_DEFAULT_FOLDER = "sweep"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine: a rate, or so many requests out at once."""

    request_rate: float = math.inf
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        if self.max_concurrency is not None:
            return f"concurrency={self.max_concurrency}"
        return "all-at-once" if math.isinf(self.request_rate) else f"rate={self.request_rate:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """serve_params: engine settings, each a combination of its own; an empty one is the base configuration."""

    base: ServeSettings
    request_rates: Sequence[float] = ()
    max_concurrencies: Sequence[int] = ()
    find_saturation: bool = False
    serve_params: Sequence[Mapping[str, Any]] = field(default_factory=lambda: [{}])
    num_runs: int = 3
    resume: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ConfigError(f"num_runs must be at least 1, got {self.num_runs}")
        if self.find_saturation and (self.request_rates or self.max_concurrencies):
            raise ConfigError("--find-saturation chooses the loads itself: leave out --request-rates and --max-concurrencies")
        for rate in self.request_rates:
            ArrivalProcess(request_rate=rate)
        if self.base.arrivals.ramp_up is not None:
            raise ConfigError("a sweep takes rates or concurrencies, not a ramp-up")

    @property
    def folder(self) -> Path:
        return Path(self.base.save.folder or _DEFAULT_FOLDER)

    def loads(self) -> list[Load]:
        """The loads that are known before anything has run."""
        if self.find_saturation:
            return [Load(max_concurrency=1), Load()]
        given = [Load(request_rate=rate) for rate in self.request_rates] + [Load(max_concurrency=n) for n in self.max_concurrencies]
        return given or [Load(self.base.arrivals.request_rate, self.base.max_concurrency)]


def parse_serve_params(text: str | None) -> list[dict[str, Any]]:
    """A JSON list of objects, or a file that holds one; None: the base settings alone. Raises ConfigError."""
    if text is None:
        return [{}]
    content: str | bytes = text
    if not text.lstrip().startswith(("[", "{")):
        try:
            content = Path(text).read_bytes()
        except OSError as exc:
            raise ConfigError(f"cannot read {text}: {exc.strerror}") from exc
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"--serve-params is not JSON: {exc}") from exc
    params = [value] if isinstance(value, dict) else value
    if not isinstance(params, list) or not params or not all(isinstance(one, dict) for one in params):
        raise ConfigError('--serve-params must be a JSON list of objects such as [{"max_num_seqs": 8}]')
    for one in params:
        EngineConfig.from_options("smollm2", one)  # names and values are checked before anything runs
    return params


def run_name(params: Mapping[str, Any], load: Load, run: int) -> str:
    """The file of a run: told apart by everything that tells runs apart."""
    parts = [f"{key}={value}" for key, value in sorted(params.items())]
    return "_".join(["sweep", *parts, load.label, f"run{run}"]).replace("/", "-") + ".json"


def saturation_rates(sequential_rate: float, capacity: float) -> list[float]:
    """Rates from what one request after the other reaches to a tenth beyond what the engine reached under full load."""
    low, high = min(sequential_rate, capacity), capacity * 1.1
    step = (high - low) / (_NUM_SATURATION_RATES - 1)
    return [low + step * index for index in range(_NUM_SATURATION_RATES)]


def median_result(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the repeats of one combination the one in the middle by output throughput, whole."""
    ordered = sorted(results, key=lambda result: result["output_throughput"] or 0.0)
    return ordered[(len(ordered) - 1) // 2]


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
        await warm_up(EngineClient(engine, base.sampling), requests, base.num_warmups)
        for load in self.settings.loads():
            await self._run_load(engine, params, load, requests)
        if self.settings.find_saturation and not self.interrupted:
            key = _params_label(params)
            known = [median_result(self.results[key, load.label]) for load in self.settings.loads()]
            sequential, capacity = (result["request_throughput"] or 0.0 for result in known)
            if capacity > 0:
                for rate in saturation_rates(sequential, capacity):
                    await self._run_load(engine, params, Load(request_rate=rate), requests)

    async def _run_load(self, engine: AsyncEngine, params: Mapping[str, Any], load: Load, requests: Sequence[BenchRequest]) -> None:
        repeats = self.results.setdefault((_params_label(params), load.label), [])
        for run in range(1, self.settings.num_runs + 1):
            if self.interrupted:
                return
            name = run_name(params, load, run)
            done = self._finished_result(name)
            repeats.append(done if done is not None else await self._run_once(engine, params, load, requests, name, seed=run))

    def _finished_result(self, name: str) -> dict[str, Any] | None:
        path = self.settings.folder / name
        if not self.settings.resume or not path.exists():
            return None
        (result, *_) = read_results(path)
        return None if result.get("interrupted") else result

    async def _run_once(
        self, engine: AsyncEngine, params: Mapping[str, Any], load: Load, requests: Sequence[BenchRequest], name: str, *, seed: int
    ) -> dict[str, Any]:
        base = self.settings.base
        arrivals = ArrivalProcess(request_rate=load.request_rate, burstiness=base.arrivals.burstiness)
        # Another seed a run: repeats of one arrival pattern would not show what the pattern does.
        settings = dataclasses.replace(
            base,
            arrivals=arrivals,
            max_concurrency=load.max_concurrency,
            dataset=dataclasses.replace(base.dataset, seed=base.dataset.seed + seed),
            save=dataclasses.replace(base.save, save=True, folder=str(self.settings.folder), filename=name, output_json=None),
        )
        engine.reset_prefix_cache()
        outcome = await run_load(settings, EngineClient(engine, base.sampling), requests)
        self.interrupted = outcome.interrupted
        result = make_result(settings, outcome, model_id=base.config.model, date=timestamp(), rps_changes=[]) | {
            "serve_params": dict(params),
            "engine": engine_settings(engine),
            "environment": environment(),
        }
        save_result(with_metadata(result, base.save.metadata), settings.save, default_name=name)
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
    state = Sweep(settings)
    await state.run(host)
    medians = state.medians()
    print(_table(medians), file=out)
    result = {
        "date": date,
        "benchmark": "sweep",
        "model_id": settings.base.config.model,
        "dataset_name": settings.base.dataset.label,
        "num_runs": settings.num_runs,
        "interrupted": state.interrupted,
        "rows": [{"settings": params, "load": load, **_row(one)} for params, load, one in medians],
        "environment": environment(),
    }
    save = dataclasses.replace(settings.base.save, save=True, folder=str(settings.folder), filename="summary.json")
    path = save_result(with_metadata(result, settings.base.save.metadata), save, default_name="summary.json")
    page = settings.folder / "report.html"
    page.write_text(make_page([Input("sweep", [one for _, _, one in medians])], title="aioengine sweep"), encoding="utf-8")
    print(f"Saved to {path} and {page}", file=out)
    return state.interrupted


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
    return {key: result.get(key) for key in _ROW_KEYS} | {"tokens_per_s_per_user": 1000 / tpot if tpot else None}


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
        rows.append([params, load + star, *(console.number(row[key]) for key in (*_ROW_KEYS, "tokens_per_s_per_user"))])
    return (
        console.table(columns, rows)
        + "\n* none is better in both tokens a second in all and for each user; latencies in ms, medians of the runs"
    )


def _pareto_point(result: Mapping[str, Any]) -> tuple[float, float] | None:
    tpot, throughput = result.get("median_tpot_ms"), result.get("output_throughput")
    return (1000 / tpot, throughput) if tpot and throughput else None
