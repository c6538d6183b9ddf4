"""The repairs in aioengine_kernels.interpreter themselves: without them these fail."""

from __future__ import annotations

import pytest
import torch

from aioengine_kernels._triton import jit, tl


@jit
def _cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane).to(out_ptr.dtype.element_ty))


@jit
def _bf16_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    a = tl.load(a_ptr + lane)
    b = tl.load(b_ptr + lane)
    tl.store(out_ptr + lane, tl.where(a < b, a * b, a + b))


@jit
def _assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_casts_round_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.randn(1024) * 10
    out = torch.empty(1024, dtype=dtype)
    _cast_kernel[(1,)](x, out, 1024)
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.empty(1024)
    _cast_kernel[(1,)](out, back, 1024)
    assert torch.equal(back, out.float())


def test_bfloat16_arithmetic_and_comparison() -> None:
    a, b = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    out = torch.empty_like(a)
    _bf16_kernel[(1,)](a, b, out, 256)
    assert torch.equal(out, torch.where(a < b, a * b, a + b))


def test_reads_and_writes_past_a_tensor_are_caught() -> None:
    with pytest.raises(Exception, match="load: 4 of 16 lanes out of bounds"):
        _cast_kernel[(1,)](torch.zeros(12), torch.zeros(16), 16)
    with pytest.raises(Exception, match="store: 4 of 16 lanes out of bounds"):
        _cast_kernel[(1,)](torch.zeros(16), torch.zeros(12), 16)


def test_device_assert_counts() -> None:
    _assert_kernel[(1,)](torch.tensor([1]))
    with pytest.raises(Exception, match="not positive"):
        _assert_kernel[(1,)](torch.tensor([0]))
