"""Requests are sent when they should be."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest

from aioengine.errors import ConfigError
from aioengine_bench.arrivals import ArrivalProcess, RampUp, achieved_rate


@pytest.mark.parametrize("burstiness", [0.1, 0.5, 1.0, 4.0, math.inf])
@pytest.mark.parametrize("rate", [0.5, 3.0, 250.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rate_is_hit_within_one_percent_over_200_arrivals(rate: float, burstiness: float, seed: int) -> None:
    times = ArrivalProcess(request_rate=rate, burstiness=burstiness).times(200, Random(seed))
    achieved = achieved_rate(times)
    assert achieved is not None
    assert abs(achieved / rate - 1) < 0.01
    assert times == sorted(times)


def test_infinity_sends_all_at_once() -> None:
    assert ArrivalProcess().times(3, Random(0)) == [0.0, 0.0, 0.0]
    assert achieved_rate([0.0, 0.0]) is None


def test_infinite_burstiness_spaces_evenly() -> None:
    times = ArrivalProcess(request_rate=2.0, burstiness=math.inf).times(4, Random(0))
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_smaller_burstiness_varies_more() -> None:
    def spread(burstiness: float) -> float:
        times = ArrivalProcess(request_rate=1.0, burstiness=burstiness).times(2000, Random(0))
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return math.sqrt(math.fsum((gap - 1) ** 2 for gap in gaps) / len(gaps))

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)  # exponential: the deviation is the mean
    assert spread(0.25) == pytest.approx(2.0, rel=0.15)
    assert spread(4.0) == pytest.approx(0.5, rel=0.1)


def test_the_seed_fixes_the_times() -> None:
    process = ArrivalProcess(request_rate=5.0)
    assert process.times(50, Random(7)) == process.times(50, Random(7))
    assert process.times(50, Random(7)) != process.times(50, Random(8))


def test_a_linear_ramp_from_zero_starts_and_speeds_up() -> None:
    process = ArrivalProcess(burstiness=math.inf, ramp_up=RampUp("linear", 0.0, 10.0))
    times = process.times(100, Random(0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] == pytest.approx(1 / 9.95)
    changes = process.rps_changes(times)
    assert [change["rps"] for change in changes] == list(range(10))


def test_an_exponential_ramp_grows_by_factors() -> None:
    ramp = RampUp("exponential", 1.0, 16.0)
    assert [ramp.rate_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 2.0, 4.0, 16.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ArrivalProcess(request_rate=0), "request_rate must be above 0, got 0"),
        (lambda: ArrivalProcess(request_rate=math.nan), "request_rate must be above 0"),
        (lambda: ArrivalProcess(burstiness=0), "burstiness must be above 0"),
        (lambda: RampUp("linear", 5.0, 1.0), "must not exceed"),
        (lambda: RampUp("exponential", 0.0, 1.0), "needs ramp_up_start_rps > 0"),
        (lambda: RampUp("linear", 0.0, math.inf), "finite rates"),
        (lambda: ArrivalProcess(request_rate=1.0, ramp_up=RampUp("linear", 1.0, 2.0)), "either request_rate or a ramp-up"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
