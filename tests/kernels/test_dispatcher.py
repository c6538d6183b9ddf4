"""One dispatcher for the ops whose reference takes the kernel's arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

from aioengine_kernels import _triton
from aioengine_kernels._triton import dispatcher


def add_triton(x: torch.Tensor, other: torch.Tensor, *, scale: float = 1.0) -> str:
    return "triton"


def add_ref(x: torch.Tensor, other: torch.Tensor, *, scale: float = 1.0) -> str:
    """x + scale * other."""
    return f"reference, {scale}"


def test_an_op_has_the_name_text_and_arguments_of_its_reference_and_goes_by_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    add = dispatcher(triton=add_triton, reference=add_ref)
    seen: list[torch.Tensor] = []

    def use_triton(tensor: torch.Tensor) -> bool:
        seen.append(tensor)
        return len(seen) > 1

    monkeypatch.setattr(_triton, "use_triton", use_triton)
    x = torch.ones(2)
    assert add(x, x, scale=3.0) == "reference, 3.0"
    assert add(x, x) == "triton"
    assert all(tensor is x for tensor in seen)
    assert add.__name__ == "add"
    assert add.__doc__ == "x + scale * other."
    assert inspect.signature(add) == inspect.signature(add_ref)
