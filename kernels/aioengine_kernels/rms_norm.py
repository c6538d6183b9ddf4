"""RMSNorm, alone or fused with the addition of the residual stream."""

from __future__ import annotations

import torch

from aioengine_kernels._triton import dispatcher, jit, next_power_of_2, tl


@jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    hidden_size,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden_size
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptr + row * residual_stride + column, x.to(residual_ptr.dtype.element_ty), mask=mask)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 0) / hidden_size + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + weight_offset
    tl.store(out_ptr + row * out_stride + column, (x * inverse_rms * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, weight_offset: float = 0.0
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) x (weight + weight_offset), computed in float32 (Zhang and Sennrich, 2019).

    x: [n, hidden_size], last dimension dense; weight: [hidden_size]. With `residual` [n, hidden_size], x + residual is
    normalized and stored back into `residual` in place, as the next block's residual stream. Gemma's weights take
    weight_offset=1. Returns a new [n, hidden_size] tensor of x's dtype.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    hidden = x.to(dtype)
    if residual is not None:
        hidden = hidden + residual.to(dtype)
        residual.copy_(hidden)
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(dtype) + weight_offset)).to(x.dtype)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, weight_offset: float = 0.0
) -> torch.Tensor:
    """Launch the kernel of `rms_norm`; the arguments are those of `rms_norm`."""
    num_rows, hidden_size = x.shape
    out = torch.empty(num_rows, hidden_size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block = next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        hidden_size,
        eps,
        weight_offset,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


rms_norm = dispatcher(triton=rms_norm_triton, reference=rms_norm_ref)
