"""The backend of CPUs: the native kernels straight on the block table, without gathering.

A row's result does not depend on the other rows of a step, on how its prompt was cut into chunks, or on threads: bit for bit.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from aioengine.attention.base import AttentionBackend, AttentionBatch, AttentionConfig, RotationInputs
from aioengine.attention.torch_paged import lazy_zeros

if TYPE_CHECKING:
    from aioengine_kernels.cpu import CpuKernels, KvCacheFormat


class CpuPagedBackend(AttentionBackend):
    """Cache layout: see `aioengine_kernels.cpu.KvCacheFormat`; float32, float16 or int8 with a scale for each position and head.

    Slots that no request owns are never read. The metadata is the `AttentionBatch` itself.
    """

    name: ClassVar[str] = "cpu_paged"
    fuses_rope: ClassVar[bool] = True

    @cached_property
    def kernels(self) -> CpuKernels:
        """Made on first use: in the worker's thread, whose number of threads is the one that counts."""
        from aioengine_kernels.cpu import load_kernels

        return load_kernels()

    def with_config(self, config: AttentionConfig) -> CpuPagedBackend:
        """With the same kernels, and their number of threads."""
        other = CpuPagedBackend(config)
        other.kernels = self.kernels
        return other

    @cached_property
    def cache_format(self) -> KvCacheFormat:
        from aioengine_kernels.cpu import KvCacheFormat

        c = self.config
        return KvCacheFormat(c.kv_cache_dtype, c.block_size, c.num_kv_heads, c.head_dim)

    @classmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        from aioengine_kernels.cpu import KvCacheFormat, status

        if device.type != "cpu":
            return f"the native CPU kernels do not run on {device.type}"
        if config.dtype != torch.float32:
            return f"the native CPU kernels compute in float32, not {config.dtype}"
        shapes = KvCacheFormat.why_not(config.kv_cache_dtype, config.block_size, config.num_heads, config.num_kv_heads, config.head_dim)
        return shapes or status()

    def allocate_kv_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        return lazy_zeros(self.cache_format.shape(num_blocks), dtype=torch.uint8, device=device)

    def kv_cache_bytes_per_block(self) -> int:
        return self.cache_format.bytes_per_block

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

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
        # Without angles the kernel only writes: neither queries nor keys change.
        self.kernels.rope_and_cache(
            query, key, value, kv_cache=kv_cache, cache_format=self.cache_format, slots=metadata.slot_mapping.contiguous()
        )
        return self._attend(query, kv_cache, metadata, scale)

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; rotated in place
        *,
        rotation: RotationInputs,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        c = self.config
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        query, key, value = heads.split_with_sizes((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        self.kernels.rope_and_cache(
            query,
            key,
            value,
            kv_cache=kv_cache,
            cache_format=self.cache_format,
            slots=metadata.slot_mapping.contiguous(),
            cos_sin=rotation.cos_sin,
            positions=rotation.positions.contiguous(),
            query_norm=rotation.query_weight,
            key_norm=rotation.key_weight,
            norm_eps=rotation.eps,
        )
        return self._attend(query, kv_cache, metadata, scale)

    def _attend(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        return self.kernels.attention(
            query,
            kv_cache=kv_cache,
            cache_format=self.cache_format,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens.contiguous(),
            query_start_loc=batch.query_start_loc.contiguous(),
            scale=scale,
            sliding_window=batch.sliding_window,
            soft_cap=self.config.logits_soft_cap,
        )

    def zero_blocks(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        kv_cache[block_ids] = 0
