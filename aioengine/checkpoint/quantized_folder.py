"""Which tensors of a quantized safetensors folder make one matrix, checked by their names, dtypes and shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import torch

from aioengine.checkpoint.quantization import Quantization
from aioengine.checkpoint.quantized import CodebookMatrix, Float8Matrix, FourBitMatrix, QuantizedMatrix
from aioengine.checkpoint.safetensors import DTYPES, SafetensorsTensor
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.errors import ModelError

_STATE = re.compile(r"(.+)\.weight\.quant_state\.bitsandbytes__(?:nf4|fp4)")
_BNB_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_STATE = 1 << 12  # bytes of bitsandbytes' JSON
_INT32 = frozenset({"I32"})
_FLOATS = frozenset(DTYPES)
_SCALES8 = _FLOATS | {"F8_E8M0"}
Tensors = dict[str, SafetensorsTensor]


def assemble(tensors: Sequence[SafetensorsTensor], quantization: Quantization) -> list[StoredTensor]:
    """Every tensor of the model: quantized matrices under the name of the weight that they stand for, the others as they are.

    Raises ModelError for a part that is missing or has another dtype or shape than `quantization` implies.
    """
    left = {stored.name: stored for stored in tensors}
    matrices: Iterator[QuantizedMatrix]
    if quantization.layout == "float8":
        matrices = _float8_matrices(left, quantization)
    elif quantization.layout == "nf4":
        matrices = _codebook_matrices(left)
    else:
        matrices = _four_bit_matrices(left, quantization)
    found: list[StoredTensor] = list(matrices)
    if not found:
        raise ModelError(f"config.json says that weights are quantized by {quantization.method}, but no tensor of the checkpoint is")
    return [*found, *left.values()]


def _four_bit_matrices(left: Tensors, quantization: Quantization) -> Iterator[FourBitMatrix]:
    compressed = quantization.layout == "compressed"
    marker = ".weight_packed" if compressed else ".qweight"
    for path in [name.removesuffix(marker) for name in left if name.endswith(marker)]:
        words = left[path + marker]
        _expect(words, _INT32, None, dims=2)
        rows, columns = (words.shape[0], words.shape[1] * 8) if compressed else (words.shape[1], words.shape[0] * 8)
        if quantization.layout == "awq":
            rows, columns = words.shape[1] * 8, words.shape[0]
        if not rows or not columns or rows % 8:
            raise ModelError(f"{words.path}: tensor {words.name} {list(words.shape)}: words of 8 numbers must fill a matrix")
        size = columns if quantization.group_size == -1 else quantization.group_size
        if columns % size:
            raise ModelError(f"config.json: group_size {size} does not divide the {columns} columns of {path}.weight")
        groups = columns // size
        take = _take_compressed if compressed else _take_grouped
        parts = take(left, path, quantization, rows=rows, columns=columns, groups=groups)
        yield FourBitMatrix(f"{path}.weight", (rows, columns), quantization.layout, size, quantization.act_order, parts)


def _take_grouped(left: Tensors, path: str, quantization: Quantization, *, rows: int, columns: int, groups: int) -> Tensors:
    """GPTQ and AWQ: scales by groups and rows."""
    parts = {
        "qweight": left.pop(f"{path}.qweight"),
        "qzeros": _take(left, f"{path}.qzeros", _INT32, (groups, rows // 8)),
        "scales": _take(left, f"{path}.scales", _FLOATS, (groups, rows)),
    }
    if f"{path}.g_idx" in left or quantization.act_order:
        parts["g_idx"] = _take(left, f"{path}.g_idx", _INT32, (columns,))
    bias = left.get(f"{path}.bias")
    if bias is not None and bias.dtype in DTYPES and bias.shape == (rows,) and not bool(bias.read_raw().any()):
        del left[bias.name]  # GPTQ's writers give each matrix one
    return parts


def _take_compressed(left: Tensors, path: str, quantization: Quantization, *, rows: int, columns: int, groups: int) -> Tensors:
    shape = left.pop(f"{path}.weight_shape", None)
    if shape is not None and (shape.shape != (2,) or shape.dtype not in ("I64", "I32") or shape.read_raw().tolist() != [rows, columns]):
        raise ModelError(f"{shape.path}: tensor {shape.name} is not the shape of {path}.weight_packed, [{rows}, {columns}]")
    parts = {
        "weight_packed": left.pop(f"{path}.weight_packed"),
        "weight_scale": _take(left, f"{path}.weight_scale", _FLOATS, (rows, groups)),
    }
    if not quantization.symmetric:
        parts["weight_zero_point"] = _take(left, f"{path}.weight_zero_point", _INT32, (rows // 8, groups))
    if quantization.act_order:
        parts["weight_g_idx"] = _take(left, f"{path}.weight_g_idx", _INT32, (columns,))
    return parts


def _float8_matrices(left: Tensors, quantization: Quantization) -> Iterator[Float8Matrix]:
    for name in [name for name, stored in left.items() if stored.dtype == "F8_E4M3" and name.endswith(".weight")]:
        weight, path = left.pop(name), name.removesuffix(".weight")
        _expect(weight, frozenset({"F8_E4M3"}), None, dims=2)
        left.pop(f"{path}.input_scale", None)  # of activations, which are not quantized here
        key = next((key for key in ("weight_scale_inv", "weight_scale") if f"{path}.{key}" in left), "weight_scale")
        scale = _take(left, f"{path}.{key}", _SCALES8, None)
        rows, columns = weight.shape
        block = quantization.block
        allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if block is not None:
            allowed = [(-(-rows // block[0]), -(-columns // block[1]))]
        if scale.shape not in allowed:
            raise ModelError(
                f"{scale.path}: tensor {scale.name} has shape {list(scale.shape)}, the scales of {name} {[rows, columns]} "
                f"have {' or '.join(str(list(shape)) for shape in allowed)}"
            )
        yield Float8Matrix(name, weight, scale, block)


def _codebook_matrices(left: Tensors) -> Iterator[CodebookMatrix]:
    for name, path in [(name, match[1]) for name in left if (match := _STATE.fullmatch(name))]:
        stored = left.pop(name)
        if stored.dtype != "U8" or len(stored.shape) != 1 or stored.shape[0] > _MAX_STATE:
            raise ModelError(f"{stored.path}: tensor {name} must be JSON of at most {_MAX_STATE} bytes")
        try:
            state = json.loads(bytes(stored.read_raw().tolist()))
            rows, columns = (_positive(size) for size in state["shape"])
            dtype, block = _BNB_DTYPES[state["dtype"]], _positive(state["blocksize"])
            nested = (_positive(state["nested_blocksize"]), float(state["nested_offset"])) if "nested_blocksize" in state else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(
                f"{stored.path}: tensor {name} is not what bitsandbytes writes: {type(error).__name__}: {error!s:.100}"
            ) from error
        weight = f"{path}.weight"
        scales = -(-rows * columns // block)
        parts = {
            "weight": _take(left, weight, frozenset({"U8"}), None),
            "absmax": _take(left, f"{weight}.absmax", frozenset({"F32"} if nested is None else {"U8"}), (scales,)),
            "quant_map": _take(left, f"{weight}.quant_map", frozenset({"F32"}), (16,)),
        }
        if torch.Size(parts["weight"].shape).numel() * 2 != rows * columns:
            raise ModelError(f"{stored.path}: tensor {weight} has {list(parts['weight'].shape)} bytes, not half of {rows} x {columns}")
        if nested is not None:
            parts["nested_absmax"] = _take(left, f"{weight}.nested_absmax", frozenset({"F32"}), (-(-scales // nested[0]),))
            parts["nested_quant_map"] = _take(left, f"{weight}.nested_quant_map", frozenset({"F32"}), (256,))
        yield CodebookMatrix(weight, (rows, columns), block, dtype, nested, parts)


def _positive(value: object) -> int:
    if type(value) is not int or not 0 < value <= 1 << 24:
        raise ValueError(f"{value!r:.50} is no size")
    return value


def _take(left: Tensors, name: str, dtypes: frozenset[str], shape: tuple[int, ...] | None) -> SafetensorsTensor:
    stored = left.pop(name, None)
    if stored is None:
        raise ModelError(f"the checkpoint lacks {name}, a part of a quantized matrix")
    _expect(stored, dtypes, shape)
    return stored


def _expect(stored: SafetensorsTensor, dtypes: frozenset[str], shape: tuple[int, ...] | None, *, dims: int | None = None) -> None:
    if stored.dtype not in dtypes:
        raise ModelError(f"{stored.path}: tensor {stored.name} is stored as {stored.dtype}, not as {' or '.join(sorted(dtypes))}")
    if (shape is not None and stored.shape != shape) or (dims is not None and len(stored.shape) != dims):
        wanted = f"{dims} dimensions" if shape is None else f"shape {list(shape)}"
        raise ModelError(f"{stored.path}: tensor {stored.name} has shape {list(stored.shape)}, quantization_config implies {wanted}")
