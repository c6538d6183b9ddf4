"""The one place that knows whether Triton can be used, and the decorator every kernel carries.

Triton ships for Linux only and its interpreter is chosen when it is first imported, so both are settled here, once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

import torch

__all__ = ["HAS_TRITON", "INTERPRETED", "cdiv", "dispatcher", "jit", "next_power_of_2", "tl", "use_triton"]

if TYPE_CHECKING:
    # A kernel's body is Triton, not Python: mypy is told to look away from it, and a kernel object is Any to its launcher.
    from typing import no_type_check as jit

    import triton.language as tl

    HAS_TRITON: Final = True
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        HAS_TRITON = False
        tl = None

        class _MissingKernel:
            """Stands where a kernel would be, so that a module imports without Triton."""

            def __init__(self, function):
                self.name = function.__name__

            def __getitem__(self, grid):
                raise RuntimeError(f"{self.name} needs Triton, which is not installed; call the dispatcher or the _ref function")

        def jit(function):
            return _MissingKernel(function)
    else:
        from aioengine_kernels.launcher import Kernel

        HAS_TRITON = True

        def jit(function):
            """triton.jit, where a parameter annotated `tl.int32` is a count that changes from step to step.

            Triton compiles a variant of a kernel for arguments that are 1 or divisible by 16; for a number of requests or
            tokens that would mean a compilation in the middle of serving, so those parameters are not specialized.
            A kernel, unlike the functions that it calls, has `_kernel` at the end of its name.
            """
            counts = [name for name, annotation in function.__annotations__.items() if annotation == "tl.int32"]
            compiled = triton.jit(function, do_not_specialize=counts)
            return Kernel(compiled, counts=counts) if function.__name__.endswith("_kernel") else compiled


INTERPRETED: Final = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(tensor: torch.Tensor) -> bool:
    """True if kernels should run on `tensor`: it lies on a CUDA device, or Triton's interpreter was asked for."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


P = ParamSpec("P")
R = TypeVar("R")
Op = Callable[Concatenate[torch.Tensor, P], R]


def dispatcher(*, triton: Op[P, R], reference: Op[P, R]) -> Op[P, R]:
    """The op that runs `triton` where `use_triton` says so of its first argument, else `reference`, which says what it does.

    Both have the op's signature: a type checker holds them to it.
    """

    @functools.wraps(reference)
    def op(first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return (triton if use_triton(first) else reference)(first, *args, **kwargs)

    op.__name__ = op.__qualname__ = reference.__name__.removesuffix("_ref")
    return op


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`; Triton's tensors have such extents only."""
    return 1 << max(value - 1, 0).bit_length()
