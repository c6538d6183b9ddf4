"""How a layer keeps its weights: the seam between what a checkpoint stores and what a matrix product reads.

A checkpoint hands out `StoredTensor`s, which are read only when asked. A `WeightFormat` decides what a `Linear` keeps
of them and multiplies with it. `DenseFormat` keeps plain tensors; a packed format would keep the stored blocks
(`StoredTensor.read_packed`) and its own `apply`, with no change to models or loader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from aioengine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Quantized rows as the file stores them; blocks run along the columns, so rows can be taken apart."""

    kind: str  # "Q4_1", "Q8_0", ...: the names of ggml
    data: torch.Tensor  # [rows, bytes_per_row] uint8


class StoredTensor(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, out: torch.Tensor) -> None:
        """Fill `out` ([*shape], any float dtype, any device), dequantizing exactly and then casting."""

    def read_packed(self) -> PackedRows | None:
        """The quantized rows, or None if the tensor is stored as plain numbers."""


class WeightFormat(ABC):
    """What a `Linear` keeps, and how it multiplies. One instance may serve many layers: it holds no weights."""

    @abstractmethod
    def create(self, layer: Linear, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Register uninitialised parameters on `layer`."""

    @abstractmethod
    def load(self, layer: Linear, kind: str, rows: slice, stored: StoredTensor) -> None:
        """Take `stored` as rows `rows` of the layer's "weight" or "bias"."""

    @abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""


class DenseFormat(WeightFormat):
    """One [out_features, in_features] tensor in the model's dtype."""

    def create(self, layer: Linear, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device=device)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.bias = torch.nn.Parameter(torch.empty(layer.out_features, dtype=dtype, device=device), requires_grad=False) if bias else None

    def load(self, layer: Linear, kind: str, rows: slice, stored: StoredTensor) -> None:
        target = layer.weight if kind == "weight" else layer.bias
        assert target is not None  # the loader asks `Linear.has` first
        stored.read_into(target.data[rows])

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight, layer.bias)
