"""Repairs for Triton's interpreter, so that a kernel that passes there can be believed.

The interpreter of Triton 3.7 runs kernels on NumPy. It computes bfloat16 on the raw 16-bit patterns, truncates float32 to
bfloat16, rounds float32 to float8_e4m3fn wrongly, ignores `tl.device_assert` and reads or writes any address it is given.
`install()` mends the arithmetic and makes an address outside every tensor argument of the running kernel an error.
It also patches `tl` once a launch, where the stock interpreter does so at every call of a device function (2-3x faster).

Call it once, in a process that set TRITON_INTERPRET=1 before the first import of triton. It changes Triton for that process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


class OutOfBoundsError(IndexError):
    """A lane that the mask lets through points outside every tensor of the launch."""


def bfloat16_to_float32(bits: Array) -> Array:
    """[...] uint16 bit patterns -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """[...] float32 -> uint16 bit patterns, rounded to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def _float8(values: Array) -> Array:
    return torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_float8(bits: Array) -> Array:
    return torch.from_numpy(np.array(bits, dtype=np.uint8)).view(torch.float8_e4m3fn).float().numpy()


class _AddressCheck:
    """The byte ranges of the running launch's tensors."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.ranges: list[tuple[int, int]] = []

    def add(self, argument: Any) -> None:
        if isinstance(argument, tuple):
            for item in argument:
                self.add(item)
        elif isinstance(argument, torch.Tensor) and argument.numel() > 0:
            span = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True)) + 1
            self.ranges.append((argument.data_ptr(), argument.data_ptr() + span * argument.element_size()))

    def check(self, pointers: Any, mask: Array, what: str) -> None:
        if not self.ranges:
            return
        shape = np.broadcast_shapes(pointers.data.shape, mask.shape)
        active = np.broadcast_to(mask, shape).astype(bool)  # one that a scalar became part of holds bytes
        addresses = np.broadcast_to(pointers.data, shape)[active].astype(np.uint64)
        if addresses.size == 0:
            return
        num_bytes = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        inside = np.zeros(addresses.shape, dtype=bool)
        for low, high in self.ranges:
            inside |= (addresses >= np.uint64(low)) & (addresses + num_bytes <= np.uint64(high))
        if inside.all():
            return
        first = int(addresses[~inside][0])
        low, high = min(self.ranges, key=lambda bounds: min(abs(first - bounds[0]), abs(first - bounds[1])))
        raise OutOfBoundsError(
            f"{what}: {int((~inside).sum())} of {addresses.size} lanes out of bounds at program {self._builder.grid_idx}; "
            f"the first is {first - low} bytes into a tensor of {high - low} bytes"
        )


def _mend_arithmetic(interpreter: Any, tl: Any) -> None:
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    stock_cast, stock_binary, stock_unary, stock_dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot
    widen: dict[Any, Callable[[Array], Array]] = {tl.bfloat16: bfloat16_to_float32, tl.float8e4nv: _from_float8}
    narrow: dict[Any, Callable[[Array], Array]] = {tl.bfloat16: float32_to_bfloat16, tl.float8e4nv: _float8}

    def widened(value: Any) -> Any:
        kind = value.dtype.scalar
        return handle(widen[kind](value.data), tl.float32) if kind in widen else value

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        kind, target = source.dtype.scalar, target_type.scalar
        if kind == target or (kind not in widen and target not in narrow):
            return stock_cast(self, source, target_type)
        source = widened(source)
        if target in narrow:
            return handle(narrow[target](source.data.astype(np.float32)), target)
        return source if target == tl.float32 else stock_cast(self, source, target_type)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16 or op in _BITWISE:
            return stock_binary(self, left, right, op)
        result = op(bfloat16_to_float32(left.data), bfloat16_to_float32(right.data))
        return handle(result, tl.int1) if op in _COMPARISONS else handle(float32_to_bfloat16(result), tl.bfloat16)

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return stock_unary(self, value, op)
        return handle(float32_to_bfloat16(op(bfloat16_to_float32(value.data))), tl.bfloat16)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = lambda self, source, target_type, rounding: cast_impl(self, source, target_type)
    builder.binary_op = binary_op
    builder.unary_op = unary_op
    builder.create_dot = lambda self, a, b, c, *rest: stock_dot(self, widened(a), widened(b), c, *rest)


def _mend_memory(interpreter: Any, bounds: _AddressCheck) -> None:
    builder = interpreter.InterpreterBuilder
    stock_load, stock_store, stock_atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        bounds.check(pointers, mask.data, "load")
        return stock_load(self, pointers, mask, *rest, **options)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        bounds.check(pointers, mask.data, "store")
        return stock_store(self, pointers, value, mask, *rest, **options)

    def atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        bounds.check(pointers, mask.data, "atomic")
        return stock_atomic(self, op, pointers, value, mask, *rest)

    builder.create_masked_load = load
    builder.create_masked_store = store
    builder.create_atomic_rmw = atomic


def _mend_launch(interpreter: Any, bounds: _AddressCheck) -> None:
    executor = interpreter.GridExecutor
    stock_arguments, stock_launch = executor._init_args_hst, executor.__call__
    patched: set[int] = set()

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = stock_arguments(self, args, kwargs)
        bounds.ranges.clear()
        bounds.add((*host_args, *host_kwargs.values()))
        return host_args, host_kwargs

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            with np.errstate(all="ignore"):  # as on a GPU, exp(1000) is inf and no warning
                return stock_launch(self, *args, **kwargs)
        finally:
            bounds.ranges.clear()
            patched.clear()

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        try:
            return self.rewrite()(*args, **kwargs)
        except interpreter.InterpreterError:
            raise
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor._init_args_hst = arguments
    executor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call_device_function


def install() -> None:
    """Mend Triton's interpreter in this process. Raises RuntimeError if this process does not interpret kernels."""
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is first imported")
    if getattr(interpreter, "_aioengine_mended", False):
        return
    interpreter._aioengine_mended = True
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)  # tl.device_assert counts
    bounds = _AddressCheck(interpreter.interpreter_builder)
    _mend_arithmetic(interpreter, tl)
    _mend_memory(interpreter, bounds)
    _mend_launch(interpreter, bounds)
