"""A matrix product whose rows may come from several checkpoint tensors (q, k, v; gate, up)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from aioengine.distributed.group import SINGLE_RANK, Group


class Linear(nn.Module):
    """y = x W^T + b, with W made of one part for each of `out_sizes`, stacked along the rows.

    Stacking turns three products on the same input into one, which matters most for a few tokens a step.
    Parameters are uninitialised until every `part` is filled.
    """

    def __init__(self, in_features: int, out_sizes: Sequence[int], *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_sizes = tuple(out_sizes)
        self.out_features = sum(out_sizes)
        weight = torch.empty(self.out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)  # [out_features, in_features]
        self.bias: nn.Parameter | None = None  # [out_features]
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device), requires_grad=False)

    def part(self, kind: str, index: int) -> torch.Tensor | None:
        """The rows of "weight" or "bias" that one checkpoint tensor fills, to be written to; None without such a parameter."""
        parameter = self.weight if kind == "weight" else self.bias if kind == "bias" else None
        start = sum(self.out_sizes[:index])
        return None if parameter is None else parameter.data[start : start + self.out_sizes[index]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(Linear):
    """The product that ends attention or an MLP. Of several ranks each holds some columns of W, and x holds only those: the
    products are summed over the ranks. (Megatron-LM calls it row-parallel, as its W is the transpose: arXiv:1909.08053.)

    The bias is in the sum, so one rank has it, and the others zeros.
    """

    group: Group = SINGLE_RANK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        product = F.linear(x, self.weight, self.bias)
        return product if self.group.size == 1 else self.group.all_reduce(product)
