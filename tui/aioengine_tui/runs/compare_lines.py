"""A comparison as lines, for the screen and for where there is none."""

from __future__ import annotations

from aioengine.printable import printable
from aioengine_tui.runs.compare import Axis, Comparison, Difference, along, extent_of
from aioengine_tui.runs.run_log import RunLog
from aioengine_tui.widgets.graph import graph_rows
from aioengine_tui.widgets.text import Line, Part, fit, fit_line, fit_middle, rule, seconds, side_by_side

_VERDICT_ROLES = {"better": "good", "worse": "bad", "same": "muted", "neither": "text"}
_VERDICT_SIGNS = {"better": "+", "worse": "-", "same": "=", "neither": " "}
_GRAPHS = (
    ("running", "num_running", "running"), ("waiting", "num_waiting", "preempted"), ("KV blocks used", "num_used_blocks", "block_used"),
    ("prompt tokens a step", "num_prompt_tokens", "prefill"), ("computed again", "num_recomputed_tokens", "resumed"),
)  # fmt: skip
_LEAST_GRAPH = 16  # cells


def compare_lines(comparison: Comparison, names: tuple[str, str], *, width: int, axis: Axis) -> list[Line]:
    """All lines, each `width` cells at most: figures, graphs of both runs on one scale, settings."""
    lines = [*_heads(names, width), *(_difference_line(difference, width) for difference in comparison.differences)]
    lines += [[], *_parting_lines(comparison, width)]
    if width >= 2 * _LEAST_GRAPH + 1:
        lines += [[], *_graphs(comparison, names, width, axis)]
    if comparison.settings:
        lines += [[], rule("settings that differ", width)]
        for name, first, second in comparison.settings:
            lines.append(fit_line([Part(f" {printable(name)}: "), Part(printable(f"{first} | {second}"), "value")], width))
    return lines


def _widths(width: int) -> tuple[int, int, int]:
    """Of the label, of a value, and of the ratio with the verdict; no wider than the eye can follow a line."""
    value, tail = (12, 15) if width >= 80 else (9, 9)
    return min(44, width - 3 * value - tail), value, tail


def _heads(names: tuple[str, str], width: int) -> list[Line]:
    lines: list[Line] = []
    for letter, name in zip("AB", names, strict=True):
        lines.append([Part(f" {letter} ", "key"), Part(fit_middle(printable(name), width - 4), "text")])
    left, size, tail = _widths(width)
    heads = [fit(title, size, right=True) for title in ("A", "B", "B - A")]
    return [*lines, [Part(fit("", left), "header"), *(Part(head, "header") for head in heads), Part(fit("", tail), "header")]]


def _difference_line(difference: Difference, width: int) -> Line:
    left, size, tail = _widths(width)
    first, second, verdict = difference.first, difference.second, difference.verdict
    role = _VERDICT_ROLES[verdict]
    label = f" {first.label}{f' ({first.unit})' if first.unit else ''}"
    change = "-" if difference.change is None else f"{difference.change:+,.{first.digits}f}"
    ratio = "" if difference.ratio is None or difference.ratio == 1 else f"x{difference.ratio:.2f}"
    return [
        Part(fit(label, left), "text"),
        Part(fit(_text(first.value, first.digits), size, right=True), "value"),
        Part(fit(_text(second.value, first.digits), size, right=True), "value"),
        Part(fit(change, size, right=True), role),
        Part(fit(ratio, 7, right=True), role),
        Part(f"  {'' if verdict == 'neither' else verdict}" if tail > 9 else f" {_VERDICT_SIGNS[verdict]}", role),
    ]


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _parting_lines(comparison: Comparison, width: int) -> list[Line]:
    parting = comparison.parting
    if parting is None:
        return [fit_line([Part(" The frames are the same from the first step to the last.", "good")], width)]
    if parting.column == "end":
        text = f" The frames are the same until one run ends, before step {parting.step_id}."
    else:
        text = f" The frames part at step {parting.step_id}: {parting.column} is {parting.first} in A and {parting.second} in B."
    return [fit_line([Part(text, "warn")], width)]


def _graphs(comparison: Comparison, names: tuple[str, str], width: int, axis: Axis) -> list[Line]:
    half = (width - 1) // 2
    extent = extent_of(comparison, axis)
    far = f"{int(extent)} steps" if axis == "step" else seconds(extent)
    logs = (comparison.first, comparison.second)
    lines: list[Line] = [rule(f"along the {axis}, 0 to {far}; both on one scale (s: step, t: time)", width)]
    for label, column, role in _GRAPHS:
        cells = [along(log, column, axis=axis, extent=extent, num_cells=half) for log in logs]
        top = max((value for run in cells for value in run if value is not None), default=0.0)
        if not top:
            continue
        blocks = [_graph(log, letter, label, column, run, half, top, role) for log, letter, run in zip(logs, "AB", cells, strict=True)]
        lines += side_by_side(blocks, [half, half])
    return lines


def _graph(log: RunLog, letter: str, label: str, column: str, cells: list[float | None], width: int, top: float, role: str) -> list[Line]:
    peak = max(log.steps[column], default=0)
    head = f" {letter} {label}, peak {peak:,}"
    return [[Part(fit(head, width), "muted")], *([Part(row, role)] for row in graph_rows(cells, width=width, height=2, top=top))]
