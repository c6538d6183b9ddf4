"""Embeddings: the hidden states of a prompt as one vector, a chunk at a time, as the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.worker.input_batch import InputBatch
from aioengine.worker.request_state import RequestStates


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The requests whose prompt ends in a step, and their vectors."""

    req_ids: list[str]
    vectors: torch.Tensor  # [len(req_ids), hidden_size] float32


class Pooler:
    """Keeps the sums of prompts that are not complete. In float64: how a prompt is cut into chunks shall not be seen."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}  # [hidden_size] float64, of requests that want a mean

    def pool(self, batch: InputBatch, states: RequestStates, hidden_states: torch.Tensor) -> PooledRows | None:
        """Take in the hidden states [num_tokens, hidden_size] of a step; None if no request gets its vector."""
        if not states.pooled_req_ids:
            self._sums.clear()  # of requests that ended early
            return None
        if len(self._sums) > len(states.pooled_req_ids):
            self._sums = {req_id: total for req_id, total in self._sums.items() if req_id in states.pooled_req_ids}
        req_ids: list[str] = []
        vectors: list[torch.Tensor] = []
        for i, req_id in enumerate(batch.req_ids):
            params = states.pooling_params(req_id)
            if params is None:
                continue
            start, end = int(batch.query_start_loc_np[i]), int(batch.query_start_loc_np[i + 1])
            seq_len = int(batch.seq_lens_np[i])
            if params.needs_all_tokens:
                self._add(req_id, hidden_states[start:end], is_first=seq_len == end - start)
            if seq_len == states.num_prompt_tokens[batch.idx_mapping_np[i]]:
                vector = self._sums.pop(req_id) / seq_len if params.needs_all_tokens else hidden_states[end - 1].double()
                req_ids.append(req_id)
                vectors.append(vector / vector.norm().clamp(min=1e-12) if params.normalize else vector)
        return PooledRows(req_ids, torch.stack(vectors).float()) if req_ids else None

    def _add(self, req_id: str, hidden_states: torch.Tensor, *, is_first: bool) -> None:
        """is_first: the chunk begins the prompt, for the first time or after a preemption."""
        total = hidden_states.sum(dim=0, dtype=torch.float64)
        self._sums[req_id] = total if is_first else self._sums[req_id] + total


def read_pooled(rows: PooledRows, fetched: Sequence[npt.NDArray[Any]]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The vectors by request, once they are on the host, and which requests failed, and why."""
    (vectors,) = fetched
    finite = np.isfinite(vectors).all(axis=1)
    pooled = {req_id: vectors[i].tolist() for i, req_id in enumerate(rows.req_ids) if finite[i]}
    return pooled, {req_id: "its hidden states are not finite" for i, req_id in enumerate(rows.req_ids) if not finite[i]}
