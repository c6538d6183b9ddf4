"""The lanes of the step pipeline: schedule, execute, sample, update side by side over time, so that overlap can be seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from aioengine_tui.model.rows import StepRecord
from aioengine_tui.widgets.glyphs import LANE_FILLS
from aioengine_tui.widgets.graph import round_up
from aioengine_tui.widgets.text import Line, Part

Lane = Literal["schedule", "execute", "sample", "update"]
LANES: tuple[Lane, ...] = get_args(Lane)

_LABEL_WIDTH = 9
_ODD_FILL = "░"


def lane_window(steps: Iterable[StepRecord], *, num_steps: int) -> tuple[float, float] | None:
    """Start and end of the latest `num_steps` steps that are complete; None if there is none."""
    complete = [step for step in steps if step.lanes.update is not None][-num_steps:]
    if not complete:
        return None
    last = complete[-1].lanes.update
    assert last is not None, "filtered above"
    return complete[0].lanes.schedule[0], last[1]


def lane_lines(steps: Iterable[StepRecord], *, start: float, end: float, width: int) -> list[Line]:
    """Six lines: the numbers of the steps where each begins, the four lanes, and a time axis.

    The window is from `start` to `end` (engine seconds). Steps with even and odd ids have different fills, so that neighbours
    can be told apart. Work shorter than a cell still gets one, because scheduling a step takes microseconds and would
    otherwise never be seen.
    """
    cells = max(1, width - _LABEL_WIDTH)
    per_second = cells / max(end - start, 1e-9)
    rows = {lane: [" "] * cells for lane in LANES}
    names: list[tuple[int, str]] = []
    for step in steps:
        names.append((int((step.lanes.schedule[0] - start) * per_second), str(step.step_id)))
        for lane in LANES:
            span = getattr(step.lanes, lane)
            if span is None or span[1] < start or span[0] > end:
                continue
            first = max(0, min(cells - 1, int((span[0] - start) * per_second)))
            last = max(first, min(cells - 1, int((span[1] - start) * per_second - 1e-6)))
            fill = LANE_FILLS[lane] if step.step_id % 2 == 0 else _ODD_FILL
            rows[lane][first : last + 1] = fill * (last + 1 - first)
    lines: list[Line] = [[Part(f"{'step':<{_LABEL_WIDTH}}", "muted"), Part(_place(names, cells), "muted")]]
    lines += [[Part(f"{lane:<{_LABEL_WIDTH}}", "muted"), Part("".join(rows[lane]), f"lane_{lane}")] for lane in LANES]
    lines.append([Part(" " * _LABEL_WIDTH), Part(_axis(end - start, cells), "muted")])
    return lines


def _place(names: Iterable[tuple[int, str]], cells: int) -> str:
    """Each name at its cell, as far as it does not touch the one before it."""
    text = ""
    for cell, name in sorted(names):
        if cell >= 0 and (not text or cell > len(text)) and cell + len(name) <= cells:
            text = text.ljust(cell) + name
    return text.ljust(cells)


def _axis(duration: float, cells: int) -> str:
    """Ticks at round times from the beginning of the window, about one in 16 cells; what a cell is at the end."""
    step = round_up(duration * 16 / cells)
    ticks = [
        (int(number * step / duration * cells), f"┴{_round_seconds(number * step)}" if number else "└0")
        for number in range(int(duration / step) + 1)
    ]
    return _place(ticks, cells).rstrip().replace(" ", "─").ljust(cells, "─")


def _round_seconds(value: float) -> str:
    return f"{value:.4g}s" if value >= 1 else f"{value * 1e3:.4g}ms" if value >= 1e-3 else f"{value * 1e6:.4g}us"
