"""What each benchmark is told. The options of the command line come from the fields.

Imports nothing heavy: the help must answer at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import ConfigError
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.metrics import METRICS, SLO_METRICS
from aioengine_bench.options import option
from aioengine_bench.specs import LOAD, METRIC, DatasetSpec, RemoteSpec, SamplingSpec, SaveOptions, WorkloadName, progress_option
from aioengine_bench.stops import Stops

_DEFAULT_FOLDER = "sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSettings:
    """stream: consume every output as it comes, as an online client does, in place of the final one only."""

    config: EngineConfig
    dataset: DatasetSpec
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    save: SaveOptions = field(default_factory=SaveOptions)
    num_runs: int = option(1, "runs, prefix cache reset before each; the median counts")
    num_warmups: int = option(1, "requests before the first run")
    stream: bool = option(False, "consume every output as it comes, not only the final ones")
    publish: PublishOptions = field(default_factory=PublishOptions)
    disable_progress: bool = progress_option()

    def __post_init__(self) -> None:
        for name, least in (("num_runs", 1), ("num_warmups", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySettings:
    config: EngineConfig
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    save: SaveOptions = field(default_factory=SaveOptions)
    input_len: int = option(32, "prompt tokens")
    output_len: int = option(128, "output tokens")
    batch_size: int = option(8, "requests of the batch")
    num_iters_warmup: int = option(10, "batches that do not count")
    num_iters: int = option(30, "batches that do")
    seed: int = option(0, "of the prompts and the sampling")
    publish: PublishOptions = field(default_factory=PublishOptions)
    disable_progress: bool = progress_option()

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters_warmup", 0), ("num_iters", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> limits in milliseconds. Raises ConfigError."""
    slo_ms: dict[str, float] = {}
    for item in items:
        name, separator, text = item.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not separator or name not in SLO_METRICS:
            raise ConfigError(f"goodput takes NAME:MILLISECONDS with one of {', '.join(SLO_METRICS)}, got {item!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"the limit of goodput's {name} must be a finite number >= 0, got {text!r}")
        slo_ms[name] = value
    return slo_ms


def parse_metrics(text: str) -> list[str]:
    """ "ttft,itl" -> names. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"unknown metric {name!r}; there are {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """ "50,99,99.9" -> numbers. Raises ConfigError."""
    try:
        values = [float(item) for item in text.split(",") if item.strip()]
    except ValueError as exc:
        raise ConfigError(f"percentiles must be numbers, got {text!r}") from exc
    for value in values:
        if not 0 <= value <= 100:
            raise ConfigError(f"a percentile is between 0 and 100, got {value}")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """slo_ms: limits in milliseconds by metric name, for goodput. num_warmups: requests sent before, not counted.

    remote: a server to measure; None: an engine in this process, with `config`. Of `config` a remote server takes the tokenizer alone.
    """

    config: EngineConfig
    dataset: DatasetSpec
    arrivals: ArrivalProcess = field(default_factory=ArrivalProcess)
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    save: SaveOptions = field(default_factory=SaveOptions)
    max_concurrency: int | None = option(None, "requests out at once; the others wait in the client", unset="no limit", group=LOAD)
    max_duration: float | None = option(
        None, "seconds after which the run ends, requests that are out aborted", metavar="S", unset="", group=LOAD
    )
    max_error_rate: float | None = option(
        None, "end the run when more than this share of ten or more requests failed", metavar="SHARE", unset="", group=LOAD
    )
    max_waiting: int | None = option(
        None, "end the run as over-saturated when more requests wait for their first token", unset="", group=LOAD
    )
    num_warmups: int = option(1, "requests before the load, not counted")
    metrics: Sequence[str] = option(
        METRICS, "which latencies", "--percentile-metrics", metavar="NAMES", type=str, convert=parse_metrics, group=METRIC
    )
    percentiles: Sequence[float] = option(
        (99.0,), "which percentiles of them", "--metric-percentiles", metavar="NUMBERS", type=str, convert=parse_percentiles, group=METRIC
    )
    slo_ms: Mapping[str, float] = option(
        {},
        "limits in ms on ttft, tpot, e2el: also report requests that keep all",
        "--goodput",
        metavar="NAME:MS",
        nargs="+",
        convert=parse_goodput,
        group=METRIC,
    )
    publish: PublishOptions = field(default_factory=PublishOptions)
    disable_progress: bool = progress_option()
    request_id_prefix: str = option("bench-", "of the request ids", metavar="TEXT")
    requests_jsonl: str | None = option(
        None, "also write one JSON line a request: lengths asked and got, finish reason, error, times", metavar="FILE", unset=""
    )
    remote: RemoteSpec | None = None

    @property
    def stops(self) -> Stops:
        return Stops(max_duration=self.max_duration, max_error_rate=self.max_error_rate, max_waiting=self.max_waiting)

    @property
    def backend(self) -> str:
        return "aioengine" if self.remote is None else self.remote.backend

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if self.max_duration is not None and not (math.isfinite(self.max_duration) and self.max_duration > 0):
            raise ConfigError(f"max_duration must be above 0 seconds, got {self.max_duration}")
        if self.max_error_rate is not None and not 0 <= self.max_error_rate < 1:
            raise ConfigError(f"max_error_rate must be a share from 0 to below 1, got {self.max_error_rate}")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be at least 1, got {self.max_waiting}")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups must be at least 0, got {self.num_warmups}")


def parse_serve_params(text: str) -> list[dict[str, Any]]:
    """A JSON list of objects, or a file that holds one. Raises ConfigError."""
    import orjson

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


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine: a rate, or so many requests out at once."""

    request_rate: float = math.inf
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        parts = [] if math.isinf(self.request_rate) else [f"rate={self.request_rate:.4g}"]
        parts += [] if self.max_concurrency is None else [f"concurrency={self.max_concurrency}"]
        return ",".join(parts) or "all-at-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """serve_params: engine settings, each a combination of its own; an empty one is the base configuration."""

    base: ServeSettings
    request_rates: Sequence[float] = option((), "one run a rate", unset="")
    max_concurrencies: Sequence[int] = option((), "one run a number of requests out at once", unset="")
    find_saturation: bool = option(False, "one after the other, all at once, then rates in between and just beyond")
    serve_params: Sequence[Mapping[str, Any]] = option(
        [{}],
        "a list of engine settings (or a file with it): each combines with each load",
        metavar="JSON",
        type=str,
        convert=parse_serve_params,
    )
    num_runs: int = option(3, "repeats of each combination; the median is reported")
    resume: bool = option(False, "leave out the runs that --result-dir has, made with the same settings, code and machine")
    dry_run: bool = option(False, "only list the combinations")

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ConfigError(f"num_runs must be at least 1, got {self.num_runs}")
        base_rate, base_limit = self.base.arrivals.request_rate, self.base.max_concurrency
        chosen = {
            "--request-rates": bool(self.request_rates),
            "--max-concurrencies": bool(self.max_concurrencies),
            "--request-rate": math.isfinite(base_rate),
            "--max-concurrency": base_limit is not None,
        }
        if self.find_saturation and any(chosen.values()):
            given = ", ".join(name for name, is_given in chosen.items() if is_given)
            raise ConfigError(f"--find-saturation chooses the loads itself: leave out {given}")
        if self.request_rates and math.isfinite(base_rate):
            raise ConfigError(f"--request-rates and --request-rate ({base_rate:g}) say the same thing twice: give one of them")
        if self.max_concurrencies and base_limit is not None:
            raise ConfigError(f"--max-concurrencies and --max-concurrency ({base_limit}) say the same thing twice: give one of them")
        for rate in self.request_rates:
            ArrivalProcess(request_rate=rate)
        for limit in self.max_concurrencies:
            dataclasses.replace(self.base, max_concurrency=limit)  # which checks it
        if self.base.arrivals.ramp_up is not None:
            raise ConfigError("a sweep takes rates or concurrencies, not a ramp-up")
        if self.base.publish.record is not None and len(self.serve_params) > 1:
            raise ConfigError(f"--record {self.base.publish.record}: each of the {len(self.serve_params)} engines would begin it anew")
        if self.base.save.append:
            raise ConfigError("--append-result: a sweep writes one file a run and a summary, to which nothing is added")

    @property
    def folder(self) -> Path:
        return Path(self.base.save.folder or _DEFAULT_FOLDER)

    def loads(self) -> list[Load]:
        """The loads that are known before anything has run."""
        if self.find_saturation:
            return [Load(max_concurrency=1), Load()]
        rate, limit = self.base.arrivals.request_rate, self.base.max_concurrency
        given = [Load(one, limit) for one in self.request_rates] + [Load(rate, one) for one in self.max_concurrencies]
        return given or [Load(rate, limit)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSettings:
    """forward_ms: how long the pretended forward of the overlap comparison takes."""

    save: SaveOptions = field(default_factory=SaveOptions)
    num_reqs: Sequence[int] = option((1, 32, 256, 1024), "running requests")
    num_steps: int = option(100, "steps to measure in each case")
    forward_ms: float = option(5.0, "pretended forward of the overlap comparison")
    disable_progress: bool = progress_option()

    def __post_init__(self) -> None:
        if not self.num_reqs or min(self.num_reqs) < 1:
            raise ConfigError(f"num_reqs must be numbers from 1, got {list(self.num_reqs)}")
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {self.num_steps}")
        if not (math.isfinite(self.forward_ms) and self.forward_ms >= 0):
            raise ConfigError(f"forward_ms must be a finite number >= 0, got {self.forward_ms}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """min_time: seconds that each variant is repeated for."""

    save: SaveOptions = field(default_factory=SaveOptions)
    ops: Sequence[str] = option((), "only this op; may be repeated", "--op", metavar="NAME", unset="all", action="append")
    num_tokens: Sequence[int] = option((1, 8, 32, 256), "rows of a step")
    min_time: float = option(0.1, "seconds to repeat each call for", metavar="S")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to run")
    threads: int | None = option(None, "CPU threads", unset="all cores")
    roofline: bool = option(False, "the native products as shares of what this CPU multiplies and reads at most, measured here")
    compile_report: bool = option(False, "compile the Triton kernels ahead of time and report what came out")
    targets: Sequence[str] = option(
        (), "for --compile-report: sm_80, sm_86 or sm_90", "--target", metavar="SM", unset="sm_80 and sm_90", action="append"
    )

    def __post_init__(self) -> None:
        if not self.num_tokens or min(self.num_tokens) < 1:
            raise ConfigError(f"num_tokens must be numbers from 1, got {list(self.num_tokens)}")
        if not (math.isfinite(self.min_time) and self.min_time > 0):
            raise ConfigError(f"min_time must be above 0 seconds, got {self.min_time}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    model: str
    save: SaveOptions = field(default_factory=SaveOptions)
    engines: Sequence[str] = option(
        (), "which, NAME or NAME:OPTION=VALUE,...", metavar="NAME", nargs="+", unset="aioengine and all that are set up"
    )
    all_settings: bool = option(False, "every setting of each engine that is named without one: a row a setting, the best of each marked")
    list_engines: bool = option(False, "name the engines, their settings, what each needs, and which are set up", "--list")
    setup: Sequence[str] = option((), "make the environments of these engines, each its own", metavar="NAME", nargs="+", unset="")
    checkout: str | None = option(None, "for --setup: the source that ik_llama.cpp is built from", metavar="DIR", unset="")
    tables: Sequence[str] = option(
        (), "one table of earlier results of compare, a column a workload", "--table", metavar="FILE", nargs="+", unset=""
    )
    peers_dir: str | None = option(None, "where the environments are", metavar="DIR", unset="peers in aioengine's cache folder")
    workload: WorkloadName = option("mixed", "the work")
    num_runs: int = option(3, "turns of each engine: A B A B ...")
    max_requests: int | None = option(None, "only the first N requests of the workload", unset="all")
    reference: str | None = option(
        None, "the engine whose greedy tokens the others are held against", metavar="NAME", unset="the first in float32"
    )
    markdown: bool = option(False, "print the table as Markdown")
    picture: str | None = option(None, "write the picture as SVG", metavar="FILE")
    host_cost: bool = option(False, "measure schedule() and update_from_output() beside vLLM's scheduler instead")
    num_reqs: Sequence[int] = option((32, 256, 1024), "for --host-cost")
    num_steps: int = option(200, "for --host-cost: steps measured a turn")

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ConfigError(f"num_runs must be at least 1, got {self.num_runs}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ConfigError(f"max_requests must be at least 1, got {self.max_requests}")

    @property
    def folder(self) -> Path:
        from aioengine.checkpoint.cache import cache_folder

        return Path(self.peers_dir) if self.peers_dir else cache_folder() / "peers"


@dataclass(frozen=True, slots=True)
class DiffSettings:
    before: str
    after: str
    fail_if: Sequence[str] = option(
        (), "exit with status 1 if NAME changed so: output_throughput<-5%%, p99_ttft_ms>+20; may be repeated", "--fail-if",
        metavar="CHANGE", unset="", action="append",
    )  # fmt: skip
    other_work: bool = option(False, "compare results of different work (model, dataset, rate) too")
    json: bool = option(False, "one line of JSON in place of the table")


@dataclass(frozen=True, slots=True)
class ReportSettings:
    inputs: Sequence[str]
    output: str = option("report.html", 'the page; "-" is stdout', "--output", "-o", metavar="FILE")
    title: str = option("aioengine benchmark report", "its heading", metavar="TEXT", unset="")
