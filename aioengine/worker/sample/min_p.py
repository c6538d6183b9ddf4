"""min_p: drop tokens that are much less likely than the most likely one (Nguyen et al., arXiv:2407.01082)."""

from __future__ import annotations

import torch


def apply_min_p(
    logits: torch.Tensor,  # [n, vocab_size] float32 after temperature, changed in place
    log_min_p: torch.Tensor,  # [n] float32; -inf keeps everything
) -> torch.Tensor:  # logits
    """p >= min_p * max(p) without a softmax: logit >= max(logit) + log(min_p)."""
    threshold = logits.amax(dim=-1) + log_min_p
    return logits.masked_fill_(logits < threshold[:, None], -torch.inf)
