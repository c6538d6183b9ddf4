"""min_tokens: tokens that would end the output cannot be sampled before it is long enough."""

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
    """Set the logits of the ending tokens to -inf, for all rows by one scatter."""
    row_index = np.repeat(np.asarray(rows, dtype=np.int64), [len(ids) for ids in ending_token_ids])
    token_index = np.concatenate(ending_token_ids)
    device = logits.device
    logits[torch.from_numpy(row_index).to(device), torch.from_numpy(token_index).to(device)] = -torch.inf
