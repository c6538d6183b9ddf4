"""Root-mean-square normalisation (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from aioengine.layers.triton_ops import find_triton_op


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. With weights in a wider dtype than x it is computed in that one."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)  # [size]
        self.eps = eps
        self.normalized_shape = (size,)
        self.triton_op = find_triton_op("rms_norm:rms_norm", device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]."""
        if self.triton_op is not None and x.dim() == 2:
            return self.triton_op(x, self.weight, eps=self.eps)
        return self._norm(x)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and return the normalised sum. Both [..., size]."""
        if self.triton_op is not None and x.dim() == 2:
            return self.triton_op(x, self.weight, eps=self.eps, residual=residual)
        return self._norm(residual.add_(x))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
