"""A seed means the same tokens on the host and on a device (whose kernels are their references here)."""

from __future__ import annotations

import pytest

from tests.worker.sample.one_seed import both_samplers, random_case


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_host_and_device_give_the_same_tokens_for_the_same_logits_parameters_and_seed(first: int) -> None:
    for seed in range(first, first + 100):
        case = random_case(seed)
        host, device = both_samplers(case)
        assert host == device, case
