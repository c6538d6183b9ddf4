"""`aioengine bench report`: result files and recordings become one HTML page that needs nothing else.

Everything is inline: SVG and a few rules of style, no script, no address. It can be mailed, archived and diffed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from aioengine import __version__
from aioengine.errors import ConfigError
from aioengine.events.recording.reader import Recording, read_recording
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.events.wire import WireError
from aioengine_bench import console, svg
from aioengine_bench.files import write_file
from aioengine_bench.results import read_results
from aioengine_bench.settings import ReportSettings

_MAX_TIMELINE_STEPS = 40

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --grid: #d8d8d8; --soft: #666666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181b; --grid: #3a3d42; --soft: #a0a0a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 1320px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 18px; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-family: inherit; }
.title { font-size: 14px; font-weight: 600; text-anchor: middle; } .tick { font-size: 11px; } .label { font-size: 12px; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--ink); stroke-width: 1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; max-width: 100%; }
td, th { padding: 3px 7px; text-align: right; vertical-align: top; border-bottom: 1px solid var(--grid); }
td.text { min-width: 8em; overflow-wrap: anywhere; } td.number { white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
.soft { color: var(--soft); font-size: 13px; }
"""


@dataclass(frozen=True, slots=True)
class Input:
    """One file: results of one kind of benchmark, or a recording."""

    name: str
    results: list[dict[str, Any]]
    recording: Recording | None = None


def report(settings: ReportSettings) -> None:
    """Write the page. Raises ConfigError for a file that is neither results nor a recording."""
    page = make_page([read_input(path) for path in settings.inputs], title=settings.title)
    if settings.output == "-":
        sys.stdout.write(page)
        return
    path = Path(settings.output)
    write_file(path, page.encode(errors="backslashreplace"))
    print(f"Wrote {path} ({len(page) / 1024:.0f} KiB)")


def read_input(path: str) -> Input:
    """A recording says so in its first line; anything else must be results."""
    results = read_results(path)
    if results[0].get("type") != "header":
        for index, result in enumerate(results):
            _check_figures(result, f"{path}, result {index + 1}")
        return Input(Path(path).name, results)
    try:
        return Input(Path(path).name, [], read_recording(path))
    except WireError as exc:
        raise ConfigError(str(exc)) from exc


def _check_figures(result: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a figure of another kind than it is drawn as."""
    rows = result.get("rows", [])
    if not isinstance(rows, list) or not isinstance(result.get("environment", {}), dict):
        raise ConfigError(f"{where}: `rows` must be a list and `environment` an object")
    for key in (key for key in result if key in _FIGURES or key.endswith("_us")):
        if not _is_number(result[key]) and result[key] is not None:
            raise ConfigError(f"{where}: {key} must be a number, got {result[key]!r}")
    if not _is_number(rate := result.get("request_rate")) and rate not in (None, "inf"):
        raise ConfigError(f'{where}: request_rate must be a number or "inf", got {rate!r}')
    for key in _LISTS:
        values = result.get(key, [])
        if not isinstance(values, list):
            raise ConfigError(f"{where}: {key} must be a list, got {values!r}")
        for value in values:
            numbers = value if isinstance(value, list) else [value]
            if isinstance(value, list) != (key == "itls") or not all(_is_number(one) or one is None for one in numbers):
                raise ConfigError(f"{where}: {key} must hold numbers, got {value!r}")
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            _check_figures({**row, "rows": []}, f"{where}, row {number}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def make_page(inputs: Sequence[Input], *, title: str) -> str:
    """The whole page as text."""
    results = [result for one in inputs for result in one.results]
    sections = [
        _serving_section([result for result in results if result.get("benchmark") == "serve"]),
        _table_section("Throughput", [r for r in results if r.get("benchmark") == "throughput"], _THROUGHPUT_COLUMNS),
        _table_section("Latency of one batch", [r for r in results if r.get("benchmark") == "latency"], _LATENCY_COLUMNS),
        *(_rows_section(result) for result in results if isinstance(result.get("rows"), list)),
        *(_recording_section(one.name, one.recording) for one in inputs if one.recording is not None),
        _environment_section(results),
    ]
    body = "\n".join(section for section in sections if section)
    sources = escape(", ".join(one.name for one in inputs))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n'
        f'<p class="soft">aioengine {escape(__version__)}; made from {sources}</p>\n{body}\n</body></html>\n'
    )


# ---------------------------------------------------------------------------------------------------- tables
_SERVING_COLUMNS = {
    "request_rate": "rate",
    "max_concurrency": "concurrency",
    "completed": "completed",
    "failed": "failed",
    "aborted": "aborted",
    "duration": "duration s",
    "request_throughput": "req/s",
    "request_goodput": "goodput req/s",
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT p50 ms",
    "median_itl_ms": "ITL p50 ms",
    "p99_itl_ms": "ITL p99 ms",
    "median_e2el_ms": "E2EL p50 ms",
}
_THROUGHPUT_COLUMNS = {
    "dataset_name": "dataset",
    "num_requests": "requests",
    "failed": "failed",
    "elapsed_time": "elapsed s",
    "requests_per_second": "req/s",
    "output_tokens_per_second": "output tok/s",
    "tokens_per_second": "total tok/s",
}
_LATENCY_COLUMNS = {
    "batch_size": "batch",
    "input_len": "input",
    "output_len": "output",
    "avg_latency": "mean s",
    "std_latency": "std s",
}


_FIGURES = {*_SERVING_COLUMNS, *_THROUGHPUT_COLUMNS, *_LATENCY_COLUMNS, "num_reqs", "forward_ms"} - {"dataset_name", "request_rate"}
_LISTS = ("ttfts", "itls", "latencies")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return console.number(value)


def _kind(value: Any) -> str:
    """Text may be broken to fit the page; a figure, or the place of one, is not."""
    return "text" if isinstance(value, str) and len(value) > 8 else "number"


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ["<tr>" + "".join(f'<td class="{_kind(value)}">{escape(_cell(value))}</td>' for value in row) + "</tr>" for row in rows]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _table_section(title: str, results: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    if not results:
        return ""
    rows = [[_name(result), *(result.get(key) for key in columns)] for result in results]
    return f"<h2>{escape(title)}</h2>" + _html_table(["run", *columns.values()], rows)


def _rows_section(result: dict[str, Any]) -> str:
    """Benchmarks that are a table already: overhead, kernels, compare, host cost."""
    rows = [row for row in result["rows"] if isinstance(row, dict)]
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (list, dict))))
    title = str(result.get("benchmark", "results")).capitalize()
    charts = "".join(_picture(result, rows))
    return (
        f"<h2>{escape(title)}</h2>"
        + (f'<div class="charts">{charts}</div>' if charts else "")
        + _html_table(columns, [[row.get(column) for column in columns] for row in rows])
    )


def _picture(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    match result.get("benchmark"):
        case "overhead":
            plain = [row for row in rows if row.get("mode") == "decode" and row.get("watcher") == "nobody"]
            plain = [row for row in plain if not row.get("with_consumers") and not row.get("forward_ms")]
            names = ("schedule", "update", "output", "publish", "total")
            series = [svg.Series(name, _points(plain, "num_reqs", f"{name}_us")) for name in names]
            yield svg.line_chart("Engine cost of a decode step", series, x_label="running requests", y_label="microseconds")
        case "host-cost":
            engines = dict.fromkeys(str(row.get("engine")) for row in rows)
            series = [svg.Series(name, _points([r for r in rows if r.get("engine") == name], "num_reqs", "min_us")) for name in engines]
            yield svg.line_chart("schedule() + update_from_output()", series, x_label="running requests", y_label="microseconds a step")
        case "compare":
            known = [row for row in rows if row.get("output_throughput") is not None]
            bars = [(f"{row.get('engine')} ({row.get('precision')})", row["output_throughput"]) for row in known]
            yield svg.bar_chart("Output tokens a second", bars, x_label="higher is better")


def _points(rows: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[float, float]]:
    """Of the rows that have both figures."""
    return [(row[x], row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]


def _name(result: dict[str, Any]) -> str:
    parts = [result.get("label") or result.get("model_id") or "", result.get("date") or ""]
    return " ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------------------------------------------- serving
def _serving_section(results: Sequence[dict[str, Any]]) -> str:
    if not results:
        return ""
    groups = _by_settings(results)
    charts = list(_load_charts(groups))
    detailed = [(name, result) for name, of in groups.items() for result in of if result.get("ttfts")][:7]
    if detailed:
        names = [_load(result) if len(groups) == 1 else f"{name}: {_load(result)}" for name, result in detailed]
        ttfts = [(name, [x * 1000 for x in r["ttfts"] if x is not None]) for name, (_, r) in zip(names, detailed, strict=True)]
        itls = [(name, [x * 1000 for gaps in r.get("itls", []) for x in gaps]) for name, (_, r) in zip(names, detailed, strict=True)]
        charts.append(svg.distribution("Time to first token", ttfts, x_label="milliseconds"))
        charts.append(svg.distribution("Inter-token latency", itls, x_label="milliseconds"))
    return "<h2>Serving</h2>" + (f'<div class="charts">{"".join(charts)}</div>' if charts else "") + _serving_table(results)


def _serving_table(results: Sequence[dict[str, Any]]) -> str:
    """A row a run, without columns that no run has; settings are one where runs differ in them; an interrupted run says so."""
    with_settings = any(result.get("serve_params") for result in results)
    columns = {key: name for key, name in _SERVING_COLUMNS.items() if any(result.get(key) is not None for result in results)}
    rows = [
        [
            _name(result) + (" (interrupted)" if result.get("interrupted") else ""),
            *([_settings(result)] if with_settings else []),
            *(result.get(key) for key in columns),
        ]
        for result in results
    ]
    return _html_table(["run", *(["settings"] if with_settings else []), *columns.values()], rows)


def _settings(result: dict[str, Any]) -> str:
    """The settings by which the runs of a sweep differ."""
    params = result.get("serve_params")
    return ", ".join(f"{key}={value}" for key, value in sorted(params.items())) if isinstance(params, dict) and params else "default"


def _by_settings(results: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Complete runs that differ in their load only, by throughput: what one line may join."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result.get("output_throughput") is not None and not result.get("interrupted"):
            names = (result.get("label"), result.get("model_id"), _settings(result))
            groups.setdefault(", ".join(str(name) for name in names if name), []).append(result)
    # What all have in common says nothing in a legend.
    if len({(of[0].get("label"), of[0].get("model_id")) for of in groups.values()}) == 1:
        groups = {_settings(of[0]): of for of in groups.values()}
    return {name: sorted(of, key=lambda result: float(result["output_throughput"])) for name, of in groups.items()}


def _load_charts(groups: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    """Latency against throughput, a line a setting; one chart for all latencies where there is one setting only."""
    latencies = (("median_ttft_ms", "TTFT p50"), ("p99_ttft_ms", "TTFT p99"), ("median_e2el_ms", "E2EL p50"))
    if not any(len(of) > 1 for of in groups.values()) and len(groups) < 2:
        return
    if len(groups) == 1:
        (results,) = groups.values()
        yield _latency_chart("Throughput and latency", [_curve(name, results, key) for key, name in latencies])
    else:
        for key, name in latencies:
            yield _latency_chart(f"Throughput and {name}", [_curve(label, of, key) for label, of in groups.items()])
    points = {name: [(1000 / r["median_tpot_ms"], r) for r in of if r.get("median_tpot_ms")] for name, of in groups.items()}
    series = [
        svg.Series(
            "runs" if len(groups) == 1 else name, [(x, float(r["output_throughput"])) for x, r in of], "points", [_load(r) for _, r in of]
        )
        for name, of in points.items()
    ]
    yield svg.line_chart("Of one user and of all", series, x_label="tokens a second and user", y_label="tokens a second in all")


def _latency_chart(title: str, series: Sequence[svg.Series]) -> str:
    return svg.line_chart(title, series, x_label="output tokens a second", y_label="milliseconds")


def _curve(name: str, results: Sequence[dict[str, Any]], key: str) -> svg.Series:
    known = [result for result in results if result.get(key) is not None]
    points = [(float(result["output_throughput"]), float(result[key])) for result in known]
    return svg.Series(name, points, labels=[f"{_load(result)}: {result[key]:.1f} ms" for result in known])


def _load(result: dict[str, Any]) -> str:
    """What was asked for, in a few characters."""
    rate, limit = result.get("request_rate"), result.get("max_concurrency")
    parts = ([] if rate in (None, "inf") else [f"{rate:g} req/s"]) + ([] if limit is None else [f"{limit} at once"])
    return ", ".join(parts) or "all at once"


# ---------------------------------------------------------------------------------------------------- recordings
def _recording_section(name: str, recording: Recording) -> str:
    steps = [event for event in recording.events if isinstance(event, StepEvent)]
    results = {event.step_id: event for event in recording.events if isinstance(event, StepResultEvent)}
    if not steps:
        return f"<h2>Recording {escape(name)}</h2><p>It has no steps.</p>"
    start = steps[0].schedule_start
    usage = [(step.time - start, step.stats.kv_cache_usage * 100) for step in steps]
    running = [(step.time - start, float(step.stats.num_running_reqs)) for step in steps]
    waiting = [(step.time - start, float(step.stats.num_waiting_reqs)) for step in steps]
    tokens = [(step.time - start, float(step.output.total_num_scheduled_tokens)) for step in steps]
    charts = [
        svg.line_chart("KV cache in use", [svg.Series("blocks in use", usage, "step")], x_label="seconds", y_label="percent"),
        svg.line_chart(
            "Requests",
            [svg.Series("running", running, "step"), svg.Series("waiting", waiting, "step")],
            x_label="seconds",
            y_label="requests",
        ),
        svg.line_chart("Tokens a step", [svg.Series("scheduled", tokens, "step")], x_label="seconds", y_label="tokens"),
        svg.timeline("Steps from the middle of the run", _lanes(steps, results), x_label="milliseconds"),
    ]
    return (
        f"<h2>Recording {escape(name)}</h2><p>{len(steps)} steps of {escape(recording.header.model)}, "
        f"{steps[-1].time - start:.1f} s, {steps[-1].stats.num_preemptions} preemptions.</p>"
        f'<div class="charts">{"".join(charts)}</div>'
    )


def _lanes(steps: Sequence[StepEvent], results: dict[int, StepResultEvent]) -> list[svg.Interval]:
    """The host's and the worker's work on some consecutive steps; neighbours in different colours."""
    first = max(0, len(steps) // 2 - _MAX_TIMELINE_STEPS // 2)
    shown = steps[first : first + _MAX_TIMELINE_STEPS]
    origin = shown[0].schedule_start
    intervals: list[svg.Interval] = []

    def add(lane: str, start: float | None, end: float | None, step_id: int) -> None:
        if start is not None and end is not None:
            title = f"step {step_id}, {lane}: {(end - start) * 1000:.3f} ms"
            intervals.append(svg.Interval(lane, (start - origin) * 1000, (end - origin) * 1000, title, step_id % 2))

    for step in shown:
        add("schedule", step.schedule_start, step.schedule_end, step.step_id)
        result = results.get(step.step_id)
        if result is not None:
            add("execute", result.execute_start, result.execute_end, step.step_id)
            add("sample", result.sample_start, result.sample_end, step.step_id)
            add("update", result.update_start, result.update_end, step.step_id)
    return intervals


def _environment_section(results: Sequence[dict[str, Any]]) -> str:
    seen = {
        str(result["environment"].get("command", index)): result["environment"]
        for index, result in enumerate(results)
        if result.get("environment")
    }
    if not seen:
        return ""
    keys = list(dict.fromkeys(key for one in seen.values() for key in one))
    return "<h2>Where and how</h2>" + _html_table(
        ["", *map(str, range(1, len(seen) + 1))], [[key, *(one.get(key) for one in seen.values())] for key in keys]
    )
