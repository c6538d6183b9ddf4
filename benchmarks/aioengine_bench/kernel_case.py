"""What a measurable case of an op is. The cases are in `kernel_cases`, the native variants in `native_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_SIZE = 16
CONTEXT = 512  # cached positions of each request that decodes

Inputs = dict[str, Any]
Op = Callable[[Inputs], tuple[torch.Tensor, ...]]
"""Runs on inputs, which it may change in place, and returns what is to be compared."""


@dataclass(frozen=True, slots=True)
class Variant:
    """tolerance: the largest relative error (norm of the difference over norm of the truth) that counts as right."""

    run: Op
    tolerance: float


@dataclass(frozen=True, slots=True)
class KernelCase:
    """inputs(): fresh ones, always the same. oracle: None where the reference itself is exact."""

    op: str
    num_tokens: int
    inputs: Callable[[], Inputs]
    reference: Op
    variants: Mapping[str, Variant]
    num_bytes: int
    num_flops: float = 0.0

    def oracle(self) -> tuple[torch.Tensor, ...]:
        """What is true: the reference on the same inputs in float64."""
        return self.reference({name: _to_float64(value) for name, value in self.inputs().items()})


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
