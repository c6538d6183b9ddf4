"""What a LoRA adapter adds to the products of a `NativeDecoder`, packed: see `LowRank` in src/common.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from aioengine_kernels.cpu.abi import LowRank, Matrix
from aioengine_kernels.cpu.packing import PackedMatrix, pack_dense

PRODUCTS = ("qkv", "output", "gate_up", "down")
# Neighbouring rows of a product, how many, and what is added to them: x A^T B^T with A [rank, columns], B [rows, rank]; or nothing.
LowRankPart = tuple[int, torch.Tensor | None, torch.Tensor | None]


class PackedAdapter:
    """The matrices of all layers, with their addresses."""

    def __init__(self, layers: Sequence[Mapping[str, Sequence[LowRankPart]]], *, fast: bool = False) -> None:
        """layers: of each, the parts of its products. Raises ValueError for shapes that do not fit together.

        Each matrix is kept in the narrowest dtype that holds its numbers exactly. fast: float16 will do, whose error of 2^-12 is far
        below that of activations in 8 bits: a step reads the matrices of all its adapters, so half the bytes count.
        """
        self._fast = fast
        self._kept: list[PackedMatrix] = []
        self._parts: list[Matrix] = []
        self.shapes: list[dict[str, tuple[int, int | None]]] = []  # rows and columns of each product; None: nothing is added to it
        self._table = (LowRank * (len(layers) * len(PRODUCTS)))()
        for index, layer in enumerate(layers):
            shapes: dict[str, tuple[int, int | None]] = {}
            for place, product in enumerate(PRODUCTS):
                shapes[product] = self._fill(self._table[index * len(PRODUCTS) + place], layer[product])
            self.shapes.append(shapes)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._table)

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._kept)

    def _fill(self, struct: LowRank, parts: Sequence[LowRankPart]) -> tuple[int, int | None]:
        num_rows = sum(rows for rows, _, _ in parts)
        down = [a for _, a, b in parts if a is not None and b is not None]
        if not down:
            return num_rows, None
        for rows, a, b in parts:
            if a is not None and b is not None and b.shape != (rows, a.shape[0]):
                raise ValueError(f"B must be [{rows}, {a.shape[0]}], got {list(b.shape)}")
        struct.down = self._pack(torch.cat(down))
        following: int | None = None
        for rows, a, b in reversed(parts):
            part = Matrix(n=rows) if a is None or b is None else self._pack(b)
            part.next = following
            self._parts.append(part)
            following = ctypes.addressof(part)
        struct.up = following
        return num_rows, down[0].shape[1]

    def _pack(self, weight: torch.Tensor) -> Matrix:
        packed = pack_dense(_narrowest(weight, fast=self._fast))
        self._kept.append(packed)
        return Matrix(weights=packed.data.data_ptr(), n=packed.rows, k=packed.columns, format=packed.format)


def _narrowest(weight: torch.Tensor, *, fast: bool) -> torch.Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.float(), weight) or (fast and dtype is torch.float16 and bool(narrow.isfinite().all())):
            return narrow
    return weight
