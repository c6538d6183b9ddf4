"""Every test of the native kernels runs once for each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aioengine_kernels.cpu import CpuKernels, status, supported_isas

REASON = status()
ISAS = supported_isas() if REASON is None else ("none",)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    if REASON is not None:
        pytest.skip(REASON)
    return str(request.param)


@pytest.fixture
def kernels(isa: str) -> CpuKernels:
    return CpuKernels(isa=isa, num_threads=2)


@pytest.fixture
def randn() -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)
