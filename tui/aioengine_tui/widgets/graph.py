"""History graphs of one or a few rows, and horizontal bars."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine_tui.widgets.glyphs import EIGHTHS
from aioengine_tui.widgets.text import Line, Part


def graph_rows(values: Sequence[float | None], *, width: int, height: int, top: float | None = None) -> list[str]:
    """A graph of the last `width` values, newest at the right, as `height` rows from top to bottom.

    Each cell shows eighths of a row. `top` is the value of a full column; None takes the largest value shown. A value of
    None (nothing known) is blank; a value above 0 is never drawn as nothing.
    """
    shown = list(values[-width:]) if width > 0 else []
    largest = top if top is not None else max((value for value in shown if value is not None), default=0.0)
    levels = [_level(value, largest, height * 8) for value in shown]
    pad = " " * (width - len(shown))
    rows = []
    for row in range(height - 1, -1, -1):
        floor = row * 8
        rows.append(pad + "".join(EIGHTHS[min(8, max(0, level - floor))] for level in levels))
    return rows


def _level(value: float | None, largest: float, steps: int) -> int:
    if value is None or value <= 0 or largest <= 0:
        return 0
    return max(1, min(steps, round(value / largest * steps)))


def graph_lines(values: Sequence[float | None], *, width: int, height: int, top: float | None = None, role: str = "graph") -> list[Line]:
    return [[Part(row, role)] for row in graph_rows(values, width=width, height=height, top=top)]


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
