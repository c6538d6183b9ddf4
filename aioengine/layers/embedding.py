"""Token ids to vectors, and vectors back to a score for every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class TokenEmbedding(nn.Module):
    """The embedding table. As `head` it also scores tokens: tied models use one table for both."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        table = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(table, requires_grad=False)  # [vocab_size, hidden_size]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [n] int64 -> [n, hidden_size]."""
        return F.embedding(input_ids, self.weight)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, vocab_size] in float32."""
        return F.linear(hidden, self.weight).float()
