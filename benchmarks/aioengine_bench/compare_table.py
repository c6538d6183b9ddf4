"""Tables of comparisons: of one run, and of several runs with a column for each workload. Every row is shown, the losing ones too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.errors import ConfigError
from aioengine_bench import console
from aioengine_bench.results import read_results

OWN = "aioengine"
_COLUMNS = (
    *("engine", "output tok/s", "range", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms"),
    *("start s", "peak MB", "lost", "same tokens", "precision"),
)
_QUIET_SHARE = 0.5  # of the cores: a load average above that, before the first turn, means that others were at work


def peer_name(engine: str) -> str:
    """ "openvino:weight_format=int8" -> "openvino"."""
    return engine.partition(":")[0]


def without_folders(engine: str) -> str:
    """`llama.cpp:gguf=/models/x.gguf` as a table shows it: whose folder it was is nobody's business."""
    return re.sub(r"=[^,]*/", "=", engine)


def best_rows(figures: Mapping[str, float | None]) -> set[str]:
    """Of every peer the engine (with its setting) of the highest figure; of equals the first."""
    best: dict[str, str] = {}
    for engine, figure in figures.items():
        before = best.get(peer_name(engine))
        if figure and (before is None or figure > (figures[before] or 0.0)):
            best[peer_name(engine)] = engine
    return set(best.values())


def mark_best(rows: Sequence[dict[str, Any]]) -> None:
    """Give each row `best_of_peer`. A row that lost requests is not its peer's best: it did less work."""
    best = best_rows({row["engine"]: None if row["failed"] else row["output_throughput"] for row in rows})
    for row in rows:
        row["best_of_peer"] = row["engine"] in best


def grouped(engines: Sequence[str]) -> list[str]:
    """The settings of a peer beside each other, peers in the order in which they were named first."""
    peers = list(dict.fromkeys(peer_name(engine) for engine in engines))
    return sorted(engines, key=lambda engine: peers.index(peer_name(engine)))


def comparison_table(rows: Sequence[Mapping[str, Any]], *, markdown: bool) -> str:
    """One run: a row a setting, the settings of a peer beside each other, `*` at the best of each."""
    by_name = {row["engine"]: row for row in rows}
    lines = []
    for engine in grouped(list(by_name)):
        row = by_name[engine]
        span = f"{console.number(row['least_output_throughput'], 1)}-{console.number(row['most_output_throughput'], 1)}"
        same = "-" if row["agreement"] is None else f"{row['agreement']}/{row['agreement_of']}"
        figures = [console.number(row[key], 1) for key in ("p50_ttft_ms", "p50_itl_ms", "p99_itl_ms", "startup_s", "peak_rss_mb")]
        name = f"{'*' if row['best_of_peer'] else ' '} {without_folders(engine)} {row['version']}"
        output = console.number(row["output_throughput"], 1)
        if markdown:
            name, output = (f"**{text.lstrip('* ')}**" if row["best_of_peer"] else text.lstrip("* ") for text in (name, output))
        lines.append([name, output, span, *figures, str(row["failed"]), same, row["precision"]])
    table = (console.markdown_table if markdown else console.table)(_COLUMNS, lines)
    return f"{table}\n\n{'Bold' if markdown else '*'}: the best setting of each engine, of those that lost no request."


def load_note(load_average: float | None, num_cpus: int | None) -> str | None:
    """What a figure that was had beside others is labelled with."""
    if load_average is None or not num_cpus or load_average <= _QUIET_SHARE * num_cpus:
        return None
    return f"measured on a loaded machine (load average {load_average:.1f} on {num_cpus} cores before the first turn): take the ratios"


def print_table(files: Sequence[str], *, markdown: bool) -> None:
    """Raises ConfigError for a file that is no result of `compare`."""
    results = [(file, result) for file in files for result in read_results(file)]
    for file, result in results:
        if result.get("benchmark") != "compare" or not isinstance(result.get("rows"), list):
            raise ConfigError(f"{file} is no result of `aioengine bench compare`, but of {result.get('benchmark')!r}")
    models = list(dict.fromkeys(str(result["model_id"]) for _, result in results))
    if len(models) > 1:
        raise ConfigError(f"one table is of one model, and these results are of {', '.join(models)}")
    print(combined_table([result for _, result in results], markdown=markdown))


def combined_table(results: Sequence[Mapping[str, Any]], *, markdown: bool) -> str:
    """Output tokens/s, a column a workload and a row a setting; then what the best of ours is over the best of the others."""
    figures: dict[str, dict[str, float | None]] = {}
    same: dict[str, dict[str, str]] = {}
    lost: dict[tuple[str, str], int] = {}
    for result in results:
        workload = str(result["workload"])
        if workload in figures:
            raise ConfigError(f"two results are of the workload {workload!r}: one table has one column for each")
        figures[workload] = {row["engine"]: row["output_throughput"] for row in result["rows"]}
        lost |= {(workload, row["engine"]): row["failed"] for row in result["rows"] if row["failed"]}
        same[workload] = {
            row["engine"]: f"{row['agreement']} of {row['agreement_of']}" for row in result["rows"] if row["agreement"] is not None
        }
    whole = {w: {engine: None if (w, engine) in lost else figure for engine, figure in column.items()} for w, column in figures.items()}
    best = {workload: best_rows(column) for workload, column in whole.items()}
    first = next(iter(figures))
    lines = []
    for engine in grouped(list(dict.fromkeys(engine for column in figures.values() for engine in column))):
        cells = [_cell(figures[w].get(engine), engine in best[w], lost.get((w, engine), 0), markdown=markdown) for w in figures]
        lines.append([without_folders(engine), cells[0], same[first].get(engine, ""), *cells[1:]])
    lines.append([f"best of {OWN} over the best of the others", _lead(whole[first]), "", *(_lead(whole[w]) for w in list(figures)[1:])])
    table = (console.markdown_table if markdown else console.table)(["", first, f"same tokens ({first})", *list(figures)[1:]], lines)
    return "\n\n".join([table, *_notes(results, lost)])


def _cell(figure: float | None, is_best: bool, num_lost: int, *, markdown: bool) -> str:
    if figure is None:
        return ""
    text = console.number(figure, 1)
    text = (f"**{text}**" if markdown else f"{text}*") if is_best else text
    return f"{text} ({num_lost} lost)" if num_lost else text


def _lead(column: Mapping[str, float | None]) -> str:
    ours = [figure for engine, figure in column.items() if figure and peer_name(engine) == OWN]
    others = [figure for engine, figure in column.items() if figure and peer_name(engine) != OWN]
    return f"{max(ours) / max(others):.2f}" if ours and others else ""


def _notes(results: Sequence[Mapping[str, Any]], lost: Mapping[tuple[str, str], int]) -> list[str]:
    notes = ["Output tokens/s, the median of the turns; marked: the best setting of each engine. Empty: not measured."]
    if lost:
        notes.append(f"{sum(lost.values())} requests were lost; a row with lost requests is nobody's best.")
    for result in results:
        if result["errors"]:
            notes.append(f"{result['workload']}: failed to run: {', '.join(without_folders(name) for name in result['errors'])}.")
        if note := result.get("load_note"):
            notes.append(f"{result['workload']}: {note}.")
    return notes
