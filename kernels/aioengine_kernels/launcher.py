"""Launching a compiled Triton kernel again, without what Triton does at every launch.

Triton's own launch binds the arguments by name, works out their specialization, makes a string of it and of the options, and looks
that up: 10 to 20 us of Python, against 2 to 3 us for the driver's part. The kernels here are launched some hundred times a step with
few variants each, so a launch looks up the compiled kernel by the arguments themselves, and hands plain addresses to the driver.

What makes a variant is what Triton compiles for: the constants, the types, integers that are no counts by their values (strides and
sizes, the same in every step), and whether addresses are multiples of 16. A launch with any address that is not takes Triton's way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

_INT32 = 1 << 31


class Kernel:
    """A jitted function, launched as `kernel[grid](*arguments, CONSTANT=..., num_warps=...)`, constants by name and the rest by place.

    It keeps the variants that were launched, as Triton's own function does: what is compiled lives as long as the module.
    """

    def __init__(self, function: Any, *, counts: Sequence[str]) -> None:
        self.function = function
        self.name: str = function.fn.__name__
        parameters = list(inspect.signature(function.fn).parameters)
        names = [name for name in parameters if not name.isupper()]
        assert parameters[: len(names)] == names, f"{self.name}: constants are in capitals and come last"
        self._is_count = tuple(name in counts for name in parameters)
        self._variants: dict[tuple[Any, ...], Callable[..., None] | None] = {}
        self._is_interpreted = not hasattr(function, "device_caches")

    @property
    def num_variants(self) -> int:
        """How many were launched: each of them was compiled."""
        return len(self._variants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
        """Run the kernel on the current stream of the current device."""
        key, values, is_aligned = self._describe(arguments, constants)
        if self._is_interpreted:
            self._variants.setdefault(key)
            self.function[grid](*arguments, **constants)
            return
        run = self._variants.get(key)
        if run is None or not is_aligned:
            compiled = self.function[grid](*arguments, **constants)
            self._variants[key] = _runner(compiled, self.function, constants) if is_aligned else None
            return
        run(grid, values)

    def _describe(self, arguments: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any], bool]:
        """What the launch is a variant of, the arguments with addresses for tensors, and whether all of those are multiples of 16."""
        key: list[Any] = [torch.cuda.current_device() if torch.cuda.is_initialized() else -1, *constants.values()]
        values = list(arguments)
        addresses = 0
        for place, argument in enumerate(arguments):
            kind = type(argument)
            if kind is int:
                if not self._is_count[place]:
                    key.append(argument)
                elif not -_INT32 <= argument < _INT32:
                    raise OverflowError(f"{self.name}: a count of {argument} is no 32-bit integer")
            elif not isinstance(argument, torch.Tensor):
                if kind is not float:
                    key.append(argument)  # a constant given by place
            else:
                values[place] = address = argument.data_ptr()
                addresses |= address
                key.append(argument.dtype)
        is_aligned = addresses & 15 == 0
        key.append(is_aligned)
        return tuple(key), values, is_aligned


def _runner(compiled: Any, function: Any, constants: dict[str, Any]) -> Callable[[tuple[int, ...], list[Any]], None] | None:
    """How to launch a compiled variant: `run(grid, values)`; None where Triton only compiled it."""
    from triton.runtime import driver

    if compiled is None or getattr(compiled, "function", None) is None:
        return None
    names = list(inspect.signature(function.fn).parameters)
    rest = [constants[name] for name in names if name in constants]
    launch, handle, metadata = compiled.run, compiled.function, compiled.packed_metadata
    get_stream, device = driver.active.get_current_stream, driver.active.get_current_device()

    def run(grid: tuple[int, ...], values: list[Any]) -> None:
        y, z = (*grid[1:], 1, 1)[:2]
        launch(grid[0], y, z, get_stream(device), handle, metadata, None, None, None, *values, *rest)

    return run


def kernels(package: str = "aioengine_kernels") -> Iterable[Kernel]:
    """Every kernel of the modules of the package that were imported."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(package + ".") and module is not None:
            for value in vars(module).values():
                if isinstance(value, Kernel) and value.function.fn.__module__ == name:
                    yield value


def count_variants() -> dict[str, int]:
    """By kernel, how many variants were compiled so far: serving should add none."""
    return {kernel.name: kernel.num_variants for kernel in kernels() if kernel.num_variants}
