"""Temperature: divide the logits before the softmax."""

from __future__ import annotations

import torch


def apply_temperature(
    logits: torch.Tensor,  # [n, vocab_size] float32, changed in place
    temperature: torch.Tensor,  # [n] float32, greater than 0
) -> torch.Tensor:  # logits
    """Greedy rows never come here, so no temperature is too small to divide by (see `SamplingParams`)."""
    return logits.div_(temperature[:, None])
