"""What is reported of the sampled and of the most likely tokens: log-probabilities or logits, see `logprobs_mode`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from aioengine.outputs import Logprob, TokenLogprobs
from aioengine.sampling_params import MAX_LOGPROBS


def collect_logprobs(
    scores: torch.Tensor,  # [n, vocab_size] float32: log-probabilities, or logits
    token_ids: torch.Tensor,  # [n] int64: the sampled tokens
    *,
    num_logprobs: Sequence[int],  # [n]: how many of the most likely tokens each row wants, at most MAX_LOGPROBS
) -> list[TokenLogprobs]:  # [n]
    """A row's sampled token comes first with its true rank (1 + the number of more likely tokens), then the top ones."""
    ids, values, ranks = rank_tokens(scores, token_ids)
    return make_entries(ids.tolist(), values.tolist(), ranks.tolist(), num_logprobs)


def rank_tokens(
    scores: torch.Tensor,  # [n, vocab_size] float32
    token_ids: torch.Tensor,  # [n] int64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [n, 1 + top] int64 and values [n, 1 + top] float32: of the given token, then of the most likely ones; its rank [n]."""
    given = scores.gather(1, token_ids[:, None])
    ranks = (scores > given).sum(dim=-1) + 1
    # Always the same width: which of two equal logits comes first must not depend on what the batch mates ask for.
    top_values, top_ids = scores.topk(min(MAX_LOGPROBS, scores.shape[1]), dim=-1)
    return torch.cat((token_ids[:, None], top_ids), dim=1), torch.cat((given, top_values), dim=1), ranks


def make_entries(
    token_ids: Sequence[Sequence[int]],  # [n][1 + top]: the sampled token, then the most likely ones
    values: Sequence[Sequence[float]],  # [n][1 + top]
    ranks: Sequence[int],  # [n]: of the sampled token
    num_logprobs: Sequence[int],  # [n]
) -> list[TokenLogprobs]:  # [n]
    """A token of -inf, which processing took out of the choice, is not among the most likely ones."""
    result: list[TokenLogprobs] = []
    for row_ids, row_values, rank, wanted in zip(token_ids, values, ranks, num_logprobs, strict=True):
        entry: TokenLogprobs = {row_ids[0]: Logprob(logprob=row_values[0], rank=rank)}
        for place in range(1, min(wanted, len(row_ids) - 1) + 1):
            if row_values[place] != -math.inf:
                entry.setdefault(row_ids[place], Logprob(logprob=row_values[place], rank=place))
        result.append(entry)
    return result
