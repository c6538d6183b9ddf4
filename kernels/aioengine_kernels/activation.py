"""The gated activations of feed-forward layers, over a fused gate-and-up projection."""

from __future__ import annotations

import math
from typing import Final

import torch

from aioengine_kernels._triton import cdiv, dispatcher, jit, tl

_BLOCK = 1024
_GELU_SLOPE: Final = math.sqrt(2.0 / math.pi)


@jit
def _gated_activation_kernel(x_ptr, out_ptr, x_stride, out_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    # The tanh form of GELU is 0.5 x (1 + tanh(y)) = x sigmoid(2y).
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    tl.store(out_ptr + row * out_stride + column, (gate * tl.sigmoid(slope) * up).to(out_ptr.dtype.element_ty), mask=mask)


def _gated_triton(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    num_rows, double_size = x.shape
    size = double_size // 2
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows > 0:
        _gated_activation_kernel[(num_rows, cdiv(size, _BLOCK))](
            x, out, x.stride(0), out.stride(0), size, GELU=gelu, BLOCK=_BLOCK, num_warps=4
        )
    return out


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return gate, up


def silu_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up (SwiGLU; Shazeer, 2020). x: [n, 2 x size], gate first, last dimension dense; returns [n, size]."""
    gate, up = _halves(x)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def silu_mul_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel of `silu_mul`; the arguments are those of `silu_mul`."""
    return _gated_triton(x, gelu=False)


silu_mul = dispatcher(triton=silu_mul_triton, reference=silu_mul_ref)


def gelu_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) x up, with the tanh form of GELU that Gemma uses. x: [n, 2 x size], gate first; returns [n, size]."""
    gate, up = _halves(x)
    return (0.5 * gate * (1.0 + torch.tanh(_GELU_SLOPE * (gate + 0.044715 * gate**3))) * up).to(x.dtype)


def gelu_mul_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernel of `gelu_mul`; the arguments are those of `gelu_mul`."""
    return _gated_triton(x, gelu=True)


gelu_mul = dispatcher(triton=gelu_mul_triton, reference=gelu_mul_ref)
