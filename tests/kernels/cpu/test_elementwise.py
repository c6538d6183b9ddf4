"""RMS norm with residual, and SiLU or GELU times up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from aioengine_kernels.cpu import CpuKernels

Randn = Callable[..., torch.Tensor]


@pytest.mark.parametrize("n", [1, 7, 64, 100, 576, 1000])
def test_rms_norm(kernels: CpuKernels, n: int, randn: Randn) -> None:
    for m in (1, 3, 90):
        x, residual, weight = randn(m, n + 5)[:, :n], randn(m, n + 3)[:, :n], randn(n)
        want = F.rms_norm(x.double(), (n,), weight.double(), 1e-5)
        assert torch.allclose(kernels.rms_norm(x, weight, eps=1e-5).double(), want, rtol=1e-5, atol=1e-6)
        total = residual + x
        want = F.rms_norm(total.double(), (n,), weight.double(), 1e-5)
        got = kernels.rms_norm(x, weight, eps=1e-5, residual=residual)
        assert torch.equal(residual, total)
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 7, 64, 100, 1536])
def test_silu_mul(kernels: CpuKernels, n: int, randn: Randn) -> None:
    for m in (1, 3, 40):
        x = randn(m, 2 * n + 5)[:, : 2 * n] * 20
        want = F.silu(x[:, :n].double()) * x[:, n:].double()
        assert torch.allclose(kernels.silu_mul(x).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 7, 64, 100, 1536])
def test_gelu_mul(kernels: CpuKernels, n: int, randn: Randn) -> None:
    for m in (1, 3, 40):
        x = randn(m, 2 * n + 5)[:, : 2 * n] * 4
        want = F.gelu(x[:, :n].double(), approximate="tanh") * x[:, n:].double()
        assert torch.allclose(kernels.gelu_mul(x).double(), want, rtol=1e-5, atol=1e-6)


def test_rows_alone_and_in_a_batch(isa: str, randn: Randn) -> None:
    one, two = CpuKernels(isa=isa, num_threads=1), CpuKernels(isa=isa, num_threads=2)
    x, weight = randn(70, 1152), randn(1152)
    for kernels in (one, two):
        assert torch.equal(torch.cat([one.silu_mul(row[None]) for row in x]), kernels.silu_mul(x))
        assert torch.equal(torch.cat([one.gelu_mul(row[None]) for row in x]), kernels.gelu_mul(x))
        alone = torch.cat([one.rms_norm(row[None], weight, eps=1e-6) for row in x])
        assert torch.equal(alone, kernels.rms_norm(x, weight, eps=1e-6))


def test_silu_at_the_ends(kernels: CpuKernels) -> None:
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4])
    got = kernels.silu_mul(torch.cat((gate, torch.ones(6)))[None])[0]
    assert torch.allclose(got, torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 1e4]), atol=1e-30)


def test_gelu_at_the_ends(kernels: CpuKernels) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, 0.0, 88.0, 1e4, 1e30])
    got = kernels.gelu_mul(torch.cat((gate, torch.ones(7)))[None])[0]
    assert torch.allclose(got, torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 1e4, 1e30]), atol=1e-7)
