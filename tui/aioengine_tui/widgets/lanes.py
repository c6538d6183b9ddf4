"""The lanes of the step pipeline: schedule, execute, sample, update side by side over time, so that overlap can be seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from aioengine_tui.model.rows import StepRecord
from aioengine_tui.widgets.glyphs import LANE_FILLS
from aioengine_tui.widgets.text import Line, Part, seconds

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
    """Four lines, one a lane, and a scale: the window from `start` to `end` (engine seconds) in `width` cells.

    Steps with even and odd ids have different fills, so that neighbours can be told apart. Work shorter than a cell still
    gets one, because scheduling a step takes microseconds and would otherwise never be seen.
    """
    cells = max(1, width - _LABEL_WIDTH)
    per_second = cells / max(end - start, 1e-9)
    rows = {lane: [" "] * cells for lane in LANES}
    for step in steps:
        for lane in LANES:
            span = getattr(step.lanes, lane)
            if span is None or span[1] < start or span[0] > end:
                continue
            first = max(0, min(cells - 1, int((span[0] - start) * per_second)))
            last = max(first, min(cells - 1, int((span[1] - start) * per_second - 1e-6)))
            fill = LANE_FILLS[lane] if step.step_id % 2 == 0 else _ODD_FILL
            rows[lane][first : last + 1] = fill * (last + 1 - first)
    lines: list[Line] = [[Part(f"{lane:<{_LABEL_WIDTH}}", "muted"), Part("".join(rows[lane]), f"lane_{lane}")] for lane in LANES]
    scale = f"{seconds(end - start)} shown, a cell is {seconds(1 / per_second)}; odd steps are {_ODD_FILL}"
    lines.append([Part(" " * _LABEL_WIDTH), Part(scale, "muted")])
    return lines
