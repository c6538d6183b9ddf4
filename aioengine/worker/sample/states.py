"""Sampling parameters by slot: written once when a request gets its slot, gathered for the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.logit_edits import LogitEditArrays, RequestLogitEdits, logit_edit_arrays, request_logit_edits
from aioengine.worker.sample.row import params_row

SlotArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the rows that sample in this step."""

    temperature: npt.NDArray[np.float32]  # [n]; 0 is greedy
    top_k: npt.NDArray[np.int64]  # [n]; 0 keeps all
    top_p: npt.NDArray[np.float64]  # [n]
    log_min_p: npt.NDArray[np.float32]  # [n]; -inf keeps all
    seeds: npt.NDArray[np.uint64]  # [n]
    output_indices: npt.NDArray[np.int64]  # [n]: how many tokens each request has generated before this one
    num_logprobs: npt.NDArray[np.int64]  # [n]; -1: none wanted
    ending_token_ids: dict[int, npt.NDArray[np.int64]]  # by row: what may not be sampled yet, because of min_tokens
    eos_token_ids: SlotArray  # [e]: of the model, those that it has logits for
    logit_edits: LogitEditArrays | None = None  # None: no row has a penalty, a bias, allowed_token_ids or bad_words


class SamplingStates:
    """Per-slot tables of `max_num_reqs` rows."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.eos_token_ids = np.asarray(sorted(i for i in eos_token_ids if i < vocab_size), dtype=np.int64)
        self.temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self.top_p = np.ones(max_num_reqs, dtype=np.float64)
        self.log_min_p = np.full(max_num_reqs, -np.inf, dtype=np.float32)
        self.seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_reqs, -1, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._ending_token_ids: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * max_num_reqs
        self._logit_edits: dict[int, RequestLogitEdits] = {}  # by slot: only of requests that change their logits

    def set(self, slot: int, params: SamplingParams, *, num_prompt_tokens: int = 0) -> None:
        """Write a request's parameters to its slot; `params.seed` is a number here (the input processor drew it).

        Raises ValueError, or whatever else shows that they cannot be written; the slot's row is to be `reset` then.
        """
        row, logit_edits = params_row(params), request_logit_edits(params, vocab_size=self._vocab_size)
        self.temperature[slot] = row.temperature
        self.top_k[slot] = row.top_k
        self.top_p[slot] = row.top_p
        self.log_min_p[slot] = row.log_min_p
        self.seeds[slot] = row.seed
        self.min_tokens[slot] = row.min_tokens
        self.num_logprobs[slot] = row.num_logprobs
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.clear(slot)
        if logit_edits is not None:
            self._logit_edits[slot] = logit_edits
        ending = {i for i in self._eos_token_ids.union(params.stop_token_ids) if i < self._vocab_size}
        # The mask of a structured output has min_tokens in it: only there is known whether anything else is allowed.
        must_mask = params.min_tokens > 0 and params.structured_outputs is None
        self._ending_token_ids[slot] = np.asarray(sorted(ending) if must_mask else [], dtype=np.int64)

    def reset(self, slot: int, *, num_prompt_tokens: int) -> None:
        """A row that can be sampled from, whatever it means: greedy, with nothing that could fail."""
        self.set(slot, SamplingParams(temperature=0.0, seed=0), num_prompt_tokens=num_prompt_tokens)

    def clear(self, slot: int) -> None:
        """The slot's request is gone: nothing of it must cost the others time."""
        self._logit_edits.pop(slot, None)

    def take_argmax(self, slots: SlotArray, output_indices: npt.NDArray[np.int64]) -> bool:
        """Whether all these rows take the largest logit as the model gave it, and nothing else is wanted of the logits."""
        return not (
            (self.temperature[slots] > 0).any()
            or (self.num_logprobs[slots] >= 0).any()
            or (output_indices < self.min_tokens[slots]).any()
            or (self._logit_edits and any(slot in self._logit_edits for slot in slots.tolist()))
        )

    def gather(self, slots: SlotArray, output_indices: npt.NDArray[np.int64]) -> SamplingBatch:
        """The rows `slots` [n], which are about to sample their `output_indices`-th [n] token.

        A slot may come several times: its rows differ in how many tokens come before them.
        """
        too_short = (output_indices < self.min_tokens[slots]).nonzero()[0].tolist()
        return SamplingBatch(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            log_min_p=self.log_min_p[slots],
            seeds=self.seeds[slots],
            output_indices=output_indices,
            num_logprobs=self.num_logprobs[slots],
            ending_token_ids={row: ids for row in too_short if len(ids := self._ending_token_ids[slots[row]])},
            eos_token_ids=self.eos_token_ids,
            logit_edits=self._gather_logit_edits(slots, output_indices) if self._logit_edits else None,
        )

    def _gather_logit_edits(self, slots: SlotArray, output_indices: npt.NDArray[np.int64]) -> LogitEditArrays | None:
        rows = [(row, self._logit_edits[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._logit_edits]
        if not rows:
            return None
        num_prompt_tokens = self.num_prompt_tokens[slots]
        return logit_edit_arrays(
            rows,
            slots=slots,
            history_lens=num_prompt_tokens + output_indices,
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=self._vocab_size,
        )
