"""From logits to tokens on a device: nothing here waits for it, and the tokens stay there for the next step.

Same parameters as the host's sampler, same order, same ties, same random numbers: the same logits, parameters and seed give the
same tokens on either (tests/worker/sample/test_one_seed.py), but where the rounding of float32 decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.resolved_config import LogprobsMode
from aioengine.sampling_params import MAX_LOGPROBS
from aioengine.worker.sample.logit_edits import LogitEdits, apply_bias, apply_masks, apply_penalties
from aioengine.worker.sample.states import SamplingBatch
from aioengine_kernels.draw_tokens import draw_tokens
from aioengine_kernels.logprobs import token_logprobs
from aioengine_kernels.top_k_top_p import top_k_top_p


@dataclass(frozen=True, slots=True)
class StagedSampling:
    """The parameters of the rows that sample in a step, on the device; what the host decides by beside them."""

    slots: torch.Tensor  # [n] int32: where in `last_sampled_tokens` each row's token goes
    temperature: torch.Tensor  # [n] float32; 0 is greedy
    top_k: torch.Tensor  # [n] int32; 0 keeps all
    top_p: torch.Tensor  # [n] float32
    min_p: torch.Tensor  # [n] float32
    seeds: torch.Tensor  # [n] int64: uint64 as two's complement
    output_indices: torch.Tensor  # [n] int32
    masked_positions: torch.Tensor  # [m] int64: row * vocab_size + token of what may not be sampled yet (min_tokens)
    logprob_rows: torch.Tensor  # [k] int64: the rows that asked for log-probabilities
    logprob_rows_np: npt.NDArray[np.int64]  # [k]
    num_logprobs: list[int]  # [k]
    needs_filters: bool  # some row that is not greedy has top_k, top_p or min_p
    logit_edits: LogitEdits | None  # None: no row has a penalty, a bias, allowed_token_ids or bad_words


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What is copied to the host: the tokens, and the log-probabilities of the rows that asked."""

    token_ids: torch.Tensor  # [n] int32
    best: torch.Tensor  # [n] float32: the largest logit; it is a number exactly if the row could be sampled from
    logprob_token_ids: torch.Tensor | None  # [k, 1 + top] int32: the sampled token, then the likeliest ones
    logprobs: torch.Tensor | None  # [k, 1 + top] float32
    ranks: torch.Tensor | None  # [k] int32: of the sampled token

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.token_ids, self.best, self.logprob_token_ids, self.logprobs, self.ranks) if t is not None]


def sampling_arrays(batch: SamplingBatch, slots: npt.NDArray[np.int64], *, vocab_size: int) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """What the host sends of a step's parameters: the tensors of `StagedSampling` by their names, and `LogitEditArrays.arrays`."""
    masked = [row * vocab_size + token_ids for row, token_ids in batch.ending_token_ids.items()]
    own = {
        "slots": slots.astype(np.int32),
        "temperature": batch.temperature,
        "top_k": np.minimum(batch.top_k, vocab_size).astype(np.int32),
        "top_p": np.maximum(batch.top_p.astype(np.float32), np.finfo(np.float32).tiny),  # what float64 has below is 0 in float32
        "min_p": np.exp(batch.log_min_p),
        "seeds": batch.seeds.view(np.int64),
        "output_indices": batch.output_indices.astype(np.int32),
        "masked_positions": np.concatenate(masked) if masked else np.zeros(0, dtype=np.int64),
        "logprob_rows": (batch.num_logprobs >= 0).nonzero()[0],
    }
    return {"sampling": own, "logit_edits": {} if batch.logit_edits is None else batch.logit_edits.arrays()}


def staged_sampling(
    sent: Mapping[str, Mapping[str, torch.Tensor]],  # `sampling_arrays` as they came to the device
    batch: SamplingBatch,
    *,
    token_table: torch.Tensor,  # [max_num_reqs, max_model_len] int32, which holds this step's tokens
) -> StagedSampling:
    """The tensors, and what the host decides by."""
    rows, _edits = (batch.num_logprobs >= 0).nonzero()[0], batch.logit_edits
    has_filter = (batch.top_k > 0) | (batch.top_p < 1) | np.isfinite(batch.log_min_p)
    return StagedSampling(
        **sent["sampling"],
        logprob_rows_np=rows,
        num_logprobs=batch.num_logprobs[rows].tolist(),
        needs_filters=bool((has_filter & (batch.temperature > 0)).any()),
        logit_edits=None
        if batch.logit_edits is None
        else LogitEdits.build(batch.logit_edits, sent["logit_edits"], token_table=token_table),
    )


def sample_on_device(
    logits: torch.Tensor,  # [n, vocab_size] float32, contiguous; overwritten
    staged: StagedSampling,
    *,
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs] int32, written at `staged.slots`
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None,  # rows [g] int64 and their bits [g, bytes] uint8, see `apply_bitmask`
    eos_token_ids: torch.Tensor | None = None,  # [e] int64: what ends an output that a grammar calls complete
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> DeviceSamples:
    """One token a row, in the order of the host's sampler, and with its tokens."""
    is_raw = logprobs_mode.startswith("raw")
    # The raw logits are what log-probabilities are of, and everything below writes to them.
    reported = logits.index_select(0, staged.logprob_rows) if staged.num_logprobs and is_raw else None
    if allowed is not None:
        _mask_forbidden(logits, *allowed)
    if staged.logit_edits is not None:
        apply_masks(logits, staged.logit_edits)
    if staged.masked_positions.shape[0]:
        logits.view(-1).index_fill_(0, staged.masked_positions, -torch.inf)
    if staged.logit_edits is not None:
        apply_bias(logits, staged.logit_edits)
        apply_penalties(logits, staged.logit_edits)
        if allowed is not None and eos_token_ids is not None:
            _let_grammars_end(logits, *allowed, eos_token_ids)
    best = logits.amax(dim=-1)
    if staged.needs_filters:
        top_k_top_p(logits, temperature=staged.temperature, top_k=staged.top_k, top_p=staged.top_p, min_p=staged.min_p)
    token_ids = draw_tokens(
        logits,
        temperature=staged.temperature,
        seeds=staged.seeds,
        indices=staged.output_indices,
        idx_mapping=staged.slots,
        last_sampled_tokens=last_sampled_tokens,
    )
    if staged.num_logprobs and not is_raw:
        temperature = staged.temperature.index_select(0, staged.logprob_rows)[:, None]
        reported = logits.index_select(0, staged.logprob_rows).div_(torch.where(temperature > 0, temperature, 1.0))
    if reported is None:
        return DeviceSamples(token_ids, best, None, None, None)
    ids, logprobs, ranks = _rank(token_ids.index_select(0, staged.logprob_rows), reported, as_logits=logprobs_mode.endswith("logits"))
    return DeviceSamples(token_ids, best, ids, logprobs, ranks)


def _mask_forbidden(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    chosen = logits.index_select(0, rows)
    # NaN stays NaN, as on the host: a request that has it fails, and a mask must not make it look fine.
    logits.index_copy_(0, rows, chosen.masked_fill_(~(is_allowed | chosen.isnan()), -torch.inf))


def _let_grammars_end(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, eos_token_ids: torch.Tensor) -> None:
    """As `grammar.let_grammars_end`, without a look at the numbers on the host. eos_token_ids: [e] int64."""
    chosen = logits.index_select(0, rows)  # [g, vocab_size]
    is_dead = (chosen == -torch.inf).all(dim=1)
    may_end = ((bits.index_select(1, eos_token_ids // 8) >> (eos_token_ids % 8).to(torch.uint8)) & 1).bool()  # [g, e]
    ending = chosen.index_select(1, eos_token_ids).masked_fill_(may_end & is_dead[:, None], 0.0)
    logits.index_put_((rows[:, None], eos_token_ids), ending)


def _rank(token_ids: torch.Tensor, logits: torch.Tensor, *, as_logits: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [k, 1 + top] int32, values [k, 1 + top] float32 and ranks [k] int32, for the tokens [k] of `logits` [k, vocab_size]."""
    # Always the same width: which of two equal logits comes first must not depend on what the batch mates ask for.
    top_ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1).indices
    ids = torch.cat((token_ids.unsqueeze(1).long(), top_ids), dim=1)
    logprobs, ranks = token_logprobs(logits, ids)
    return ids.int(), logits.gather(1, ids) if as_logits else logprobs, ranks
