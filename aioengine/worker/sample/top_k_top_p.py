"""top_k, then top_p on what top_k left, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_NARROW = 256
"""Most nuclei are smaller than this. Ranking 256 of 49152 logits takes 0.2 ms a row, sorting all of them 3.4 ms."""

_MAX_NARROW_TOP_K = 1024
"""A larger top_k would make every other row of the batch rank as many."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that some rows may sample from, in the order of their ids."""

    rows: torch.Tensor  # [m] int64: which rows these are
    token_ids: torch.Tensor  # [m, width] int64, ascending; then padding, which is `vocab_size`
    weights: torch.Tensor  # [m, width] float32: their probabilities, not normalised again; 0 for what is not kept


def keep_top_k_top_p(
    logits: torch.Tensor,  # [n, vocab_size] float32 after temperature; -inf: dropped already
    probs: torch.Tensor,  # [n, vocab_size] float32: softmax(logits)
    *,
    top_k: torch.Tensor,  # [n] int64; 0 or at least vocab_size: keep all
    top_p: torch.Tensor,  # [n] float64 in (0, 1]; 1: keep all
) -> Iterator[KeptTokens]:
    """Keep the top_k most likely tokens, and of those the fewest whose share of their common mass is at least top_p.

    A few hundred logits are ranked for all rows at once; the rows for which that is not enough are treated one by one.
    How many are ranked depends on the whole batch, but ranking more only appends smaller values, and ties at the end of
    what is kept are broken by token id: no row's result depends on its batch mates. Yields one or two groups, together
    all rows.
    """
    vocab_size = logits.shape[1]
    limit = torch.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    width = int(torch.where(limit <= _MAX_NARROW_TOP_K, limit, min(_NARROW, vocab_size)).max())
    rows = torch.arange(len(logits), device=logits.device)
    narrow, is_complete = _keep_narrow(logits, probs, limit=limit, top_p=top_p, width=width)
    if bool(is_complete.all()):
        yield narrow
        return
    if bool(is_complete.any()):
        yield KeptTokens(rows[is_complete], narrow.token_ids[is_complete], narrow.weights[is_complete])
    wide = rows[~is_complete]
    weights = probs[wide]
    for row, k, p in zip(weights, limit[wide].tolist(), top_p[wide].tolist(), strict=True):
        row.copy_(torch.from_numpy(_keep_wide(row.cpu().numpy(), top_k=k, top_p=p)))
    yield KeptTokens(wide, torch.arange(vocab_size, device=logits.device).expand(len(wide), vocab_size), weights)


def _keep_narrow(
    logits: torch.Tensor,  # [n, vocab_size]
    probs: torch.Tensor,  # [n, vocab_size]
    *,
    limit: torch.Tensor,  # [n] int64: the most tokens to keep; vocab_size: top_k is off
    top_p: torch.Tensor,  # [n]
    width: int,  # rank this many
) -> tuple[KeptTokens, torch.Tensor]:  # and [n] bool: `width` was enough for this row
    vocab_size = logits.shape[1]
    # One more than can be kept, to see whether it equals the last one that is.
    values, token_ids = logits.topk(min(width + 1, vocab_size), dim=-1)
    mass = probs.gather(1, token_ids).cumsum(dim=-1, dtype=torch.float64)
    common_mass = torch.where(limit < vocab_size, mass.gather(1, limit.clamp(max=width)[:, None] - 1)[:, 0], 1.0)
    num_needed = torch.searchsorted(mass, (top_p * common_mass)[:, None])[:, 0] + 1
    num_kept = torch.where(top_p < 1.0, torch.minimum(num_needed, limit), limit)
    is_complete = (num_kept <= width) & ((limit <= width) | (limit == vocab_size))
    num_kept = num_kept.clamp(max=width)

    _order_ties(logits, values, token_ids, num_kept)
    token_ids = token_ids[:, : int(num_kept.max())]
    is_padding = torch.arange(token_ids.shape[1], device=logits.device) >= num_kept[:, None]
    token_ids = token_ids.masked_fill(is_padding, vocab_size).sort(dim=-1).values
    weights = probs.gather(1, token_ids.clamp(max=vocab_size - 1)).masked_fill_(token_ids == vocab_size, 0.0)
    return KeptTokens(torch.arange(len(logits), device=logits.device), token_ids, weights), is_complete


def _order_ties(
    logits: torch.Tensor,  # [n, vocab_size]
    values: torch.Tensor,  # [n, width + 1], descending
    token_ids: torch.Tensor,  # [n, width + 1], changed in place
    num_kept: torch.Tensor,  # [n] int64
) -> None:
    """Where a dropped token has the same logit as the last kept one, keep those with the lowest ids."""
    last = values.gather(1, num_kept[:, None] - 1)
    first_dropped = values.gather(1, num_kept.clamp(max=values.shape[1] - 1)[:, None])
    is_tied = (last == first_dropped) & (num_kept < values.shape[1])[:, None] & torch.isfinite(last)
    for row in is_tied[:, 0].nonzero()[:, 0].tolist():  # rare: equal float32 logits exactly at the boundary
        end = int(num_kept[row])
        start = int((values[row] > last[row]).sum())
        token_ids[row, start:end] = (logits[row] == last[row]).nonzero()[: end - start, 0]


def _keep_wide(
    probs: npt.NDArray[np.float32],  # [vocab_size]
    *,
    top_k: int,  # vocab_size: off
    top_p: float,
) -> npt.NDArray[np.float32]:  # [vocab_size]: probs, 0 where dropped
    """One row that keeps many tokens. On the host: numpy sorts 10000 floats three times as fast as torch."""
    vocab_size = len(probs)
    if top_k == vocab_size:
        # All tokens below this weigh less than 1 - top_p together, so none of them is needed.
        ranked = np.sort(probs[probs >= (1.0 - top_p) / vocab_size])[::-1]
        common_mass = 1.0
    else:
        ranked = np.sort(probs)[::-1][:top_k]
        common_mass = float(ranked.sum(dtype=np.float64))
    if not len(ranked):  # the probabilities are NaN
        return probs
    num_kept = len(ranked)
    if top_p < 1.0:
        num_kept = min(int(np.searchsorted(ranked.cumsum(dtype=np.float64), top_p * common_mass)) + 1, num_kept)
    threshold = ranked[num_kept - 1]
    weights = np.where(probs >= threshold, probs, np.float32(0))
    num_excess = int((probs >= threshold).sum()) - num_kept
    if num_excess > 0:  # equal probabilities at the boundary: keep those with the lowest ids
        weights[np.flatnonzero(probs == threshold)[-num_excess:]] = 0
    return weights
