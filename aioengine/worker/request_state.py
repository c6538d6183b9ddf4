"""What the worker remembers of requests between steps: tables indexed by slot.

A request gets a slot when it starts or resumes, and keeps it until it ends or is preempted. Rows are never moved, so a
step only names the slots it works on (`InputBatch.idx_mapping`) and is thrown away afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aioengine.pooling_params import PoolingParams
from aioengine.printable import get_logger
from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.states import SamplingStates

logger = get_logger(__name__)

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CachedRequestState:
    """What a preemption must not lose; tokens and blocks come back with the `SchedulerOutput` that resumes the request."""

    req_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    pooling_params: PoolingParams | None = None


class RequestStates:
    """The slots, and the token table [max_num_reqs, max_model_len] that the model's input is gathered from.

    Sampled tokens are written to the table here, in the worker; the scheduler never sends them back.
    """

    def __init__(self, *, max_num_reqs: int, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.token_ids: IntArray = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.token_ids_tensor = torch.from_numpy(self.token_ids)  # the same memory
        self.num_known_tokens: IntArray = np.zeros(max_num_reqs, dtype=np.int32)  # prompt, and output sampled so far
        self.num_prompt_tokens: IntArray = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_computed_tokens: IntArray = np.zeros(max_num_reqs, dtype=np.int32)  # where the current step starts
        self.sampling = SamplingStates(max_num_reqs=max_num_reqs, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._requests: dict[str, CachedRequestState] = {}  # with and without a slot
        self._slots: dict[str, int] = {}
        self._num_prompt_logprobs: dict[str, int] = {}  # of requests that want them: prompt tokens that were reported, or need not be
        self.pooled_req_ids: set[str] = set()  # those that want an embedding
        self.lora_names: dict[str, str] = {}  # of requests that have an adapter
        # Requests that could not be written into the tables, and why. Their rows are filled with what does no harm, so that the
        # step that they are in runs for the others.
        self.failed: dict[str, str] = {}
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))  # a stack: low slots first

    @property
    def num_requests(self) -> int:
        """Requests that are remembered, the preempted ones included."""
        return len(self._requests)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def slot_of(self, req_id: str) -> int | None:
        """The slot of a request, or None if it has none (unknown or preempted)."""
        return self._slots.get(req_id)

    def add(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        pooling_params: PoolingParams | None = None,
        lora_name: str | None = None,
    ) -> int:
        """Take a slot for a new request and fill it; returns the slot."""
        assert req_id not in self._requests, f"request {req_id!r} is already known to the worker"
        self._requests[req_id] = CachedRequestState(req_id, len(prompt_token_ids), sampling_params, pooling_params)
        if pooling_params is not None:
            self.pooled_req_ids.add(req_id)
        if lora_name is not None:
            self.lora_names[req_id] = lora_name
        if sampling_params.prompt_logprobs is not None:
            self._num_prompt_logprobs[req_id] = 1  # nothing comes before the first
        return self._occupy(req_id, prompt_token_ids)

    def resume(self, req_id: str, all_token_ids: Sequence[int]) -> int:
        """Take a slot for a preempted request whose prompt and output so far are `all_token_ids`; returns the slot."""
        assert req_id not in self._slots, f"request {req_id!r} resumes but was never preempted"
        return self._occupy(req_id, all_token_ids)

    def preempt(self, req_id: str) -> None:
        """Free the slot, keep the parameters. A request without a slot is left as it is."""
        slot = self._slots.pop(req_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            self.sampling.clear(slot)

    def remove(self, req_id: str) -> None:
        """Forget a request. Unknown ids are ignored: it may have ended before the worker ever heard of it."""
        self.preempt(req_id)
        self._requests.pop(req_id, None)
        self._num_prompt_logprobs.pop(req_id, None)
        self.failed.pop(req_id, None)
        self.pooled_req_ids.discard(req_id)
        self.lora_names.pop(req_id, None)

    def write_history(self, slot: int, all_token_ids: Sequence[int]) -> None:
        """Overwrite the known tokens of a slot from position 0."""
        self.token_ids[slot, : len(all_token_ids)] = all_token_ids

    def append_sampled(self, req_ids: Sequence[str], slots: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Write one sampled token behind the known ones of each slot [n].

        A request that has lost its slot since the step was executed is skipped: the slot may belong to someone else.
        """
        live = self._holds(req_ids, slots)
        slots, token_ids = slots[live], token_ids[live]
        self.token_ids[slots, self.num_known_tokens[slots]] = token_ids
        self.num_known_tokens[slots] += 1

    def write_draft_tokens(self, req_id: str, token_ids: Sequence[int]) -> None:
        """Put draft tokens behind the known tokens of a request, for one step to read. They stay unknown."""
        slot = self._slots[req_id]
        start = int(self.num_known_tokens[slot])
        self.token_ids[slot, start : start + len(token_ids)] = token_ids

    def append_accepted(self, req_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """Write the tokens of a request that had draft tokens behind its known ones. As `append_sampled` for who lost its slot."""
        if self._slots.get(req_id) == slot:
            start = int(self.num_known_tokens[slot])
            self.token_ids[slot, start : start + len(token_ids)] = token_ids
            self.num_known_tokens[slot] = start + len(token_ids)

    def count_sampled(self, req_ids: Sequence[str], slots: npt.NDArray[np.int64]) -> None:
        """As `append_sampled`, where the token itself stays on the device: one more token is known of each slot [n]."""
        self.num_known_tokens[slots[self._holds(req_ids, slots)]] += 1

    def sampling_params(self, req_id: str) -> SamplingParams:
        return self._requests[req_id].sampling_params

    def pooling_params(self, req_id: str) -> PoolingParams | None:
        return self._requests[req_id].pooling_params

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some request does."""
        return bool(self._num_prompt_logprobs)

    def take_prompt_positions(self, req_id: str, *, start: int, end: int) -> range:
        """Of the positions start .. end - 1 that a step computes: those whose next token is of the prompt and has not been
        reported. They count as reported from now on, also when a preemption makes them be computed again."""
        reported = self._num_prompt_logprobs.get(req_id)
        if reported is None:
            return range(0)
        positions = range(max(start, reported - 1), min(end, self._requests[req_id].num_prompt_tokens - 1))
        if positions:
            assert positions.start == reported - 1, f"request {req_id!r} skips prompt positions: {reported} reported, step from {start}"
            self._num_prompt_logprobs[req_id] = positions.stop + 1
        return positions

    def _holds(self, req_ids: Sequence[str], slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[n]: whether each request still has its slot."""
        return np.fromiter((self._slots.get(r) == s for r, s in zip(req_ids, slots.tolist(), strict=True)), dtype=bool, count=len(req_ids))

    def _occupy(self, req_id: str, token_ids: Sequence[int]) -> int:
        state = self._requests[req_id]
        if not self._free_slots:
            raise RuntimeError(f"request {req_id!r} got no slot: all {self.max_num_reqs} (max_num_seqs) are taken")
        slot = self._free_slots.pop()
        self._slots[req_id] = slot
        self.num_known_tokens[slot] = len(token_ids)
        self.num_prompt_tokens[slot] = state.num_prompt_tokens
        try:
            self.write_history(slot, token_ids)
            self.sampling.set(slot, state.sampling_params, num_prompt_tokens=state.num_prompt_tokens)
        except Exception as exc:  # whatever it is, it is about this request: no other shares the row
            logger.exception("request %r cannot be written into the worker's tables", req_id)
            self.failed[req_id] = f"the request cannot be run: {type(exc).__name__}: {exc}"
            self.token_ids[slot, : len(token_ids)] = 0
            self.sampling.reset(slot, num_prompt_tokens=state.num_prompt_tokens)
        return slot
