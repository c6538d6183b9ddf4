"""Clear cache blocks, for readers that touch slots to which no token was written."""

from __future__ import annotations

import torch

from aioengine_kernels._triton import cdiv, dispatcher, jit, tl

_BLOCK = 4096


@jit
def _zero_blocks_kernel(cache_ptr, block_ids_ptr, block_stride, bytes_per_block, BLOCK: tl.constexpr):
    block = tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)
    if block < 0:
        return
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(cache_ptr + block * block_stride + offset, tl.zeros((BLOCK,), tl.uint8), mask=offset < bytes_per_block)


def _rows_of_bytes(cache: torch.Tensor) -> torch.Tensor:
    if cache.shape[0] > 0 and not cache[0].is_contiguous():
        raise ValueError(f"the inside of a block must be dense, got shape {tuple(cache.shape)}, strides {cache.stride()}")
    return cache.flatten(1).view(torch.uint8)


def zero_blocks_ref(cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Set cache[block_ids[i]] to zero, for every block id that is not negative.

    cache: [num_blocks, ...] of any dtype, dense inside a block; the stride between blocks is free.
    block_ids: [n] int32.
    Raises ValueError if the inside of a block is not dense.
    """
    _rows_of_bytes(cache)[block_ids[block_ids >= 0].long()] = 0


def zero_blocks_triton(cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Launch the kernel of `zero_blocks`; the arguments are those of `zero_blocks`."""
    rows = _rows_of_bytes(cache)
    if block_ids.shape[0] == 0:
        return
    bytes_per_block = rows.shape[1]
    grid = (block_ids.shape[0], cdiv(bytes_per_block, _BLOCK))
    _zero_blocks_kernel[grid](rows, block_ids, rows.stride(0), bytes_per_block, BLOCK=_BLOCK, num_warps=4)


zero_blocks = dispatcher(triton=zero_blocks_triton, reference=zero_blocks_ref)
