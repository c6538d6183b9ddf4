"""From logits to tokens on a device: nothing here waits for it, and the tokens stay there for the next step.

Same parameters as the host's sampler, another stream of random numbers (see `aioengine_kernels.gumbel`): greedy tokens agree,
seeded ones are a function of the seed on either, but not the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aioengine.outputs import Logprob, TokenLogprobs
from aioengine.sampling_params import MAX_LOGPROBS
from aioengine.worker.sample.states import SamplingBatch
from aioengine.worker.staging import StagedArrays
from aioengine_kernels.gumbel import gumbel_argmax
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
    arrays: StagedArrays  # what the tensors are views of


@dataclass(frozen=True, slots=True)
class DeviceSamples:
    """What is copied to the host: the tokens, and the log-probabilities of the rows that asked."""

    token_ids: torch.Tensor  # [n] int32
    logprob_token_ids: torch.Tensor | None  # [k, 1 + top] int32: the sampled token, then the likeliest ones
    logprobs: torch.Tensor | None  # [k, 1 + top] float32
    ranks: torch.Tensor | None  # [k] int32: of the sampled token

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.token_ids, self.logprob_token_ids, self.logprobs, self.ranks) if t is not None]


def sampling_arrays(batch: SamplingBatch, slots: npt.NDArray[np.int64], *, vocab_size: int) -> list[npt.NDArray[np.generic]]:
    """What the host sends of a step's parameters, in the order of `StagedSampling`'s tensors."""
    masked = [row * vocab_size + token_ids for row, token_ids in batch.ending_token_ids.items()]
    return [
        slots.astype(np.int32),
        batch.temperature,
        np.minimum(batch.top_k, vocab_size).astype(np.int32),
        batch.top_p.astype(np.float32),
        np.exp(batch.log_min_p),
        batch.seeds.view(np.int64),
        batch.output_indices.astype(np.int32),
        np.concatenate(masked) if masked else np.zeros(0, dtype=np.int64),
        (batch.num_logprobs >= 0).nonzero()[0],
    ]


def staged_sampling(arrays: StagedArrays, batch: SamplingBatch, *, first: int) -> StagedSampling:
    """`sampling_arrays` as they came to the device, from the array numbered `first` on."""
    rows = (batch.num_logprobs >= 0).nonzero()[0]
    has_filter = (batch.top_k > 0) | (batch.top_p < 1) | np.isfinite(batch.log_min_p)
    slots, temperature, top_k, top_p, min_p, seeds, output_indices, masked_positions, logprob_rows = arrays.tensors[first:]
    return StagedSampling(
        slots=slots,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        output_indices=output_indices,
        masked_positions=masked_positions,
        logprob_rows=logprob_rows,
        logprob_rows_np=rows,
        num_logprobs=batch.num_logprobs[rows].tolist(),
        needs_filters=bool((has_filter & (batch.temperature > 0)).any()),
        arrays=arrays,
    )


def sample_on_device(
    logits: torch.Tensor,  # [n, vocab_size] float32, contiguous; overwritten
    staged: StagedSampling,
    *,
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs] int32, written at `staged.slots`
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None,  # rows [g] int64 and their bits [g, bytes] uint8, see `apply_bitmask`
) -> DeviceSamples:
    """One token a row. The order is: grammar and min_tokens masks; min-p, top-k and top-p; the Gumbel arg-max."""
    # The raw logits are what log-probabilities are of, and everything below writes to them.
    raw = logits.index_select(0, staged.logprob_rows) if staged.num_logprobs else None
    if allowed is not None:
        _mask_forbidden(logits, *allowed)
    if staged.masked_positions.shape[0]:
        logits.view(-1).index_fill_(0, staged.masked_positions, -torch.inf)
    if staged.needs_filters:
        top_k_top_p(logits, temperature=staged.temperature, top_k=staged.top_k, top_p=staged.top_p, min_p=staged.min_p)
    token_ids = gumbel_argmax(
        logits,
        temperature=staged.temperature,
        seeds=staged.seeds,
        indices=staged.output_indices,
        idx_mapping=staged.slots,
        last_sampled_tokens=last_sampled_tokens,
    )
    if raw is None:
        return DeviceSamples(token_ids, None, None, None)
    return _with_logprobs(token_ids, raw, staged.logprob_rows)


def _mask_forbidden(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~is_allowed, -torch.inf))


def _with_logprobs(token_ids: torch.Tensor, raw: torch.Tensor, rows: torch.Tensor) -> DeviceSamples:
    # Always the same width: which of two equal logits comes first must not depend on what the batch mates ask for.
    top_ids = raw.topk(min(MAX_LOGPROBS, raw.shape[1]), dim=-1).indices
    ids = torch.cat((token_ids.index_select(0, rows).unsqueeze(1).long(), top_ids), dim=1)
    logprobs, ranks = token_logprobs(raw, ids)
    return DeviceSamples(token_ids, ids.int(), logprobs, ranks)


def read_logprobs(
    ids: npt.NDArray[np.int32],  # [k, 1 + top]
    logprobs: npt.NDArray[np.float32],  # [k, 1 + top]
    ranks: npt.NDArray[np.int32],  # [k]
    num_logprobs: list[int],  # [k]
) -> list[TokenLogprobs]:  # [k]
    """A row's sampled token with its true rank, then as many of the likeliest as it wants."""
    result: list[TokenLogprobs] = []
    for row_ids, values, rank, wanted in zip(ids.tolist(), logprobs.tolist(), ranks.tolist(), num_logprobs, strict=True):
        entry: TokenLogprobs = {row_ids[0]: Logprob(logprob=values[0], rank=rank)}
        for place in range(1, min(wanted, len(row_ids) - 1) + 1):
            entry.setdefault(row_ids[place], Logprob(logprob=values[place], rank=place))
        result.append(entry)
    return result
