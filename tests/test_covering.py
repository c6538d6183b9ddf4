"""What the usual run takes of a matrix has every pair of values, and is small."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import LEFT_TO_CI, covering_array, every_pair


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_every_pair_of_values_is_in_a_covering_array(sizes: list[int]) -> None:
    points = list(itertools.product(*(range(size) for size in sizes)))
    chosen = [points[number] for number in covering_array(points)]
    for first, second in itertools.product(range(len(sizes)), repeat=2):
        assert {(point[first], point[second]) for point in chosen} == {(point[first], point[second]) for point in points}
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 2 * largest[0] * largest[-1] + 2, "a covering array needs little more than the product of the two largest"


def test_the_rest_of_the_product_is_left_to_ci_and_nothing_is_missing() -> None:
    parameters = every_pair([1, 2], "ab", [True, False], [None, 4], [0.5, 2.0])
    assert [parameter.values for parameter in parameters] == list(itertools.product([1, 2], "ab", [True, False], [None, 4], [0.5, 2.0]))
    usual = [parameter for parameter in parameters if not parameter.marks]
    assert len(usual) <= 7
    assert all(parameter.marks in ((), LEFT_TO_CI) for parameter in parameters)


def test_points_that_there_are_not_are_left_out() -> None:
    parameters = every_pair([1, 2, 3], [1, 2, 3], valid=lambda x, y: x <= y)
    assert all(parameter.values[0] <= parameter.values[1] for parameter in parameters)
    assert len(parameters) == 6
