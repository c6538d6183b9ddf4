"""From logits to tokens, for all rows of a step at once.

A row's token is a function of its own logits and parameters, bit for bit. That rules out `sum` and `logsumexp` over the
vocabulary, which torch splits differently for one row than for several; `softmax`, `log_softmax` and `cumsum` work row
by row (measured on torch 2.13, 1 to 17 rows, 1 and 2 threads).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aioengine.outputs import TokenLogprobs
from aioengine.worker.sample.grammar import apply_bitmask
from aioengine.worker.sample.logprobs import collect_logprobs
from aioengine.worker.sample.min_p import apply_min_p
from aioengine.worker.sample.min_tokens import mask_ending_tokens
from aioengine.worker.sample.philox import uniform
from aioengine.worker.sample.states import SamplingBatch
from aioengine.worker.sample.temperature import apply_temperature
from aioengine.worker.sample.top_k_top_p import keep_top_k_top_p


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a row, and the log-probabilities of the rows that asked for them."""

    token_ids: torch.Tensor  # [n] int64
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row


def sample(
    logits: torch.Tensor,  # [n, vocab_size] float32, n >= 1; overwritten
    batch: SamplingBatch,
    *,
    bitmasks: Mapping[int, bytes] | None = None,  # by row: the tokens that a grammar allows
) -> SamplerOutput:
    """Sample one token a row.

    The order is: grammar and min_tokens masks; argmax for greedy rows; temperature, min_p, top_k, top_p and the inverse
    of the cumulative distribution at one uniform number for the others.
    """
    wanted = (batch.num_logprobs >= 0).nonzero()[0]
    raw_logprobs = _rows(logits, wanted).log_softmax(dim=-1) if len(wanted) else None
    for row, bitmask in (bitmasks or {}).items():
        apply_bitmask(logits[row], bitmask)
    if batch.ending_token_ids:
        mask_ending_tokens(logits, list(batch.ending_token_ids), list(batch.ending_token_ids.values()))

    random = (batch.temperature > 0).nonzero()[0]
    if not len(random):
        token_ids = logits.argmax(dim=-1)
    elif len(random) == len(logits):
        token_ids = _sample_random(logits, batch, random)
    else:
        token_ids = logits.argmax(dim=-1)
        token_ids[_index(random, logits.device)] = _sample_random(_rows(logits, random), batch, random)

    if raw_logprobs is None:
        return SamplerOutput(token_ids)
    entries = collect_logprobs(raw_logprobs, token_ids[_index(wanted, logits.device)], num_logprobs=batch.num_logprobs[wanted].tolist())
    return SamplerOutput(token_ids, dict(zip(wanted.tolist(), entries, strict=True)))


def _sample_random(
    logits: torch.Tensor,  # [n, vocab_size] float32, overwritten
    batch: SamplingBatch,
    rows: npt.NDArray[np.int64],  # [n]: where these logits are in the batch
) -> torch.Tensor:  # [n] int64
    device = logits.device
    apply_temperature(logits, torch.from_numpy(batch.temperature[rows]).to(device))
    log_min_p = batch.log_min_p[rows]
    if np.isfinite(log_min_p).any():
        apply_min_p(logits, torch.from_numpy(log_min_p).to(device))
    probs = logits.softmax(dim=-1)

    numbers = torch.from_numpy(uniform(batch.seeds[rows], batch.output_indices[rows])).to(device)
    is_filtered = (batch.top_k[rows] > 0) | (batch.top_p[rows] < 1)
    filtered, unfiltered = is_filtered.nonzero()[0], (~is_filtered).nonzero()[0]
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    if len(unfiltered):
        index = _index(unfiltered, device)
        token_ids[index] = inverse_cdf(_rows(probs, unfiltered), numbers[index])
    if len(filtered):
        index = _index(filtered, device)
        groups = keep_top_k_top_p(
            _rows(logits, filtered),
            _rows(probs, filtered),
            top_k=torch.from_numpy(batch.top_k[rows[filtered]]).to(device),
            top_p=torch.from_numpy(batch.top_p[rows[filtered]]).to(device),
        )
        for kept in groups:
            group = index[kept.rows]
            chosen = inverse_cdf(kept.weights, numbers[group])
            token_ids[group] = kept.token_ids.gather(1, chosen[:, None])[:, 0]
    # Only NaN logits choose padding. Their request's tokens mean nothing, but they must be valid ids.
    return token_ids.clamp_(max=logits.shape[1] - 1)


def inverse_cdf(
    weights: torch.Tensor,  # [n, width] float32 >= 0; they need not add up to 1
    numbers: torch.Tensor,  # [n] float64 in [0, 1)
) -> torch.Tensor:  # [n] int64, below width
    """The first index whose cumulative weight exceeds number * total: never one of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = numbers[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Only weights that are NaN get past the end.
    return index.clamp_(max=weights.shape[1] - 1)


def _index(rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows).to(device)


def _rows(tensor: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """`tensor[rows]`, without a copy if those are all rows."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, _index(rows, tensor.device))
