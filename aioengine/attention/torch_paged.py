"""The reference backend: plain torch over the paged cache, one `scaled_dot_product_attention` a request.

Requests are attended one by one because padding a ragged batch to its longest context costs several times as much on a
CPU. Where the blocks of a request lie side by side, its keys and values are a view of the cache and nothing is copied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from aioengine.attention.base import AttentionBackend, AttentionBatch, AttentionConfig

_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Where one request's query rows and its visible keys are."""

    query_start: int
    query_end: int
    block_ids: torch.Tensor | None  # [num_blocks] int64; None: the blocks lie side by side
    first_slot: int  # of the first visible key: within the cache if block_ids is None, else within the gathered blocks
    num_keys: int
    mask: torch.Tensor | None  # [query_len, num_keys], 0 or -inf, added to the scores; None: see `is_causal`
    is_causal: bool  # keys and queries start at the same position, so the plain triangle is right


@dataclass(frozen=True, slots=True)
class TorchPagedMetadata(AttentionBatch):
    """A step, and where its keys are: the same for all layers of the group."""

    sequences: list[_Sequence] = field(default_factory=list)


def lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on a CPU before they are first written.

    `torch.zeros` writes every page (1 GiB: about a second); `numpy.zeros` leaves that to the operating system, which
    hands out zeroed pages on first touch.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


class TorchPagedBackend(AttentionBackend):
    """Attention in plain torch on any device; the oracle of the faster backends.

    Cache layout: [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values. Only slots that the block table
    and `seq_lens` give to a request take part, so whatever other slots hold (NaN included) has no influence.
    """

    name: ClassVar[str] = "torch_paged"

    @classmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        if config.kv_cache_dtype not in _CACHE_DTYPES:
            return f"no KV cache of {config.kv_cache_dtype}"
        if config.num_heads % config.num_kv_heads:
            return f"num_heads ({config.num_heads}) is not a multiple of num_kv_heads ({config.num_kv_heads})"
        return None

    def allocate_kv_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        c = self.config
        return lazy_zeros((2, num_blocks, c.block_size, c.num_kv_heads, c.head_dim), dtype=c.kv_cache_dtype, device=device)

    def kv_cache_bytes_per_block(self) -> int:
        c = self.config
        return 2 * c.block_size * c.num_kv_heads * c.head_dim * c.kv_cache_dtype.itemsize

    def build_metadata(self, batch: AttentionBatch) -> TorchPagedMetadata:
        table = batch.block_table.cpu().numpy()
        device = batch.slot_mapping.device
        starts = batch.query_start_loc_np.tolist()
        bounds = zip(starts, starts[1:], batch.seq_lens_np.tolist(), strict=False)
        sequences = [
            self._build_sequence(start, end, seq_len, row, window=batch.sliding_window, device=device)
            for (start, end, seq_len), row in zip(bounds, table, strict=True)
        ]
        return TorchPagedMetadata(**{name.name: getattr(batch, name.name) for name in fields(batch)}, sequences=sequences)

    def _build_sequence(
        self, query_start: int, query_end: int, seq_len: int, block_row: Any, *, window: int | None, device: torch.device
    ) -> _Sequence:
        block_size = self.config.block_size
        query_len = query_end - query_start
        first_query = seq_len - query_len
        first_key = 0 if window is None else max(0, first_query - window + 1)
        num_keys = seq_len - first_key

        first_block = first_key // block_size
        blocks = block_row[first_block : -(-seq_len // block_size)].astype(np.int64)
        side_by_side = bool((np.diff(blocks) == 1).all())
        first_slot = first_key - first_block * block_size + (int(blocks[0]) * block_size if side_by_side else 0)

        whole_window = window is None or num_keys <= window  # then no query is too far from any of the keys
        is_causal = query_len > 1 and query_len == num_keys and whole_window
        mask = None if query_len == 1 or is_causal else self._mask(query_len, num_keys, window=window, device=device)
        block_ids = None if side_by_side else torch.from_numpy(blocks).to(device)
        return _Sequence(query_start, query_end, block_ids, first_slot, num_keys, mask, is_causal)

    def _mask(self, query_len: int, num_keys: int, *, window: int | None, device: torch.device) -> torch.Tensor:
        key_index = torch.arange(num_keys, device=device)
        query_index = torch.arange(num_keys - query_len, num_keys, device=device)[:, None]
        visible = key_index <= query_index
        if window is not None:
            visible &= key_index > query_index - window
        return torch.zeros(query_len, num_keys, dtype=self.config.dtype, device=device).masked_fill_(~visible, -math.inf)

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        assert isinstance(metadata, TorchPagedMetadata)
        # [num_slots, num_kv_heads, head_dim] each
        key_slots, value_slots = kv_cache.flatten(1, 2).unbind(0)
        key_slots.index_copy_(0, metadata.slot_mapping, key.to(kv_cache.dtype))
        value_slots.index_copy_(0, metadata.slot_mapping, value.to(kv_cache.dtype))

        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for sequence in metadata.sequences:
            if sequence.block_ids is None:
                keys, values = key_slots, value_slots
            else:
                keys, values = kv_cache.index_select(1, sequence.block_ids).flatten(1, 2).unbind(0)
            end = sequence.first_slot + sequence.num_keys
            rows = slice(sequence.query_start, sequence.query_end)
            output[rows] = self._attend(
                query[rows],
                keys[sequence.first_slot : end].to(query.dtype).transpose(0, 1),
                values[sequence.first_slot : end].to(query.dtype).transpose(0, 1),
                sequence=sequence,
                scale=scale,
            )
        return output

    def _attend(
        self,
        query: torch.Tensor,  # [query_len, num_heads, head_dim]
        keys: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
        values: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
        *,
        sequence: _Sequence,
        scale: float,
    ) -> torch.Tensor:  # [query_len, num_heads, head_dim]
        if self.config.logits_soft_cap is not None:
            return _attend_with_soft_cap(query, keys, values, sequence=sequence, scale=scale, cap=self.config.logits_soft_cap)
        query_len, num_heads, head_dim = query.shape
        num_kv_heads = keys.shape[0]
        if query_len == 1:
            # The query heads that share a KV head become rows of one small matrix: K and V are read once, not once a head.
            grouped = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            return F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale).reshape(1, num_heads, head_dim)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=sequence.mask,
            is_causal=sequence.is_causal,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        return attended[0].transpose(0, 1)

    def zero_blocks(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        kv_cache[:, torch.tensor(block_ids, dtype=torch.int64, device=kv_cache.device)] = 0


def _attend_with_soft_cap(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    values: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    *,
    sequence: _Sequence,
    scale: float,
    cap: float,
) -> torch.Tensor:  # [query_len, num_heads, head_dim]
    """Scores are bounded to (-cap, cap) by `cap * tanh(score / cap)` before the mask, as in Gemma 2 (arXiv:2408.00118)."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # Query heads of a KV head become rows: [num_kv_heads, group * query_len, head_dim]
    grouped = query.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, group * query_len, head_dim)
    scores = torch.bmm(grouped.float(), keys.float().transpose(1, 2)).mul_(scale).div_(cap).tanh_().mul_(cap)
    scores = scores.view(num_kv_heads, group, query_len, num_keys)
    if sequence.is_causal:
        scores.masked_fill_(torch.ones(query_len, num_keys, dtype=torch.bool, device=query.device).triu_(1), -math.inf)
    elif sequence.mask is not None:
        scores += sequence.mask
    attended = torch.bmm(scores.softmax(-1).view(num_kv_heads, group * query_len, num_keys), values.float())
    attended = attended.view(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3)
    return attended.reshape(query_len, num_heads, head_dim).to(query.dtype)
