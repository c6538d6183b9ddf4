"""From logits to tokens, for all rows of a step at once.

The order is vLLM's:

1. `raw_logprobs` and `raw_logits` are taken from what the model gave.
2. What may not be sampled becomes -inf: the grammar's bitmask, allowed_token_ids, bad_words, min_tokens.
3. logit_bias is added; custom processors that may change the arg-max (`logits_processor.py`).
4. Penalties: repetition, then frequency, then presence. If nothing is left of what a grammar allows, and it allows the end of
   the output, that is what comes.
5. Greedy rows take the arg-max. The others: temperature, min_p, custom processors that are argmax-invariant, top_k, top_p, and
   the inverse of the cumulative distribution at one uniform number.
6. `processed_logprobs` and `processed_logits` are taken from what the token was chosen from: after 4 for greedy rows, after
   top_p for the others.

A row's token is a function of its own logits and parameters, bit for bit. That rules out `sum` and `logsumexp` over the
vocabulary, which torch splits differently for one row than for several; `softmax`, `log_softmax` and `cumsum` work row
by row (measured on torch 2.13, 1 to 17 rows, 1 and 2 threads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aioengine.outputs import TokenLogprobs
from aioengine.resolved_config import LogprobsMode
from aioengine.worker.sample.filters import apply_min_p, apply_temperature, mask_ending_tokens
from aioengine.worker.sample.grammar import apply_bitmask, let_grammars_end
from aioengine.worker.sample.logit_edits import LogitEdits, apply_bias, apply_masks, apply_penalties
from aioengine.worker.sample.logits_processor import LoadedProcessor, ProcessorRow
from aioengine.worker.sample.logprobs import collect_logprobs
from aioengine.worker.sample.states import SamplingBatch
from aioengine.worker.sample.top_k_top_p import KeptTokens, keep_top_k_top_p
from aioengine_kernels.inverse_cdf import inverse_cdf
from aioengine_kernels.philox import uniform

NAN_LOGITS = "the model gave logits that are not numbers (NaN or infinite) for this request, so no token could be sampled"
NOTHING_ALLOWED = (
    "no token is left to sample: allowed_token_ids, bad_words, min_tokens, the grammar and logits processors together forbid every one"
)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a row, and the log-probabilities of the rows that asked for them."""

    token_ids: torch.Tensor  # [n] int64
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row
    failed: dict[int, str] = field(default_factory=dict)  # by row: why its token, though a valid id, means nothing


@dataclass(frozen=True, slots=True)
class RowProcessors:
    """The custom processors, and what they are told of the rows of this step."""

    processors: Sequence[LoadedProcessor]
    rows: Sequence[ProcessorRow]  # [n]

    def apply(self, logits: torch.Tensor, *, argmax_invariant: bool, chosen: npt.NDArray[np.int64] | None = None) -> None:
        """Run those of one kind on `logits`, in place: of all rows, or of the `chosen` ones [n]."""
        rows = self.rows if chosen is None else [self.rows[row] for row in chosen.tolist()]
        for processor in self.processors:
            if processor.is_argmax_invariant == argmax_invariant:
                processor.apply(logits, rows)


def sample(
    logits: torch.Tensor,  # [n, vocab_size] float32, n >= 1, contiguous; overwritten
    batch: SamplingBatch,
    *,
    bitmasks: Mapping[int, bytes] | None = None,  # by row: the tokens that a grammar allows
    token_table: torch.Tensor | None = None,  # [max_num_reqs, max_model_len] int32: what penalties and bad_words look at
    processors: RowProcessors | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> SamplerOutput:
    """Sample one token a row, in the order that the module describes. A row that cannot be sampled from is in `failed`."""
    wanted = (batch.num_logprobs >= 0).nonzero()[0]
    scores = _score(logits, wanted, logprobs_mode) if len(wanted) and logprobs_mode.startswith("raw") else None
    _edit(logits, batch, bitmasks=bitmasks or {}, token_table=token_table, processors=processors)

    is_processed = bool(len(wanted)) and scores is None
    token_ids, chance = _choose(logits, batch, processors=processors, keep_processed=is_processed)
    if is_processed:
        scores = _score(logits, wanted, logprobs_mode)
    failed = _find_failed(logits, chance)
    if scores is None:
        return SamplerOutput(token_ids, failed=failed)
    entries = collect_logprobs(scores, token_ids[_index(wanted, logits.device)], num_logprobs=batch.num_logprobs[wanted].tolist())
    return SamplerOutput(token_ids, dict(zip(wanted.tolist(), entries, strict=True)), failed)


def _choose(
    logits: torch.Tensor,  # [n, vocab_size], overwritten
    batch: SamplingBatch,
    *,
    processors: RowProcessors | None,
    keep_processed: bool,  # leave in `logits` what each row chose from
) -> tuple[torch.Tensor, torch.Tensor]:  # [n] int64, and [n] float32: what `_find_failed` looks at
    random = (batch.temperature > 0).nonzero()[0]
    if len(random) == len(logits):
        return _sample_random(logits, batch, random, processors=processors, drop=keep_processed)
    token_ids, chance = _greedy(logits)
    if len(random):
        index, chosen = _index(random, logits.device), _rows(logits, random)
        token_ids[index], chance[index] = _sample_random(chosen, batch, random, processors=processors, drop=keep_processed)
        if keep_processed:
            logits[index] = chosen
    return token_ids, chance


def _edit(
    logits: torch.Tensor,  # [n, vocab_size], changed in place
    batch: SamplingBatch,
    *,
    bitmasks: Mapping[int, bytes],
    token_table: torch.Tensor | None,
    processors: RowProcessors | None,
) -> None:
    logit_edits = None
    if batch.logit_edits is not None:
        assert token_table is not None, "penalties and bad_words need the token table"
        tensors = {name: torch.from_numpy(array).to(logits.device) for name, array in batch.logit_edits.arrays().items()}
        logit_edits = LogitEdits.build(batch.logit_edits, tensors, token_table=token_table)
    for row, bitmask in bitmasks.items():
        apply_bitmask(logits[row], bitmask)
    if logit_edits is not None:
        apply_masks(logits, logit_edits)
    if batch.ending_token_ids:
        mask_ending_tokens(logits, list(batch.ending_token_ids), list(batch.ending_token_ids.values()))
    if logit_edits is not None:
        apply_bias(logits, logit_edits)
    if processors is not None:
        processors.apply(logits, argmax_invariant=False)
    if logit_edits is not None:
        apply_penalties(logits, logit_edits)
    if bitmasks and (logit_edits is not None or processors is not None):
        let_grammars_end(logits, bitmasks, batch.eos_token_ids)


def _score(logits: torch.Tensor, rows: npt.NDArray[np.int64], mode: LogprobsMode) -> torch.Tensor:  # [len(rows), vocab_size]
    """What is reported of these rows as the logits are now, in memory of its own."""
    chosen = _rows(logits, rows)
    return chosen.log_softmax(dim=-1) if mode.endswith("logprobs") else chosen.clone()


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit's token of each row [n], and that logit [n]; NaN counts as the largest."""
    # On a CPU by NumPy, whose arg-max is the same (the first of the largest, NaN before all) in a tenth of the time.
    on_host = logits.device.type == "cpu"
    token_ids = torch.from_numpy(logits.numpy().argmax(axis=-1)) if on_host else logits.argmax(dim=-1)
    return token_ids, logits.gather(1, token_ids[:, None])[:, 0]


def _find_failed(logits: torch.Tensor, chance: torch.Tensor) -> dict[int, str]:
    """chance [n]: the chosen token's logit or probability. It is a number exactly if the row's logits were ones.

    A probability is NaN for all tokens if one logit is NaN or all are -inf.
    """
    is_bad = ~chance.isfinite()
    if not bool(is_bad.any()):
        return {}
    rows = is_bad.nonzero()[:, 0].tolist()
    return {row: NOTHING_ALLOWED if bool((logits[row] == -torch.inf).all()) else NAN_LOGITS for row in rows}


def _sample_random(
    logits: torch.Tensor,  # [n, vocab_size] float32, overwritten
    batch: SamplingBatch,
    rows: npt.NDArray[np.int64],  # [n]: where these logits are in the batch
    *,
    processors: RowProcessors | None,
    drop: bool,  # leave -inf in the logits of what top_k and top_p drop
) -> tuple[torch.Tensor, torch.Tensor]:  # [n] int64, and [n] float32: their probabilities
    device = logits.device
    apply_temperature(logits, torch.from_numpy(batch.temperature[rows]).to(device))
    log_min_p = batch.log_min_p[rows]
    if np.isfinite(log_min_p).any():
        apply_min_p(logits, torch.from_numpy(log_min_p).to(device))
    if processors is not None:
        processors.apply(logits, argmax_invariant=True, chosen=rows)
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
        for kept in list(groups):
            group = index[kept.rows]
            chosen = inverse_cdf(kept.weights, numbers[group])
            token_ids[group] = kept.token_ids.gather(1, chosen[:, None])[:, 0]
            if drop:
                logits[group] = _only_kept(logits[group], kept)
    # Only NaN logits choose padding. Their request's tokens mean nothing, but they must be valid ids.
    token_ids = token_ids.clamp_(max=logits.shape[1] - 1)
    return token_ids, probs.gather(1, token_ids[:, None])[:, 0]


def _only_kept(logits: torch.Tensor, kept: KeptTokens) -> torch.Tensor:  # both [m, vocab_size]
    """-inf for what may not be sampled."""
    vocab_size = logits.shape[1]
    kept_logits = logits.gather(1, kept.token_ids.clamp(max=vocab_size - 1)).masked_fill_(kept.weights == 0, -torch.inf)
    room = logits.new_full((len(logits), vocab_size + 1), -torch.inf)  # padding goes to the last column
    return room.scatter_(1, kept.token_ids, kept_logits)[:, :vocab_size]


def _index(rows: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows).to(device)


def _rows(tensor: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """`tensor[rows]`, without a copy if those are all rows."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, _index(rows, tensor.device))
