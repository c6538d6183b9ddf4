"""Log-probabilities of prompt tokens, each given those before it: a chunk at a time, as the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.outputs import TokenLogprobs
from aioengine.resolved_config import LogprobsMode
from aioengine.worker.input_batch import InputBatch
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.logprobs import make_entries, rank_tokens
from aioengine.worker.sample.sampler import NAN_LOGITS

_ROWS_AT_ONCE = 128
"""Logits of that many rows exist at a time: 25 MB for 49152 tokens, whatever the length of the chunk."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The positions of a step whose next token is a prompt token that somebody wants to know the log-probability of."""

    req_ids: list[str]
    num_rows: list[int]  # of each of them
    num_logprobs: list[int]  # of each of them: how many of the most likely tokens it wants
    indices: torch.Tensor  # [num_rows in all] int64: rows of the hidden states
    token_ids: torch.Tensor  # [num_rows in all] int64: the next token


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """What a step reports."""

    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # one entry a position
    failed: dict[str, str] = field(default_factory=dict)  # whose logits are NaN


def plan_prompt_rows(
    batch: InputBatch,
    states: RequestStates,
    *,
    upload: Callable[[Mapping[str, npt.NDArray[Any]]], dict[str, torch.Tensor]],  # to the device, without waiting for it
) -> PromptRows | None:
    """None if this step has nothing to report. What it has is reported by this step and never again."""
    if not states.wants_prompt_logprobs:
        return None
    req_ids: list[str] = []
    counts: list[int] = []
    indices: list[npt.NDArray[np.int64]] = []
    token_ids: list[npt.NDArray[np.int64]] = []
    for i, req_id in enumerate(batch.req_ids):
        first, end = int(batch.query_start_loc_np[i]), int(batch.seq_lens_np[i])
        start = end - (int(batch.query_start_loc_np[i + 1]) - first)
        if positions := states.take_prompt_positions(req_id, start=start, end=end):
            req_ids.append(req_id)
            counts.append(len(positions))
            indices.append(np.arange(positions.start, positions.stop) + (first - start))
            token_ids.append(states.token_ids[batch.idx_mapping_np[i], positions.start + 1 : positions.stop + 1].astype(np.int64))
    if not req_ids:
        return None
    return PromptRows(
        req_ids=req_ids,
        num_rows=counts,
        num_logprobs=[states.sampling_params(req_id).prompt_logprobs or 0 for req_id in req_ids],
        **upload({"indices": np.concatenate(indices), "token_ids": np.concatenate(token_ids)}),
    )


def score_prompt_rows(
    hidden_states: torch.Tensor,  # [r, hidden_size]: at `rows.indices`
    rows: PromptRows,
    *,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],  # [m, hidden_size] -> [m, vocab_size] float32
    logprobs_mode: LogprobsMode,
) -> list[torch.Tensor]:
    """ids [r, 1 + top] int64, values [r, 1 + top] float32 and ranks [r] int64, as `rank_tokens` gives them.

    Nothing processes the logits of a prompt: `raw_...` and `processed_...` are the same here.
    """
    pieces = []
    for start in range(0, len(hidden_states), _ROWS_AT_ONCE):
        scores = compute_logits(hidden_states[start : start + _ROWS_AT_ONCE])
        if logprobs_mode.endswith("logprobs"):
            scores = scores.log_softmax(dim=-1)
        pieces.append(rank_tokens(scores, rows.token_ids[start : start + _ROWS_AT_ONCE]))
    return [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]


def read_prompt_entries(rows: PromptRows, fetched: Sequence[npt.NDArray[Any]]) -> PromptEntries:
    """`score_prompt_rows`, by request, once it is on the host."""
    ids, values, ranks = fetched
    result = PromptEntries()
    start = 0
    for req_id, count, wanted in zip(rows.req_ids, rows.num_rows, rows.num_logprobs, strict=True):
        piece = slice(start, start + count)
        start += count
        # Of the token and of the likeliest one: raw logits may be -inf, but the largest of a row is a number.
        if np.isnan(values[piece, :2]).any() or np.isinf(values[piece, 1]).any():
            result.failed[req_id] = NAN_LOGITS
            continue
        result.logprobs[req_id] = make_entries(ids[piece].tolist(), values[piece].tolist(), ranks[piece].tolist(), [wanted] * count)
    return result
