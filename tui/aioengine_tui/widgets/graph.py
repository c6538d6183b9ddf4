"""History graphs in braille dots, with scale and time axis, and horizontal bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from aioengine_tui.widgets.text import Line, Part, fit, width_of

_BRAILLE = 0x2800
_LEFT_DOTS = (0x00, 0x40, 0x44, 0x46, 0x47)  # of a cell: columns of 0 to 4 dots, from below
_RIGHT_DOTS = (0x00, 0x80, 0xA0, 0xB0, 0xB8)
_GUTTER = 6  # the scale: five cells and the axis
_MIN_WIDTH = 26  # narrower graphs have no scale


def resample(values: Sequence[float | None], num_values: int) -> list[float | None]:
    """The same span of time in `num_values` values: the mean of what is known of each part, None where nothing is.

    A value is held over several where there are more of them than values.
    """
    count = len(values)
    resampled: list[float | None] = []
    for index in range(num_values):
        first = index * count // num_values
        known = [value for value in values[first : max(first + 1, (index + 1) * count // num_values)] if value is not None]
        resampled.append(sum(known) / len(known) if known else None)
    return resampled


def graph_rows(values: Sequence[float | None], *, width: int, height: int, top: float | None = None) -> list[str]:
    """All values as `height` rows of braille, from top to bottom, the newest at the right; each cell is 2 by 4 dots.

    `top` is the value of a full column; None takes the largest value shown. A value of None (nothing known) is blank; a value
    above 0 is never drawn as nothing.
    """
    shown = resample(values, 2 * width)
    largest = top if top is not None else max((value for value in shown if value is not None), default=0.0)
    levels = [_level(value, largest, height * 4) for value in shown]
    rows = []
    for floor in range((height - 1) * 4, -1, -4):
        dots = [min(4, max(0, level - floor)) for level in levels]
        rows.append("".join(_cell(dots[x], dots[x + 1]) for x in range(0, 2 * width, 2)))
    return rows


def _cell(left: int, right: int) -> str:
    return chr(_BRAILLE + _LEFT_DOTS[left] + _RIGHT_DOTS[right]) if left or right else " "


def _level(value: float | None, largest: float, steps: int) -> int:
    if value is None or value <= 0 or largest <= 0:
        return 0
    return max(1, min(steps, round(value / largest * steps)))


def round_up(value: float) -> float:
    """The next round number, for the end of a scale."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if step * power >= value * 0.9999), 10 * power)


def graph_lines(
    values: Sequence[float | None],
    *,
    width: int,
    height: int,
    top: float | None = None,
    role: str = "graph",
    form: Callable[[float], str] = "{:g}".format,
    span: tuple[str, str] = ("", ""),
) -> list[Line]:
    """The graph with what it takes to read it: the scale at the left where it is 2 rows high, the time below it where it is 3.

    top: the end of the scale; None: the round number above the largest value. form: how a number of the scale is written, in
    at most 5 cells. span: names of the left end and of the middle of the time axis; its right end is now.
    """
    known = [value for value in values if value is not None]
    top = top if top is not None else round_up(max(known, default=0.0))
    if width < _MIN_WIDTH or height < 2:
        return [[Part(row, role)] for row in graph_rows(values, width=width, height=height, top=top)]
    has_axis = height >= 3
    rows = graph_rows(values, width=width - _GUTTER, height=height - has_axis, top=top)
    labels = {0: form(top), len(rows) - 1: "0"}
    if len(rows) >= 5 and len(rows) % 2:
        labels[len(rows) // 2] = form(top / 2)
    lines: list[Line] = [
        [Part(fit(labels.get(y, ""), _GUTTER - 1, right=True) + ("┤" if y in labels else "│"), "muted"), Part(row, role)]
        for y, row in enumerate(rows)
    ]
    if has_axis:
        lines.append([Part(" " * (_GUTTER - 1) + _time_axis(span, width - _GUTTER + 1), "muted")])
    return lines


def _time_axis(span: tuple[str, str], width: int) -> str:
    start, middle = span
    axis = "└" + start + "─" * (width - 1 - width_of(start))
    at = 1 + (width - 1) // 2
    if middle and at > width_of(start) + 2:
        axis = axis[:at] + "┴" + middle + axis[at + 1 + width_of(middle) :]
    return axis[: width - 3] + "now"


def bar(shares: Sequence[tuple[float, str, str]], *, width: int, rest: tuple[str, str] = ("·", "budget_left")) -> Line:
    """A bar of `width` cells, filled with (share of 1, fill character, role) from the left, the rest with `rest`.

    Cells are dealt so that the whole is right to one cell and every share above 0 has a cell if there is room at all.
    """
    sizes = _deal([share for share, _, _ in shares], width)
    line = [Part(fill * size, role) for (_, fill, role), size in zip(shares, sizes, strict=True) if size]
    left = width - sum(sizes)
    if left > 0:
        line.append(Part(rest[0] * left, rest[1]))
    return line


def _deal(shares: list[float], width: int) -> list[int]:
    """Whole cells for shares of 1 that add up to at most 1."""
    total = min(width, round(sum(shares) * width))
    present = [index for index, share in enumerate(shares) if share > 0]
    total = max(total, min(width, len(present)))
    sizes = [0] * len(shares)
    for index in present[:width]:
        sizes[index] = 1
    weight = sum(shares)
    for _ in range(total - sum(sizes)):
        # The share that is furthest below its due gets the next cell.
        index = max(present, key=lambda i: shares[i] / weight * total - sizes[i])
        sizes[index] += 1
    return sizes
