"""The draw that the host's sampler and the reference of the device's share. Free of Triton, which a CPU engine never imports."""

from __future__ import annotations

import torch


def inverse_cdf(
    weights: torch.Tensor,  # [n, width] >= 0; they need not add up to 1
    numbers: torch.Tensor,  # [n] float64 in [0, 1)
) -> torch.Tensor:  # [n] int64, below width
    """The first index whose cumulative weight exceeds number * total: never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = numbers[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Only weights that are NaN get past the end.
    return index.clamp_(max=weights.shape[1] - 1)
