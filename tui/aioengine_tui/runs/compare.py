"""Two runs side by side: their figures with the differences, where their frames part, and their gauges along steps or time."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aioengine_tui.runs.run_log import ADMISSION_STOPS, RunLog
from aioengine_tui.runs.summary import Figure, latency_figures, summarize

Axis = Literal["step", "time"]

FRAME_COLUMNS = ("num_tokens", "num_requests", "num_prompt_tokens", "num_recomputed_tokens", "num_preempting", "stop", "num_running",
                 "num_waiting", "num_used_blocks")  # fmt: skip
"""What two steps are compared by. Times are left out: a simulation has its own."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both runs."""

    first: Figure
    second: Figure

    @property
    def change(self) -> float | None:
        """Second minus first, in the figure's unit."""
        if self.first.value is None or self.second.value is None:
            return None
        return self.second.value - self.first.value

    @property
    def ratio(self) -> float | None:
        """Second to first; None where the first is 0 or unknown."""
        if not self.first.value or self.second.value is None:
            return None
        return self.second.value / self.first.value

    @property
    def verdict(self) -> Literal["better", "worse", "same", "neither"]:
        """Of the second; within half a unit of the last digit shown it is the same."""
        change, better = self.change, self.first.better
        if change is None or better == "neither":
            return "neither"
        if abs(change) < 0.5 * 10**-self.first.digits:
            return "same"
        return "better" if (change > 0) == (better == "more") else "worse"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step at which two runs differ."""

    step_id: int
    column: str  # of FRAME_COLUMNS, or "end": one has no further step
    first: int | str | None
    second: int | str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two runs; `compare` makes it."""

    first: RunLog
    second: RunLog
    differences: tuple[Difference, ...]
    parting: Parting | None  # None: the same frames from the first step to the last
    settings: tuple[tuple[str, Any, Any], ...]  # (name, first, second) of those that differ


def compare(first: RunLog, second: RunLog) -> Comparison:
    figures = [*latency_figures(first), *summarize(first)], [*latency_figures(second), *summarize(second)]
    return Comparison(
        first,
        second,
        tuple(Difference(one, other) for one, other in zip(*figures, strict=True)),
        _find_parting(first, second),
        tuple(_setting_differences("", first.header.config, second.header.config)),
    )


def _find_parting(first: RunLog, second: RunLog) -> Parting | None:
    ids, other_ids = first.steps["step_id"], second.steps["step_id"]
    for index in range(min(len(ids), len(other_ids))):
        for column in ("step_id", *FRAME_COLUMNS):
            one, other = first.steps[column][index], second.steps[column][index]
            if one != other:
                return Parting(ids[index], column, _name_stop(column, one), _name_stop(column, other))
    if len(ids) == len(other_ids):
        return None
    longer = max(ids, other_ids, key=len)
    ends = (None, longer[len(ids)]) if len(ids) < len(other_ids) else (longer[len(other_ids)], None)
    return Parting(longer[min(len(ids), len(other_ids))], "end", *ends)


def _name_stop(column: str, value: int) -> int | str:
    return ADMISSION_STOPS[value] if column == "stop" else value


def _setting_differences(prefix: str, first: Any, second: Any) -> list[tuple[str, Any, Any]]:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return [] if first == second else [(prefix, first, second)]
    names = [*first, *(name for name in second if name not in first)]
    found = []
    for name in names:
        found += _setting_differences(f"{prefix}.{name}" if prefix else str(name), first.get(name), second.get(name))
    return found


# ---------------------------------------------------------------------------------------------------- along an axis
def along(log: RunLog, column: str, *, axis: Axis, extent: float, num_cells: int) -> list[float | None]:
    """The largest value of a column in each of so many equal parts of the axis from 0 to `extent`; None behind the run's end.

    The axis is the number of the step in the run, or seconds since its first event. Where no step falls into a part, a gauge
    keeps its value and a count is 0.
    """
    values = log.steps[column]
    places: Sequence[float] = range(len(values)) if axis == "step" else _seconds(log)
    length = len(values) if axis == "step" else log.duration
    cells: list[float | None] = []
    start, held = 0, 0.0
    for cell in range(num_cells):
        low, high = extent * cell / num_cells, extent * (cell + 1) / num_cells
        if low >= length:
            cells.append(None)
            continue
        end = bisect_right(places, high)
        if end > start:
            cells.append(float(max(values[start:end])))
            held, start = float(values[end - 1]), end
        else:
            cells.append(held if column in _GAUGES else 0.0)
    return cells


_GAUGES = frozenset({"num_running", "num_waiting", "num_used_blocks", "num_cached_blocks"})


def _seconds(log: RunLog) -> array[float]:
    return array("d", (start - log.start for start in log.steps["schedule_start"]))


def extent_of(comparison: Comparison, axis: Axis) -> float:
    """How far the axis reaches, so that both runs fit."""
    logs = (comparison.first, comparison.second)
    return float(max(1, *(len(log.steps) for log in logs))) if axis == "step" else max(1e-6, *(log.duration for log in logs))


# ---------------------------------------------------------------------------------------------------- for programs
def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values."""
    parting = comparison.parting
    return {
        "figures": {
            d.first.name: {
                "label": d.first.label, "unit": d.first.unit, "first": d.first.value, "second": d.second.value, "change": d.change,
                "ratio": d.ratio, "verdict": d.verdict,
            }
            for d in comparison.differences
        },
        "frames_differ_at": None if parting is None else {
            "step_id": parting.step_id, "field": parting.column, "first": parting.first, "second": parting.second,
        },
        "settings": [{"name": name, "first": first, "second": second} for name, first, second in comparison.settings],
    }  # fmt: skip
