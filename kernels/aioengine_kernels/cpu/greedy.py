"""The arg-max of a product with a large matrix, such as a model's head, without the whole of the exact product (`src/greedy.h`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from aioengine_kernels.cpu.kernels import CpuKernels
from aioengine_kernels.cpu.packing import PackedMatrix, gather_rows

# Instruction set -> the formats whose product is faster with 8-bit activations.
_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType({"portable": (), "avx2": ("Q4_0",), "avx512": ("Q4_0", "Q8_0", "Q6_K")})
_NARROW = ("Q4_0",)  # the others take one row no less time to read than two digits take to multiply
_ROWS_AT_ONCE = 4096


class GreedyHead:
    """Holds the norm of every row of the matrix: they bound what rounding the activations can change."""

    def __init__(self, kernels: CpuKernels, matrix: PackedMatrix, norms: torch.Tensor) -> None:
        """See `build`."""
        self._kernels, self._matrix, self._norms = kernels, matrix, norms
        self._largest_norm = float(norms.max())

    @classmethod
    def build(cls, kernels: CpuKernels, matrix: PackedMatrix) -> GreedyHead | None:
        """None where the exact product is as fast, or a weight is not finite."""
        if matrix.kind not in _KINDS[kernels.isa]:
            return None
        norms = _norm_bounds(matrix)
        return cls(kernels, matrix, norms) if bool(norms.isfinite().all()) else None

    def columns(self, x: torch.Tensor, *, scores: torch.Tensor) -> torch.Tensor | None:
        """x [m, columns] -> [m] int64: where each row of `linear(x, matrix)` has its largest number, the first of equal ones.

        scores [m, rows] is overwritten. None where the exact product has to say: for a row that is not finite or
        has too many candidates, and where it is as fast: for one row and 8-bit weights.
        """
        if len(x) == 1 and self._matrix.kind not in _NARROW:
            return None
        out = torch.empty(x.shape[0], dtype=torch.int64)
        found = self._kernels.find_largest(x, self._matrix, norms=self._norms, largest_norm=self._largest_norm, scores=scores, out=out)
        return out if found else None


def _norm_bounds(matrix: PackedMatrix) -> torch.Tensor:  # [rows] float32, none below the row's norm
    norms = torch.empty(matrix.rows)
    for start in range(0, matrix.rows, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, matrix.rows)
        torch.linalg.vector_norm(gather_rows(matrix, torch.arange(start, end)), dim=1, out=norms[start:end])
    # A float32 sum of n squares is off by n roundings at most; squares of numbers below 1e-18 may be lost altogether.
    return norms.mul_(1 + matrix.columns * 2.0**-23).add_(math.sqrt(matrix.columns) * 1e-18)
