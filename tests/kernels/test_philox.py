from __future__ import annotations

import numpy as np
import pytest

from aioengine_kernels.philox import philox4x32, uniform


# The known answers that the authors' Random123 library ships for philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    c0, c1, c2, c3 = (np.array([c], dtype=np.uint64) for c in counter)
    k0, k1 = (np.array([k], dtype=np.uint64) for k in key)
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == expected


def test_a_row_is_a_function_of_its_seed_and_index() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 1, 0], dtype=np.uint64)
    indices = np.array([0, 0, 5, 2**33, 1, 0])
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(len(seeds))]
    assert together.tolist() == alone
    assert together[0] == together[5]
    assert len(set(together.tolist())) == 5  # seed, high half of the seed and index all matter


def test_uniform_over_indices_and_over_seeds() -> None:
    count = 40_000
    for numbers in (
        uniform(np.full(count, 7, dtype=np.uint64), np.arange(count)),
        uniform(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        observed, _ = np.histogram(numbers, bins=50, range=(0, 1))
        chi_square = ((observed - count / 50) ** 2 / (count / 50)).sum()
        assert chi_square < 100  # 49 degrees of freedom: 1e-5 of all seeds would exceed 100
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
