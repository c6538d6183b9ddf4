"""Limits that a run has to meet, and which of the runs that do is best."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.errors import ConfigError

_GOAL = re.compile(r"(ttft|tpot|itl|e2el)_(mean|median|p\d+(?:\.\d+)?)<=(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure of a result, and the most milliseconds that it may be."""

    metric: str
    statistic: str
    limit_ms: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}"

    @property
    def text(self) -> str:
        return f"{self.name}<={self.limit_ms:g}"

    @property
    def key(self) -> str:
        return f"{'median' if self.statistic == 'p50' else self.statistic}_{self.metric}_ms"

    @property
    def percentile(self) -> float | None:
        return float(self.statistic[1:]) if self.statistic.startswith("p") else None

    def excess(self, result: Mapping[str, Any]) -> float:
        """By what share the limit is exceeded; 0: met. What is undefined (TPOT of single tokens) exceeds nothing."""
        value = result.get(self.key)
        return 0.0 if value is None else max(0.0, value / self.limit_ms - 1) if self.limit_ms else float(value > 0)


def parse_goals(text: str) -> list[Goal]:
    """ "ttft_p99<=500,tpot_p50<=40" -> goals. Raises ConfigError."""
    goals = []
    for item in text.split(","):
        found = _GOAL.fullmatch(item.strip())
        if found is None:
            raise ConfigError(f"a goal must look like ttft_p99<=500 (milliseconds; ttft, tpot, itl or e2el), got {item!r}")
        goals.append(Goal(found[1], found[2], float(found[3])))
    return goals


def percentiles_for(wanted: Sequence[float], goals: Sequence[Goal]) -> tuple[float, ...]:
    """Those that are wanted, and what the goals ask of besides the median."""
    extra = {goal.percentile for goal in goals if goal.percentile not in (None, 50.0)}
    return tuple(sorted({*wanted, *(percent for percent in extra if percent is not None)}))


def best(results: Sequence[Mapping[str, Any]], goals: Sequence[Goal]) -> tuple[int, bool]:
    """(index, whether it meets all goals): the most output tokens a second of those that do, else the one that misses by least.

    A request that could not run counts as missing: a setting is no good for failing faster.
    """

    def rank(result: Mapping[str, Any]) -> tuple[float, float]:
        return result["failed"] + sum(goal.excess(result) for goal in goals), -(result["output_throughput"] or 0.0)

    index = min(range(len(results)), key=lambda index: rank(results[index]))
    return index, rank(results[index])[0] == 0
