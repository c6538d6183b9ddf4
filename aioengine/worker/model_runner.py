"""Applies a `SchedulerOutput` to the worker's state, runs the model, samples."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from aioengine.attention.base import AttentionBackend
from aioengine.config import ResolvedConfig
from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.outputs import ModelRunnerOutput, TokenLogprobs, WorkerTiming
from aioengine.worker.async_output import AsyncOutput, Pending
from aioengine.worker.block_table import BlockTable
from aioengine.worker.cuda_graphs import DecodeGraphs, graph_batch_sizes
from aioengine.worker.device import Device
from aioengine.worker.input_batch import InputBatch
from aioengine.worker.pipeline import SampledRows
from aioengine.worker.request_state import RequestStates
from aioengine.worker.warm_up import warm_up_steps

if TYPE_CHECKING:
    from aioengine.executor.base import GrammarOutput
    from aioengine.models.base import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """A step whose forward has run and whose tokens have not been sampled."""

    batch: InputBatch | None  # None: a clean-up-only step
    hidden_states: torch.Tensor | None  # [num_sampled, hidden_size]: only the rows at `logits_indices`
    execute_start: float
    execute_end: float


class ModelRunner:
    """Runs steps strictly in the order in which they come; lives in the worker's thread.

    `execute_model` and `sample_tokens` are called once a step each. A step may be executed before the previous one has
    been sampled only if it needs none of that one's tokens.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        model: CausalLM,
        attention_backend: AttentionBackend,
        kv_caches: list[torch.Tensor],  # one a layer, in the backend's layout
        device: Device,
    ) -> None:
        self._scheduler_config = config.scheduler
        self._model = model
        self._backend = attention_backend
        self._kv_caches = kv_caches
        self._device = device
        self.states = RequestStates(
            max_num_reqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            vocab_size=config.model.vocab_size,
            eos_token_ids=config.model.eos_token_ids,
        )
        self.block_table = BlockTable(
            max_num_reqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
        )
        self._pipeline = device.create_pipeline(config, states=self.states, block_table=self.block_table)
        self.use_graphs = True  # of those that were captured; False runs every step eagerly
        self._graphs = DecodeGraphs(graph_batch_sizes(config.scheduler.max_num_seqs))
        self._executed: deque[ExecuteModelState] = deque()

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture decode steps, so that the device runs them without the host's launches. Before the first step."""
        seconds = self._graphs.capture(self._forward_padded, capture_graph=self._device.capture_graph)
        logger.info("captured the CUDA graphs of decode steps in %.1f s", seconds)

    @property
    def num_graphs(self) -> int:
        """How many sizes of decode steps were captured."""
        return self._graphs.num_captured

    def warm_up(self) -> None:
        """Take two requests through a step of prompts and a decode step, so that kernels are compiled before anybody waits.

        Before the first step: it writes to block 1, which nobody owns yet.
        """
        for out in warm_up_steps(self._scheduler_config, block_size=self.block_table.block_size):
            self.execute_model(out)
            output = self.sample_tokens()
            if isinstance(output, AsyncOutput):
                output.wait()

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> None:
        """Update the state and run the forward; the hidden rows to sample from are kept for `sample_tokens`."""
        start = time.perf_counter()
        self._update_states(out)
        batch, hidden_states = None, None
        if not out.is_cleanup_only:
            batch = self._pipeline.build_batch(out)
            hidden_states = self._forward(batch, block_ids_to_zero=out.new_block_ids_to_zero)
        self._executed.append(ExecuteModelState(batch, hidden_states, start, time.perf_counter()))

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[SampledRows]:
        """Sample for the oldest executed step and keep the tokens for the next ones.

        Returns the tokens, or where the device is still computing them, what waits for them.
        Raises RuntimeError if no executed step is waiting.
        """
        start = time.perf_counter()
        if not self._executed:
            raise RuntimeError("sample_tokens was called, but no executed step is waiting to be sampled")
        state = self._executed.popleft()
        rows: SampledRows | Pending[SampledRows] = SampledRows([])
        if state.batch is not None:
            if len(state.batch.sampled_np):
                assert state.hidden_states is not None
                rows = self._sample(state.batch, state.hidden_states, grammar_output)
            self._pipeline.end_step(state.batch)
        make_output = partial(_make_output, state.batch, (state.execute_start, state.execute_end, start))
        return make_output(rows) if isinstance(rows, SampledRows) else AsyncOutput(rows, make_output)

    # ------------------------------------------------------------------ state
    def _update_states(self, out: SchedulerOutput) -> None:
        # Who is gone comes first: the slots they free may be needed by those who come.
        for req_id in out.finished_req_ids:
            self.states.remove(req_id)
        for req_id in out.preempted_req_ids:
            self.states.preempt(req_id)
        for new in out.scheduled_new_reqs:
            self._add_request(new)
        self._update_cached_requests(out.scheduled_cached_reqs)

    def _add_request(self, new: NewRequestData) -> None:
        slot = self.states.add(new.req_id, new.prompt_token_ids, new.sampling_params)
        self.states.num_computed_tokens[slot] = new.num_computed_tokens
        self.block_table.replace_row(slot, _only_group(new.block_ids))

    def _update_cached_requests(self, cached: CachedRequestData) -> None:
        states = self.states
        for i, req_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert block_ids is not None, f"request {req_id!r} resumes without blocks"
                slot = states.resume(req_id, cached.all_token_ids[req_id])
                self.block_table.replace_row(slot, _only_group(block_ids))
            else:
                known_slot = states.slot_of(req_id)
                assert known_slot is not None, f"request {req_id!r} is unknown to the worker"
                slot = known_slot
                if req_id in cached.all_token_ids:
                    states.write_history(slot, cached.all_token_ids[req_id])
                if block_ids is not None:
                    self.block_table.append_row(slot, _only_group(block_ids))
            states.num_computed_tokens[slot] = cached.num_computed_tokens[i]
            self._align_known_tokens(req_id, slot, cached.num_output_tokens[i], resent=len(cached.all_token_ids.get(req_id, ())))

    def _align_known_tokens(self, req_id: str, slot: int, num_output_tokens: int, *, resent: int) -> None:
        """The scheduler's count rules: it may be lower than ours, where it cut an output that we had sampled further."""
        expected = int(self.states.num_prompt_tokens[slot]) + num_output_tokens
        held = max(int(self.states.num_known_tokens[slot]), resent)
        if expected > held:
            raise RuntimeError(f"request {req_id!r}: the scheduler counts {expected} tokens, the worker holds {held}")
        self.states.num_known_tokens[slot] = expected

    # ------------------------------------------------------------------ forward and sampling
    def _forward(self, batch: InputBatch, *, block_ids_to_zero: list[int]) -> torch.Tensor:  # [num_sampled, hidden_size]
        if block_ids_to_zero:
            for kv_cache in self._kv_caches:
                self._backend.zero_blocks(kv_cache, block_ids_to_zero)
        size = self._graphs.size_for(num_reqs=batch.num_reqs, max_query_len=batch.max_query_len)
        if size is not None and self.use_graphs:
            return self._graphs.run(size).index_select(0, batch.logits_indices)
        hidden_states: torch.Tensor = self._model(
            batch.input_ids,
            batch.positions,
            kv_caches=self._kv_caches,
            attention_metadata=self._backend.build_metadata(batch.attention_batch()),
        )
        return hidden_states.index_select(0, batch.logits_indices)

    def _forward_padded(self, size: int) -> torch.Tensor:  # [size, hidden_size]
        inputs = self._pipeline.padded_inputs(size)
        hidden_states: torch.Tensor = self._model(
            inputs.input_ids,
            inputs.positions,
            kv_caches=self._kv_caches,
            attention_metadata=self._backend.build_metadata(inputs.attention),
        )
        return hidden_states

    def _sample(
        self,
        batch: InputBatch,
        hidden_states: torch.Tensor,  # [num_sampled, hidden_size]
        grammar_output: GrammarOutput | None,
    ) -> SampledRows | Pending[SampledRows]:
        bitmasks = {} if grammar_output is None else grammar_output.bitmasks
        rows = enumerate(batch.req_ids[row] for row in batch.sampled_np.tolist()) if bitmasks else ()
        return self._pipeline.sample(
            self._model.compute_logits(hidden_states),
            batch,
            bitmasks={i: bitmasks[req_id] for i, req_id in rows if req_id in bitmasks},
        )


def _make_output(batch: InputBatch | None, times: tuple[float, float, float], rows: SampledRows) -> ModelRunnerOutput:
    """The result of a step, now that its tokens are known. times: execute_start, execute_end, sample_start."""
    req_ids = [] if batch is None else batch.req_ids
    sampled_token_ids: list[list[int]] = [[] for _ in req_ids]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    if batch is not None and rows.token_ids:
        sampled = batch.sampled_np.tolist()
        for row, token_id in zip(sampled, rows.token_ids, strict=True):
            sampled_token_ids[row] = [token_id]
        logprobs = {req_ids[sampled[i]]: [entry] for i, entry in rows.logprobs.items()}
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=sampled_token_ids,
        logprobs=logprobs,
        timing=WorkerTiming(*times, time.perf_counter()),
    )


def _only_group(block_ids: tuple[list[int], ...]) -> list[int]:
    """All layers share one block table."""
    assert len(block_ids) == 1, f"{len(block_ids)} KV-cache groups; the worker knows one"
    return block_ids[0]
