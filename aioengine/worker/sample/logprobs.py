"""Log-probabilities of the sampled and of the most likely tokens, from the logits as the model gave them."""

from __future__ import annotations

import torch

from aioengine.outputs import Logprob, TokenLogprobs
from aioengine.sampling_params import MAX_LOGPROBS


def collect_logprobs(
    raw_logprobs: torch.Tensor,  # [n, vocab_size] float32: log_softmax of the unscaled, unmasked logits
    token_ids: torch.Tensor,  # [n] int64: the sampled tokens
    *,
    num_logprobs: list[int],  # [n]: how many of the most likely tokens each row wants, at most MAX_LOGPROBS
) -> list[TokenLogprobs]:  # [n]
    """A row's sampled token comes first with its true rank (1 + the number of more likely tokens), then the top ones."""
    sampled = raw_logprobs.gather(1, token_ids[:, None])
    ranks = ((raw_logprobs > sampled).sum(dim=-1) + 1).tolist()
    # Always the same width: which of two equal logits comes first must not depend on what the batch mates ask for.
    top_values, top_ids = raw_logprobs.topk(min(MAX_LOGPROBS, raw_logprobs.shape[1]), dim=-1)
    result: list[TokenLogprobs] = []
    for row, (token_id, value, values, ids) in enumerate(
        zip(token_ids.tolist(), sampled[:, 0].tolist(), top_values.tolist(), top_ids.tolist(), strict=True)
    ):
        entry: TokenLogprobs = {token_id: Logprob(logprob=value, rank=ranks[row])}
        for rank, (top_id, top_value) in enumerate(zip(ids[: num_logprobs[row]], values, strict=False), start=1):
            entry.setdefault(top_id, Logprob(logprob=top_value, rank=rank))
        result.append(entry)
    return result
