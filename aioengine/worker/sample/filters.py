"""What takes tokens out of the choice, or levels it: min_tokens, temperature, min_p. (top_k and top_p: `top_k_top_p.py`.)"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def mask_ending_tokens(
    logits: torch.Tensor,  # [n, vocab_size] float32, changed in place
    rows: Sequence[int],  # the rows whose output is still too short
    ending_token_ids: Sequence[npt.NDArray[np.int64]],  # of each of those rows
) -> None:
    """min_tokens: what would end the output cannot be sampled before it is long enough. One scatter for all rows."""
    row_index = np.repeat(np.asarray(rows, dtype=np.int64), [len(ids) for ids in ending_token_ids])
    token_index = np.concatenate(ending_token_ids)
    device = logits.device
    logits[torch.from_numpy(row_index).to(device), torch.from_numpy(token_index).to(device)] = -torch.inf


def apply_temperature(
    logits: torch.Tensor,  # [n, vocab_size] float32, changed in place
    temperature: torch.Tensor,  # [n] float32, greater than 0
) -> torch.Tensor:  # logits
    """Divide before the softmax. Greedy rows never come here, so no temperature is too small for it (see `SamplingParams`)."""
    return logits.div_(temperature[:, None])


def apply_min_p(
    logits: torch.Tensor,  # [n, vocab_size] float32 after temperature, changed in place
    log_min_p: torch.Tensor,  # [n] float32; -inf keeps everything
) -> torch.Tensor:  # logits
    """Drop tokens much less likely than the most likely one (Nguyen et al., arXiv:2407.01082): p >= min_p * max(p), which
    without a softmax is logit >= max(logit) + log(min_p)."""
    threshold = logits.amax(dim=-1) + log_min_p
    return logits.masked_fill_(logits < threshold[:, None], -torch.inf)
