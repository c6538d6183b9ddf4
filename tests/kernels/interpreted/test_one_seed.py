"""The same as tests/worker/sample/test_one_seed.py, with the kernels themselves."""

from __future__ import annotations

import pytest

from aioengine_kernels._triton import INTERPRETED
from tests.worker.sample.one_seed import both_samplers, random_case


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_host_and_kernels_give_the_same_tokens_for_the_same_logits_parameters_and_seed(first: int) -> None:
    assert INTERPRETED
    for seed in range(first, first + 40):
        case = random_case(seed)
        host, device = both_samplers(case)
        assert host == device, case
