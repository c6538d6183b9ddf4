"""The backend of GPUs: Triton kernels over the paged cache, for any mix of prompt chunks and single tokens.

Runs on CPU tensors too in a process that set TRITON_INTERPRET=1, which is how it is tested without a GPU.
"""

from __future__ import annotations

import os
import weakref
from importlib.util import find_spec
from typing import ClassVar

import torch

from aioengine.attention.base import AttentionBackend, AttentionBatch, AttentionConfig, RotationInputs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256  # the least that a tensor core multiplies; what fits into shared memory
_FP8_CAPABILITY = (8, 9)


class TritonPagedBackend(AttentionBackend):
    """Cache layout: [num_blocks, 2, block_size, num_kv_heads, head_dim], so that a block is one piece of memory.

    Loads are masked by the sequence lengths, so whatever other slots hold (NaN included) has no influence. Nothing is read
    back to the host, and the metadata is the `AttentionBatch` itself. An fp8 cache holds the values as they are, without scales,
    clamped to +-448.
    """

    name: ClassVar[str] = "triton"
    supports_graphs: ClassVar[bool] = True
    fuses_rope: ClassVar[bool] = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        # Imported here: this module is also loaded where the backend does not fit, and triton takes a while.
        from aioengine_kernels.paged_attention import paged_attention
        from aioengine_kernels.qk_norm_rope_cache import qk_norm_rope_cache
        from aioengine_kernels.reshape_and_cache import reshape_and_cache
        from aioengine_kernels.zero_blocks import zero_blocks

        self._paged_attention = paged_attention
        self._qk_norm_rope_cache = qk_norm_rope_cache
        self._reshape_and_cache = reshape_and_cache
        self._zero_blocks = zero_blocks
        # The two halves of each layer's cache, for as long as that cache lives: making the views takes microseconds a layer.
        self._halves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not (device.type == "cpu" and is_interpreted):
            return f"Triton kernels need a CUDA device, not {device.type} (or, for tests, TRITON_INTERPRET=1 and a CPU)"
        if find_spec("triton") is None:
            return "Triton is not installed"
        if config.num_heads % config.num_kv_heads:
            return f"num_heads ({config.num_heads}) is not a multiple of num_kv_heads ({config.num_kv_heads})"
        if config.head_dim % 2 or config.head_dim > _MAX_HEAD_DIM or (config.head_dim < _MIN_HEAD_DIM and not is_interpreted):
            return f"head_dim must be even and in {_MIN_HEAD_DIM}..{_MAX_HEAD_DIM}, got {config.head_dim}"
        if config.dtype not in _DTYPES:
            return f"no kernels for {config.dtype}"
        if config.kv_cache_dtype not in (*_DTYPES, _FP8):
            return f"no KV cache of {config.kv_cache_dtype}"
        if config.kv_cache_dtype == _FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
            return f"a KV cache of {_FP8} needs compute capability 8.9, not {torch.cuda.get_device_capability(device)}"
        return None

    def allocate_kv_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        c = self.config
        return torch.zeros(num_blocks, 2, c.block_size, c.num_kv_heads, c.head_dim, dtype=c.kv_cache_dtype, device=device)

    def kv_cache_bytes_per_block(self) -> int:
        c = self.config
        return 2 * c.block_size * c.num_kv_heads * c.head_dim * c.kv_cache_dtype.itemsize

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
        key_cache, value_cache = self._split(kv_cache)
        self._reshape_and_cache(key, value, key_cache=key_cache, value_cache=value_cache, slot_mapping=metadata.slot_mapping)
        return self._attend(query, kv_cache=kv_cache, batch=metadata, scale=scale)

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        *,
        rotation: RotationInputs,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        key_cache, value_cache = self._split(kv_cache)
        query = self._qk_norm_rope_cache(
            qkv,
            num_heads=self.config.num_heads,
            positions=rotation.positions,
            cos_sin_cache=rotation.cos_sin,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=metadata.slot_mapping,
            query_weight=rotation.query_weight,
            key_weight=rotation.key_weight,
            eps=rotation.eps,
        )
        return self._attend(query, kv_cache=kv_cache, batch=metadata, scale=scale)

    def _attend(self, query: torch.Tensor, *, kv_cache: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        key_cache, value_cache = self._split(kv_cache)
        return self._paged_attention(
            query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=batch.block_table,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_chunk_seq_len or batch.max_seq_len,
            scale=scale,
            num_decodes=batch.num_decodes,
            split=batch.split,
            sliding_window=batch.sliding_window,
            logits_soft_cap=self.config.logits_soft_cap,
        )

    def _split(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = self._halves.get(id(kv_cache))
        if halves is None:
            halves = self._halves[id(kv_cache)] = kv_cache[:, 0], kv_cache[:, 1]
            weakref.finalize(kv_cache, self._halves.pop, id(kv_cache), None)  # the views must not keep its memory
        return halves

    def compile_kernels(self, kv_cache: torch.Tensor, batch: AttentionBatch) -> None:
        """A decode, then a prompt chunk, of so long a context that both are split; their output is nobody's."""
        c, device = self.config, kv_cache.device
        key_cache, value_cache = self._split(kv_cache)
        for query_len in (1, 2):
            self._paged_attention(
                torch.zeros(query_len, c.num_heads, c.head_dim, dtype=c.dtype, device=device),
                key_cache=key_cache,
                value_cache=value_cache,
                block_table=batch.block_table[:1],
                seq_lens=torch.tensor([query_len], dtype=torch.int32).to(device),
                query_start_loc=torch.tensor([0, query_len], dtype=torch.int32).to(device),
                max_query_len=query_len,
                max_seq_len=1 << 20,
                scale=1.0,
                sliding_window=batch.sliding_window,
                logits_soft_cap=c.logits_soft_cap,
            )

    def zero_blocks(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        # From pinned memory, or the copy would wait for all that has been enqueued.
        ids = torch.tensor(block_ids, dtype=torch.int32, pin_memory=kv_cache.is_cuda)
        self._zero_blocks(kv_cache, ids.to(kv_cache.device, non_blocking=True))
