"""Sampling parameters by slot: written once when a request gets its slot, gathered for the rows of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioengine.sampling_params import SamplingParams

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


class SamplingStates:
    """Per-slot tables of `max_num_reqs` rows."""

    def __init__(self, *, max_num_reqs: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_reqs, dtype=np.int64)
        self.top_p = np.ones(max_num_reqs, dtype=np.float64)
        self.log_min_p = np.full(max_num_reqs, -np.inf, dtype=np.float32)
        self.seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self.min_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_reqs, -1, dtype=np.int64)
        self._ending_token_ids: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)] * max_num_reqs

    def set(self, slot: int, params: SamplingParams) -> None:
        """Write a request's parameters to its slot; `params.seed` is a number here (the input processor drew it)."""
        assert params.seed is not None, "the input processor fills in the seed"
        self.temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.log_min_p[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.seeds[slot] = params.seed
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        ending = {i for i in self._eos_token_ids.union(params.stop_token_ids) if i < self._vocab_size}
        self._ending_token_ids[slot] = np.asarray(sorted(ending) if params.min_tokens else [], dtype=np.int64)

    def gather(self, slots: SlotArray, output_indices: npt.NDArray[np.int64]) -> SamplingBatch:
        """The rows `slots` [n], which are about to sample their `output_indices`-th [n] token."""
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
        )
