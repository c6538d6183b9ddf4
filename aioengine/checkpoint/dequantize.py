"""ggml's block formats to float32, exactly.

The formats are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h); the reference in Python is
`gguf.quants`. The common ones are vectorised here, because the reference takes seconds for a small model; the others go
through the reference. Products and sums are rounded one by one, as the reference does, so the bits are equal.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aioengine.errors import ModelError

# Elements at a time: temporaries stay in the processor's cache instead of passing through memory several times.
_CHUNK_ELEMENTS = 1 << 19
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


def plain_dtype(kind: GGMLQuantizationType) -> torch.dtype | None:
    """The dtype of a type that stores plain numbers; None for block formats."""
    return _PLAIN.get(kind)


def dequantize_into(rows: torch.Tensor, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    """rows [n, bytes_per_row] uint8, contiguous -> out [n, columns], any float dtype and device.

    Raises ModelError for a type that neither this module nor the `gguf` package can read.
    """
    plain = plain_dtype(kind)
    if plain is not None:
        out.copy_(rows.view(plain))
        return
    columns = out.shape[1]
    step = max(1, _CHUNK_ELEMENTS // columns)
    in_place = out.dtype == torch.float32 and out.device.type == "cpu" and out.is_contiguous()
    for start in range(0, out.shape[0], step):
        part, target = rows[start : start + step], out[start : start + step]
        chunk = target if in_place else torch.empty(target.shape, dtype=torch.float32)
        _dequantize_chunk(part, kind, chunk)
        if not in_place:
            target.copy_(chunk)


def _dequantize_chunk(rows: torch.Tensor, kind: GGMLQuantizationType, out: torch.Tensor) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block_bytes)  # [num_blocks, block_bytes]
    values = out.view(-1, block_size)  # [num_blocks, block_size]
    if kind == GGMLQuantizationType.Q8_0:
        torch.mul(blocks[:, 2:].view(torch.int8), _halves(blocks, 1), out=values)
    elif kind == GGMLQuantizationType.Q4_0:
        _nibbles_into(blocks[:, 2:], values)
        values.sub_(8).mul_(_halves(blocks, 1))
    elif kind == GGMLQuantizationType.Q4_1:
        _nibbles_into(blocks[:, 4:], values)
        scale, least = _halves(blocks, 2).chunk(2, dim=1)
        values.mul_(scale).add_(least)
    else:
        try:
            with np.errstate(all="ignore"):  # a scale that is NaN or infinite is the file's business
                reference = gguf.dequantize(rows.numpy(), kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"cannot dequantize {kind.name}: {error}") from error
        out.copy_(torch.from_numpy(reference).view(out.shape))


def _halves(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` float16 numbers at the head of each block -> [num_blocks, count] float32."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles_into(packed: torch.Tensor, values: torch.Tensor) -> None:
    """packed [num_blocks, 16] uint8 -> values [num_blocks, 32]: the low halves of all bytes, then the high ones."""
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
