"""What `aioengine bench simulate` is told beside what `bench serve` is. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aioengine.errors import ConfigError
from aioengine_bench.goal import Goal, parse_goals
from aioengine_bench.options import option
from aioengine_bench.simulate.plan import Value, parse_ranges, parse_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """Raises ConfigError where they contradict each other."""

    trace: str | None = option(
        None, "traffic to simulate: Azure's or BurstGPT's CSV, Mooncake's JSON lines", metavar="FILE", unset="the dataset below"
    )
    from_recording: str | None = option(None, "traffic, settings and costs of what --record wrote", metavar="FILE", unset="")
    changes: Mapping[str, Value] = option(
        {}, "settings to change, such as max_num_seqs=8", "--set", metavar="K=V", nargs="+", unset="", convert=parse_settings
    )
    num_requests: int | None = option(None, "requests; a trace is repeated for more", unset="all of the traffic")
    speed: float = option(1.0, "requests come that much faster than they did")
    cost: str | None = option(None, "fit the costs to this recording", metavar="FILE", unset="the roofline")
    roofline: str = option("llama-3-8b,h100", "costs from the shape of a model and a device", metavar="MODEL,DEVICE")
    replicas: int = option(1, "engines")
    routing: Literal["round_robin", "least_loaded", "prefix_aware"] = option("round_robin", "which engine gets a request")
    sweep: Mapping[str, Sequence[Value]] = option(
        {}, "simulate each of these, such as speed=1,2,4 or max_num_seqs=16:256", metavar="K=V", nargs="+", unset="", convert=parse_ranges
    )
    vary: Mapping[str, Sequence[Value]] = option(
        {}, "with --goal: the settings to search, as in --sweep", metavar="K=V", nargs="+", unset="", convert=parse_ranges
    )
    goals: Sequence[Goal] = option(
        (),
        "limits in milliseconds, such as ttft_p99<=500,tpot_p50<=40",
        "--goal",
        metavar="LIMITS",
        unset="",
        type=str,
        convert=parse_goals,
    )
    record: str | None = None  # write the events of the first engine there

    def __post_init__(self) -> None:
        if self.from_recording is not None and (self.trace is not None or self.cost is not None):
            raise ConfigError("--from-recording brings its own traffic and costs: leave out --trace and --cost")
        if self.vary and not self.goals:
            raise ConfigError("--vary searches for a --goal: give one, or use --sweep")
        if twice := sorted(self.sweep.keys() & self.vary.keys()):
            raise ConfigError(f"{', '.join(twice)} is in both --sweep and --vary")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"num_requests must be at least 1, got {self.num_requests}")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ConfigError(f"speed must be above 0, got {self.speed}")
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}")
