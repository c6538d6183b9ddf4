"""A matrix product whose rows may come from several checkpoint tensors (q, k, v; gate, up)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from aioengine.layers.weight_format import DenseFormat, StoredTensor, WeightFormat


class Linear(nn.Module):
    """y = x W^T + b, with W made of one part for each of `out_sizes`, stacked along the rows.

    Stacking turns three products on the same input into one, which matters most for a few tokens a step.
    Parameters are uninitialised until `load_part` has filled every part.
    """

    weight: nn.Parameter  # [out_features, in_features]
    bias: nn.Parameter | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_sizes: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_sizes = tuple(out_sizes)
        self.out_features = sum(out_sizes)
        self.has_bias = bias
        self.weight_format = weight_format or DenseFormat()
        self.weight_format.create(self, bias=bias, dtype=dtype, device=device)

    def part_shape(self, kind: str, part: int) -> tuple[int, ...] | None:
        """The shape of one part of "weight" or "bias"; None if this layer has no such parameter."""
        if kind == "weight":
            return (self.out_sizes[part], self.in_features)
        return (self.out_sizes[part],) if kind == "bias" and self.has_bias else None

    def load_part(self, kind: str, part: int, stored: StoredTensor) -> None:
        """Read a checkpoint tensor of shape `part_shape(kind, part)` into its rows."""
        start = sum(self.out_sizes[:part])
        self.weight_format.load(self, kind, slice(start, start + self.out_sizes[part]), stored)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.weight_format.apply(self, x)
