"""KV blocks as plain bytes: out of the caches of all layers, to be kept elsewhere, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def block_bytes(blocks: Sequence[torch.Tensor]) -> int:
    """What one block takes in all layers. blocks: see `read_blocks`."""
    return sum(cache[0].numel() * cache.element_size() for cache in blocks)


def read_blocks(blocks: Sequence[torch.Tensor], block_ids: Sequence[int]) -> torch.Tensor:
    """[len(block_ids), bytes of a block] uint8, on the host: the layers of a block one behind the other.

    blocks: the cache of each layer as `AttentionBackend.by_block` gives it, [num_blocks, ...].
    """
    ids = torch.tensor(block_ids, dtype=torch.int64, device=blocks[0].device)
    out = torch.empty(len(block_ids), block_bytes(blocks), dtype=torch.uint8)
    start = 0
    for cache in blocks:
        content = cache.view(torch.uint8).index_select(0, ids).reshape(len(block_ids), -1)
        out[:, start : start + content.shape[1]] = content
        start += content.shape[1]
    return out


def write_blocks(
    blocks: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    content: torch.Tensor,  # [len(block_ids), bytes of a block] uint8, as `read_blocks` gives it
) -> None:
    """Undo `read_blocks`, in these blocks or in others. Raises ValueError if the content has another shape."""
    expected = (len(block_ids), block_bytes(blocks))
    if tuple(content.shape) != expected:
        raise ValueError(f"the content of KV blocks has shape {list(content.shape)}, the cache takes {list(expected)}")
    ids = torch.tensor(block_ids, dtype=torch.int64, device=blocks[0].device)
    start = 0
    for cache in blocks:
        plain = cache.view(torch.uint8)
        size = plain[0].numel()
        plain.index_copy_(0, ids, content[:, start : start + size].reshape(len(block_ids), *plain.shape[1:]).to(cache.device))
        start += size
