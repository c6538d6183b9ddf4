"""Write pieces of rows into a table: how what the host learned since the last step reaches the device's request tables."""

from __future__ import annotations

import torch

from aioengine_kernels._triton import cdiv, jit, tl, use_triton

_BLOCK = 1024


@jit
def _write_rows_kernel(table_ptr, pieces_ptr, values_ptr, table_stride, BLOCK: tl.constexpr):
    piece_ptr = pieces_ptr + tl.program_id(0) * 4
    row = tl.load(piece_ptr).to(tl.int64)
    column = tl.load(piece_ptr + 1)
    length = tl.load(piece_ptr + 2)
    source = tl.load(piece_ptr + 3)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < length
    value = tl.load(values_ptr + source + offset, mask=mask, other=0)
    tl.store(table_ptr + row * table_stride + column + offset, value, mask=mask)


def write_rows_ref(table: torch.Tensor, pieces: torch.Tensor, values: torch.Tensor) -> None:
    """`write_rows` in torch."""
    for row, column, length, source in pieces.tolist():
        table[row, column : column + length] = values[source : source + length]


def write_rows_triton(table: torch.Tensor, pieces: torch.Tensor, values: torch.Tensor, *, max_length: int) -> None:
    """Launch the kernel of `write_rows`; the arguments are those of `write_rows`."""
    if pieces.shape[0] == 0:
        return
    grid = (pieces.shape[0], max(cdiv(max_length, _BLOCK), 1))
    _write_rows_kernel[grid](table, pieces, values, table.stride(0), BLOCK=_BLOCK, num_warps=4)


def write_rows(
    table: torch.Tensor,  # [num_rows, num_columns] int32, last dimension dense
    pieces: torch.Tensor,  # [n, 4] int32, contiguous: row, first column, length, first index in `values`
    values: torch.Tensor,  # [m] int32
    *,
    max_length: int,  # the host's maximum of the lengths
) -> None:
    """table[row, column : column + length] = values[source : source + length], for every piece. Pieces must not overlap."""
    if use_triton(table):
        write_rows_triton(table, pieces, values, max_length=max_length)
    else:
        write_rows_ref(table, pieces, values)
