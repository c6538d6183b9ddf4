"""What a person reads: aligned blocks and tables in plain text, and a progress bar where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from aioengine.printable import PrintableStream

_WIDTH = 56
_METRIC_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}

_QUEUE_TITLES = {"queue_time": "Queue in the engine (part of TTFT)", "client_queue_time": "Queue in the client (in no latency)"}
_LEAST_SHOWN_MS = {"queue_time": 0.0, "client_queue_time": 1.0}  # below it the client sent when it should


def progress_bar(total: int, *, description: str, unit: str = "request", disable: bool = False) -> tqdm[Any]:
    """On stderr, and silent where that is no terminal."""
    return tqdm(total=total, desc=description, unit=unit, disable=True if disable else None, file=sys.stderr)


def output_stream(*, stdout_is_taken: bool) -> PrintableStream:
    """Where text for people goes: stdout, unless a JSON result goes there. Names of models and files come there printable."""
    return PrintableStream(sys.stderr if stdout_is_taken else sys.stdout)


def number(value: float | int | None, digits: int = 2) -> str:
    """ "-" for what is undefined: no figure is better than a wrong one."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def heading(title: str, *, fill: str = "=") -> str:
    return f" {title} ".center(_WIDTH, fill)


def line(title: str, value: Any, digits: int = 2) -> str:
    text = value if isinstance(value, str) else number(value, digits)
    return f"{title + ':':<40} {text:>15}"


def serving_block(result: Mapping[str, Any], metrics: Sequence[str], percentile_names: Sequence[str]) -> str:
    """The block that `vllm bench serve` prints, and below it what only this engine says."""
    lines = [heading("Serving Benchmark Result")]
    lines += [
        line("Successful requests", result["completed"]),
        line("Failed requests", result["failed"]),
        line("Aborted requests", result["aborted"]),
    ]
    if result.get("max_concurrency") is not None:
        lines.append(line("Maximum request concurrency", result["max_concurrency"]))
    if result.get("request_rate") not in (None, "inf"):
        lines.append(line("Request rate configured (RPS)", result["request_rate"]))
    lines += [
        line("Benchmark duration (s)", result["duration"]),
        line("Total input tokens", result["total_input_tokens"]),
        line("Total generated tokens", result["total_output_tokens"]),
        line("Request throughput (req/s)", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        lines.append(line("Request goodput (req/s)", result["request_goodput"]))
    lines += [
        line("Output token throughput (tok/s)", result["output_throughput"]),
        line("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"]),
        line("Peak concurrent requests", result["max_concurrent_requests"]),
        line("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for metric in metrics:
        lines.append(heading(_METRIC_TITLES[metric], fill="-"))
        lines += [
            line(f"{name.capitalize()} {metric.upper()} (ms)", result[f"{name}_{metric}_ms"])
            for name in ("mean", "median", *percentile_names)
        ]
    for name, title in _QUEUE_TITLES.items():
        waited = result.get(f"mean_{name}_ms")
        if waited is not None and waited >= _LEAST_SHOWN_MS[name]:
            lines.append(heading(title, fill="-"))
            lines += [
                line(f"{which.capitalize()} delay (ms)", result[f"{which}_{name}_ms"]) for which in ("mean", "median", *percentile_names)
            ]
    if result["failure_reasons"]:
        lines.append(heading("Requests not completed", fill="-"))
        lines += reason_lines(result["failure_reasons"])
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def reason_lines(reasons: Mapping[str, int], *, most: int = 5, width: int = 160) -> list[str]:
    """ "    3 x RequestFailed: HTTP 503", the first line of each reason, and how many requests have one that is not shown."""
    counts: dict[str, int] = {}
    for reason, count in reasons.items():
        first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        short = first if len(first) <= width else first[: width - 3] + "..."
        counts[short] = counts.get(short, 0) + count
    items = sorted(counts.items(), key=lambda item: -item[1])
    lines = [f"{count:>5} x {reason}" for reason, count in items[:most]]
    hidden = items[most:]
    return lines + ([f"{sum(count for _, count in hidden):>5} for {len(hidden)} other reasons"] if hidden else [])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]

    def format_row(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([format_row(columns), format_row(["-" * width for width in widths]), *map(format_row, rows)])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    separator = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, separator, *rows])
