"""When requests are sent: a rate with its burstiness, or a ramp.

Gaps are drawn from a gamma distribution, of which 1 is the exponential (a Poisson process), smaller values are burstier,
and infinity is an even spacing. They are then scaled so that the run as a whole has exactly the rate that was asked for:
sums of random gaps drift by several percent over a few hundred requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from random import Random
from typing import Any, Literal

from aioengine.errors import ConfigError
from aioengine_bench.options import option
from aioengine_bench.specs import LOAD

RampUpStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class RampUp:
    """The rate grows (or falls) from `start_rps` to `end_rps` over the requests of the run. Raises ConfigError."""

    strategy: RampUpStrategy = option(
        MISSING, "let the rate grow over the run, in place of --request-rate", "--ramp-up-strategy", group=LOAD
    )
    start_rps: float = option(MISSING, "requests a second at the start of the ramp", "--ramp-up-start-rps", group=LOAD)
    end_rps: float = option(MISSING, "requests a second at its end", "--ramp-up-end-rps", group=LOAD)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_rps) and math.isfinite(self.end_rps)) or self.start_rps < 0 or self.end_rps <= 0:
            raise ConfigError(f"a ramp needs finite rates, start >= 0 and end > 0, got {self.start_rps} and {self.end_rps}")
        if self.start_rps > self.end_rps:
            raise ConfigError(f"ramp_up_start_rps ({self.start_rps}) must not exceed ramp_up_end_rps ({self.end_rps})")
        if self.strategy == "exponential" and self.start_rps == 0:
            raise ConfigError("an exponential ramp needs ramp_up_start_rps > 0: zero cannot grow by a factor")

    def rate_at(self, progress: float) -> float:
        """Requests a second when this share (0 to 1) of them has been sent."""
        if self.strategy == "exponential":
            return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)
        return self.start_rps + (self.end_rps - self.start_rps) * progress


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """request_rate: requests a second, infinity sends all at once. burstiness: the gamma shape. Raises ConfigError."""

    request_rate: float = option(math.inf, "requests a second; inf sends all at once", group=LOAD)
    burstiness: float = option(1.0, "1 is Poisson, less is burstier, inf is even", group=LOAD)
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.request_rate) or self.request_rate <= 0:
            raise ConfigError(f"request_rate must be above 0, got {self.request_rate}")
        if math.isnan(self.burstiness) or self.burstiness <= 0:
            raise ConfigError(f"burstiness must be above 0, got {self.burstiness}")
        if self.ramp_up is not None and not math.isinf(self.request_rate):
            raise ConfigError("give either request_rate or a ramp-up, not both")

    def times(self, num_requests: int, random: Random) -> list[float]:
        """Seconds after the start at which each request is due, not decreasing."""
        if self.ramp_up is None and math.isinf(self.request_rate):
            return [0.0] * num_requests
        rates = self._rates(num_requests)
        gaps = [self._draw(random) / rate for rate in rates]
        total = math.fsum(gaps)
        scale = math.fsum(1 / rate for rate in rates) / total if total > 0 else 1.0
        times, now = [], 0.0
        for gap in gaps:
            now += gap * scale
            times.append(now)
        return times

    def _rates(self, num_requests: int) -> list[float]:
        if self.ramp_up is None:
            return [self.request_rate] * num_requests
        # In the middle of each request's share, so that a ramp from zero does not wait for ever.
        return [self.ramp_up.rate_at((index + 0.5) / num_requests) for index in range(num_requests)]

    def _draw(self, random: Random) -> float:
        return 1.0 if math.isinf(self.burstiness) else random.gammavariate(self.burstiness, 1 / self.burstiness)

    def rps_changes(self, times: Sequence[float]) -> list[dict[str, Any]]:
        """Where a ramp passes a whole number of requests a second: {"rps", "time"}, in seconds after the start."""
        if self.ramp_up is None:
            return []
        changes: list[dict[str, Any]] = []
        for time, rate in zip(times, self._rates(len(times)), strict=True):
            if not changes or changes[-1]["rps"] != int(rate):
                changes.append({"rps": int(rate), "time": time})
        return changes


def achieved_rate(times: Sequence[float]) -> float | None:
    """Requests a second over the whole run; None if all arrive at once."""
    return len(times) / times[-1] if times and times[-1] > 0 else None
