"""`aioengine bench diff`: what changed between two result files, and whether it is a regression.

Every number that both results have under the same name is compared. A condition such as `output_throughput<-5%` speaks of the change
from the first to the second: here a fall by more than 5 %. Without a percent sign it is in the figure's own unit.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.errors import ConfigError
from aioengine_bench import console
from aioengine_bench.metrics import median_run
from aioengine_bench.results import encode_result, read_results
from aioengine_bench.settings import DiffSettings

_OPERATORS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_CONDITION = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=|<|>)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%?)\s*")
# Where figures of two results are of different work, their difference means nothing.
_SAME_WORK = ("benchmark", "model_id", "dataset_name", "num_prompts", "request_rate", "max_concurrency", "total_input_tokens")
# What a run was asked for, or when it was: no figure.
_NO_FIGURES = frozenset({*_SAME_WORK, "burstiness", "seed", "date", "num_runs", "schema_version"})


@dataclass(frozen=True, slots=True)
class Condition:
    """A change that counts as a regression."""

    text: str
    key: str
    holds: Callable[[float, float], bool]
    limit: float  # a share of the first value if `relative`
    relative: bool

    def is_met(self, before: float, after: float) -> bool:
        """A relative change from 0 is infinite, or none."""
        change = after - before
        if self.relative:
            change = change / abs(before) if before else 0.0 if not change else change * float("inf")
        return self.holds(change, self.limit)


def parse_condition(text: str) -> Condition:
    """NAME<CHANGE, NAME>CHANGE, with <= and >=, the change with or without %. Raises ConfigError."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(f"--fail-if takes NAME<CHANGE or NAME>CHANGE, such as output_throughput<-5% or p99_ttft_ms>+20, got {text!r}")
    key, sign, number, percent = match.groups()
    return Condition(text.strip(), key, _OPERATORS[sign], float(number) / (100 if percent else 1), bool(percent))


def read_result(path: str) -> dict[str, Any]:
    """The result of a file; of several, the median run by its throughput or time. Raises ConfigError."""
    results = read_results(path)
    if len(results) == 1:
        return results[0]
    complete = [result for result in results if not result.get("interrupted")] or results
    key = next((key for key in ("output_throughput", "elapsed_time", "avg_latency") if all(key in result for result in complete)), None)
    if key is None:
        raise ConfigError(f"{path} holds {len(results)} results that have no figure in common to take the median by")
    return median_run(complete, key)


def figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Every number by its name; inside of objects, such as `percentiles`, by a path with dots. Lists are details, not figures."""
    found: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, Mapping) and key not in ("environment", "engine", "made_from"):
            found |= {f"{key}.{name}": number for name, number in figures(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _NO_FIGURES:
            found[key] = float(value)
    return found


def different_work(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What was measured, where that is not the same: "request_rate: 2.0 -> 4.0"."""
    return [f"{key}: {before[key]} -> {after[key]}" for key in _SAME_WORK if key in before and key in after and before[key] != after[key]]


def compare_figures(before: Mapping[str, float], after: Mapping[str, float], conditions: Sequence[Condition]) -> list[dict[str, Any]]:
    """One row a figure that both have, in the order of `before`. Raises ConfigError for a condition on any other."""
    for condition in conditions:
        if condition.key not in before or condition.key not in after:
            shared = ", ".join(key for key in before if key in after) or "none"
            raise ConfigError(f"--fail-if {condition.text}: {condition.key} is not a number in both results; there are: {shared}")
    rows = []
    for key in [key for key in before if key in after]:
        a, b = before[key], after[key]
        broken = [condition.text for condition in conditions if condition.key == key and condition.is_met(a, b)]
        rows.append({"key": key, "before": a, "after": b, "change": b - a, "share": (b - a) / abs(a) if a else None, "failed": broken})
    return rows


def diff(settings: DiffSettings) -> None:
    """Print the table, and what failed. Exits with 1 if a condition was met; raises ConfigError for what cannot be compared."""
    conditions = [parse_condition(text) for text in settings.fail_if]
    before, after = read_result(settings.before), read_result(settings.after)
    different = different_work(before, after)
    if different and not settings.other_work:
        raise ConfigError(f"the results are of different work ({'; '.join(different)}): --other-work compares them all the same")
    rows = compare_figures(figures(before), figures(after), conditions)
    failed = [condition for row in rows for condition in row["failed"]]
    if settings.json:
        sys.stdout.buffer.write(encode_result({"rows": rows, "failed": failed, "different_work": different}) + b"\n")
        sys.stdout.flush()
    else:
        lines = [[row["key"], *_numbers(row), "FAILED" if row["failed"] else ""] for row in rows]
        print(console.table(["figure", "before", "after", "change", ""], lines), file=console.output_stream(stdout_is_taken=False))
    for row in rows:
        for condition in row["failed"]:
            change = "-" if row["share"] is None else f"{row['share']:+.1%}"
            print(
                f"failed: {condition}: {row['before']:g} -> {row['after']:g} ({change})", file=console.output_stream(stdout_is_taken=True)
            )
    if failed:
        raise SystemExit(1)


def _numbers(row: Mapping[str, Any]) -> list[str]:
    share = "-" if row["share"] is None else f"{row['share']:+.1%}"
    return [console.number(row["before"], 3), console.number(row["after"], 3), share]
