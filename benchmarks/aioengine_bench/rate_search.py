"""Which request rate to try next, to find the highest that meets limits: bracket, then bisect. No clock, no load.

Imports nothing heavy: its settings are options of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.errors import ConfigError
from aioengine_bench.goal import Goal, parse_goals
from aioengine_bench.options import option
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """base: a run of it, with another rate, is one try; its rate is the first one."""

    base: ServeSettings
    goals: Sequence[Goal] = option(
        (),
        "find the highest rate that keeps limits in ms, such as ttft_p99<=500,tpot_p50<=40; begins at --request-rate or all at once",
        "--goal",
        metavar="LIMITS",
        unset="",
        type=str,
        convert=parse_goals,
        group=LOAD,
    )
    tries: int = option(10, "with --goal: the most rates to try", "--goal-tries", group=LOAD)
    precision: float = option(0.05, "with --goal: how near the rate that misses must be", "--goal-precision", group=LOAD)

    def __post_init__(self) -> None:
        if not self.goals:
            raise ConfigError("--goal-tries and --goal-precision need a --goal")
        if self.tries < 1:
            raise ConfigError(f"goal_tries must be at least 1, got {self.tries}")
        if not (math.isfinite(self.precision) and self.precision > 0):
            raise ConfigError(f"goal_precision must be above 0, got {self.precision}")
        base = self.base
        for is_given, flag, why in (
            (base.arrivals.ramp_up is not None, "--ramp-up-strategy", "chooses the rates itself"),
            (base.max_duration is not None, "--max-duration", "needs every answer of a try: --num-prompts says how long one takes"),
            (base.requests_jsonl is not None, "--requests-jsonl", "makes many runs, and that file is of one"),
            (base.publish.record is not None, "--record", "makes many runs, and that file is of one"),
            (base.save.detailed, "--save-detailed", "makes many runs, and the details are of one"),
        ):
            if is_given:
                raise ConfigError(f"--goal {why}: leave out {flag}")


class RateSearch:
    """Bisection between the highest rate that met the limits and the lowest that missed them, doubling or halving until there are both.

    start: the first rate; infinity: all at once, which measures the capacity that the search then begins at.
    """

    def __init__(self, *, start: float, precision: float) -> None:
        self.met: float | None = None
        self.missed: float | None = None
        self._next: float | None = start
        self._precision = precision

    def next_rate(self) -> float | None:
        """None: it is known well enough."""
        return self._next

    def note(self, rate: float, *, is_met: bool, throughput: float) -> None:
        """What a try at `rate` gave; throughput: the requests a second that it completed."""
        if is_met:
            self.met = rate if self.met is None else max(self.met, rate)
        else:
            self.missed = rate if self.missed is None else min(self.missed, rate)
        self._next = self._choose(throughput)

    def _choose(self, throughput: float) -> float | None:
        met, missed = self.met, self.missed
        if met is None:
            assert missed is not None
            return missed / 2 if math.isfinite(missed) else throughput or 1.0
        if math.isinf(met):
            return None
        if missed is None or math.isinf(missed):
            return met * 2
        return None if missed <= met * (1 + self._precision) else (met + missed) / 2
