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
from aioengine.events.replay import Recording, read_recording
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.events.wire import WireError
from aioengine_bench import console, svg
from aioengine_bench.results import read_results

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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; display: block; overflow-x: auto; }
td, th { padding: 3px 10px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
.soft { color: var(--soft); font-size: 13px; }
"""


@dataclass(frozen=True, slots=True)
class ReportSettings:
    inputs: Sequence[str]
    output: str
    title: str = "aioengine benchmark report"


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    print(f"Wrote {path} ({len(page) / 1024:.0f} KiB)")


def read_input(path: str) -> Input:
    """A recording says so in its first line; anything else must be results."""
    results = read_results(path)
    if results[0].get("type") != "header":
        return Input(Path(path).name, results)
    try:
        return Input(Path(path).name, [], read_recording(path))
    except WireError as exc:
        raise ConfigError(str(exc)) from exc


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


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return console.number(value)


def _html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ["<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>" for row in rows]
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
            plain = [row for row in rows if row["mode"] == "decode" and row["watcher"] == "nobody" and not row["with_consumers"]]
            plain = [row for row in plain if not row["forward_ms"]]
            names = ("schedule", "update", "output", "publish", "total")
            series = [svg.Series(name, [(row["num_reqs"], row[f"{name}_us"]) for row in plain]) for name in names]
            yield svg.line_chart("Engine cost of a decode step", series, x_label="running requests", y_label="microseconds")
        case "host-cost":
            engines = list(dict.fromkeys(row["engine"] for row in rows))
            series = [svg.Series(name, [(r["num_reqs"], r["min_us"]) for r in rows if r["engine"] == name]) for name in engines]
            yield svg.line_chart("schedule() + update_from_output()", series, x_label="running requests", y_label="microseconds a step")
        case "compare":
            bars = [(f"{row['engine']} ({row['precision']})", row["output_throughput"]) for row in rows if row.get("output_throughput")]
            yield svg.bar_chart("Output tokens a second", bars, x_label="higher is better")


def _name(result: dict[str, Any]) -> str:
    parts = [result.get("label") or result.get("model_id") or "", result.get("date") or ""]
    return " ".join(str(part) for part in parts if part)


# ---------------------------------------------------------------------------------------------------- serving
def _serving_section(results: Sequence[dict[str, Any]]) -> str:
    if not results:
        return ""
    charts = []
    by_throughput = sorted((r for r in results if r.get("output_throughput") is not None), key=lambda r: float(r["output_throughput"]))
    if len(by_throughput) > 1:
        series = []
        for key, name in (("median_ttft_ms", "TTFT p50"), ("p99_ttft_ms", "TTFT p99"), ("median_e2el_ms", "E2EL p50")):
            known = [r for r in by_throughput if r.get(key) is not None]
            points = [(float(r["output_throughput"]), float(r[key])) for r in known]
            series.append(svg.Series(name, points, labels=[f"{_load(r)}: {r[key]:.1f} ms" for r in known]))
        charts.append(svg.line_chart("Throughput and latency", series, x_label="output tokens a second", y_label="milliseconds"))
    users = [(1000 / r["median_tpot_ms"], float(r["output_throughput"]), _load(r)) for r in by_throughput if r.get("median_tpot_ms")]
    if len(users) > 1:
        one = svg.Series("runs", [(x, y) for x, y, _ in users], "points", [name for _, _, name in users])
        x_label, y_label = "tokens a second and user", "tokens a second in all"
        charts.append(svg.line_chart("Of one user and of all", [one], x_label=x_label, y_label=y_label))
    detailed = [result for result in results if result.get("ttfts")][:7]
    if detailed:
        ttfts = [(_load(r), [value * 1000 for value in r["ttfts"] if value is not None]) for r in detailed]
        itls = [(_load(r), [gap * 1000 for gaps in r["itls"] for gap in gaps]) for r in detailed]
        charts.append(svg.distribution("Time to first token", ttfts, x_label="milliseconds"))
        charts.append(svg.distribution("Inter-token latency", itls, x_label="milliseconds"))
    return (
        "<h2>Serving</h2>"
        + (f'<div class="charts">{"".join(charts)}</div>' if charts else "")
        + _html_table(["run", *_SERVING_COLUMNS.values()], [[_name(r), *(r.get(key) for key in _SERVING_COLUMNS)] for r in results])
    )


def _load(result: dict[str, Any]) -> str:
    """What was asked for, in a few characters."""
    if result.get("max_concurrency") is not None:
        return f"{result['max_concurrency']} at once"
    rate = result.get("request_rate")
    return "all at once" if rate in (None, "inf") else f"{rate:g} req/s"


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
