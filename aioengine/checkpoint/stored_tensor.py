"""One tensor of a checkpoint, whatever the format of its file: handed out unread, and read where it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Quantized rows as the file stores them; blocks run along the columns, so rows can be taken apart."""

    kind: str  # "Q4_1", "Q8_0", ...: the names of ggml
    data: torch.Tensor  # [rows, bytes_per_row] uint8


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """`PackedRows` that cost something to make: who asks for the kind alone does not pay for it."""

    kind: str
    read: Callable[[], torch.Tensor]

    @property
    def data(self) -> torch.Tensor:
        return self.read()


class StoredTensor(Protocol):
    """One tensor of a checkpoint, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, out: torch.Tensor) -> None:
        """Fill `out` ([*shape], any float dtype, any device), dequantizing exactly and then casting."""

    def read_packed(self) -> PackedRows | UnreadRows | None:
        """The quantized rows, or None if the tensor is stored as plain numbers."""


@dataclass(frozen=True, slots=True)
class Zeros:
    """A `StoredTensor` that no file has: a bias that is left out."""

    name: str
    shape: tuple[int, ...]

    def read_into(self, out: torch.Tensor) -> None:
        out.zero_()

    def read_packed(self) -> PackedRows | None:
        return None
