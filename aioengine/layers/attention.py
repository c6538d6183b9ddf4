"""The model's side of attention: head geometry here, paging and masking in the backend."""

from __future__ import annotations

import torch
from torch import nn

from aioengine.attention.base import AttentionBackend, AttentionBatch, RotationInputs


class Attention(nn.Module):
    """Causal attention over the paged cache, by whichever backend was chosen. Holds no weights and no state."""

    def __init__(self, backend: AttentionBackend, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale

    def forward(
        self,
        query_key: torch.Tensor,  # [n, num_heads + num_kv_heads, head_dim], rotated
        value: torch.Tensor,  # [n, num_kv_heads * head_dim]
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
    ) -> torch.Tensor:
        """-> [n, num_heads * head_dim]."""
        query, key = query_key.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        value = value.view(-1, self.num_kv_heads, self.head_dim)
        out = self.backend.forward(query, key, value, kv_cache=kv_cache, metadata=metadata, scale=self.scale)
        return out.reshape(-1, self.num_heads * self.head_dim)

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [n, (num_heads + 2 * num_kv_heads) * head_dim], not rotated
        *,
        rotation: RotationInputs,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
    ) -> torch.Tensor:
        """-> [n, num_heads * head_dim], by a backend that norms and rotates queries and keys by itself."""
        out = self.backend.forward_qkv(qkv, rotation=rotation, kv_cache=kv_cache, metadata=metadata, scale=self.scale)
        return out.reshape(-1, self.num_heads * self.head_dim)
