"""Grammar bitmasks: which tokens a structured output allows next."""

from __future__ import annotations

import numpy as np
import torch


def apply_bitmask(
    logits: torch.Tensor,  # [vocab_size] float32: one row, changed in place
    bitmask: bytes,  # token i is bit i % 8 of byte i // 8; 1 allows it. At least vocab_size bits
) -> None:
    """Set the logits of the tokens that the grammar forbids to -inf."""
    vocab_size = logits.shape[0]
    if len(bitmask) * 8 < vocab_size:
        raise ValueError(f"a bitmask of {len(bitmask)} bytes does not cover {vocab_size} tokens")
    allowed = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), count=vocab_size, bitorder="little")
    logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
