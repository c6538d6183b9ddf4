"""Matrices of options of which the usual run takes a covering array: every pair of values together at least once.

Most faults need two particular values together, seldom three (Kuhn, Wallace, Gallo, "Software fault interactions", 2004). The
whole product runs with `-m slow`, and in CI, so nothing is left out for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

Point = tuple[Any, ...]

LEFT_TO_CI = (pytest.mark.slow, pytest.mark.ci)
"""For what `make test` leaves out because it says nothing new, only more of it."""


def every_pair(*factors: Sequence[Any], valid: Callable[..., bool] | None = None) -> list[Any]:
    """The points of the product as parameters for `pytest.mark.parametrize`, all left to CI but for a covering array.

    valid: says which points there are at all, by its positional arguments; all of them without it.
    """
    points = [point for point in itertools.product(*factors) if valid is None or valid(*point)]
    chosen = covering_array(points)
    return [pytest.param(*point, marks=() if number in chosen else LEFT_TO_CI) for number, point in enumerate(points)]


def covering_array(points: Sequence[Point]) -> set[int]:
    """Numbers of a few points that have every pair of values which any of `points` has. Always the same ones.

    Greedy: whichever has most pairs that are missing, the first of equals.
    """
    pairs = [frozenset(_pairs(point)) for point in points]
    missing = set[Any]().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(points)), key=lambda number: (len(pairs[number] & missing), -number))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _pairs(point: Point) -> Iterator[tuple[int, int, str, str]]:
    """Of positions and values; of a single factor, the value with itself."""
    for first, second in itertools.combinations(range(len(point)), 2) if len(point) > 1 else ((0, 0),):
        yield first, second, repr(point[first]), repr(point[second])
