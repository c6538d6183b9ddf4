"""Applies a `SchedulerOutput` to the worker's state, runs the model, samples."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from aioengine.attention.base import AttentionBackend
from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.kv_cache_groups import place_of_layers
from aioengine.outputs import ModelRunnerOutput, WorkerTiming
from aioengine.printable import get_logger
from aioengine.resolved_config import ResolvedConfig
from aioengine.worker.adapters import adapter_runs
from aioengine.worker.block_table import BlockTables
from aioengine.worker.cuda_graphs import DecodeGraphs, graph_batch_sizes
from aioengine.worker.device import Device
from aioengine.worker.input_batch import InputBatch
from aioengine.worker.pipeline.async_output import AsyncOutput, Pending
from aioengine.worker.pipeline.base import SampledRows
from aioengine.worker.pipeline.create import create_pipeline
from aioengine.worker.pooling import PooledRows, Pooler, read_pooled
from aioengine.worker.prompt_logprobs import PromptEntries, PromptRows, plan_prompt_rows, read_prompt_entries, score_prompt_rows
from aioengine.worker.request_state import RequestStates
from aioengine.worker.warm_up import warm_up_steps

if TYPE_CHECKING:
    from aioengine.executor.base import GrammarOutput
    from aioengine.models.base import CausalLM

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """A step whose forward has run and whose tokens have not been sampled."""

    batch: InputBatch | None  # None: a clean-up-only step
    hidden_states: torch.Tensor | None  # [num_rows, hidden_size]: only the rows at `logits_indices`
    prompt_rows: PromptRows | None  # None: nobody wants log-probabilities of this step's prompt tokens
    prompt_hidden_states: torch.Tensor | None  # [r, hidden_size]: the rows at `prompt_rows.indices`
    execute_start: float
    execute_end: float
    failed: dict[str, str]  # requests of the step that could not be written into the tables, and why
    pooled: PooledRows | None = None


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
        kv_caches: list[torch.Tensor],  # in the backend's layout, as many as `num_layer_caches` of the config's groups
        device: Device,
    ) -> None:
        self._scheduler_config = config.scheduler
        self._logprobs_mode = config.worker.logprobs_mode
        self._zero_new_blocks = config.cache.zero_new_blocks
        self._model = model
        self._backend = attention_backend
        self._kv_caches = kv_caches
        groups = config.cache.kv_cache_groups
        self._layer_caches = [kv_caches[place] for place in place_of_layers(groups)]  # one a layer: several may be the same
        self._device = device
        self._pooler = Pooler()
        self.states = RequestStates(
            max_num_reqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            vocab_size=config.model.vocab_size,
            eos_token_ids=config.model.eos_token_ids,
        )
        self.block_tables = BlockTables(
            groups,
            max_num_reqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
        )
        self._pipeline = create_pipeline(device, config, states=self.states, block_tables=self.block_tables)
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

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Take two requests through a step of prompts and a decode step, so that kernels are compiled before anybody waits.

        Also where graphs will be captured: steps with prompts run eagerly. Before the first step: it writes to block 1, which
        nobody owns yet.
        """
        if self._device.compiles_kernels:
            for batch in self._pipeline.padded_inputs(1).attention:
                self._backend.compile_kernels(self._kv_caches[0], batch)
        steps = warm_up_steps(
            self._scheduler_config,
            block_size=self.block_tables.block_size,
            num_groups=len(self.block_tables.tables),
            zero_blocks=self._zero_new_blocks,
        )
        for out in steps:
            self.execute_model(out)
            output = self.sample_tokens()
            if isinstance(output, AsyncOutput):
                output.wait()

    @property
    def kv_blocks(self) -> list[torch.Tensor]:
        """The cache of each layer, [num_blocks, ...]."""
        return [self._backend.by_block(kv_cache) for kv_cache in self._kv_caches]

    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> None:
        """Update the state and run the forward; the hidden rows to sample from are kept for `sample_tokens`."""
        start = time.perf_counter()
        self._update_states(out)
        batch, hidden, prompt_rows, prompt_hidden, pooled = None, None, None, None, None
        if not out.is_cleanup_only:
            batch = self._pipeline.build_batch(out)
            prompt_rows = plan_prompt_rows(batch, self.states, upload=self._pipeline.upload)
            all_hidden = self._forward(batch, block_ids_to_zero=out.new_block_ids_to_zero)
            hidden = all_hidden.index_select(0, batch.logits_indices)
            prompt_hidden = None if prompt_rows is None else all_hidden.index_select(0, prompt_rows.indices)
            pooled = self._pooler.pool(batch, self.states, all_hidden)
        # As of now: by the time of sampling the tables may have moved on to a later step.
        failed = {req_id: cause for req_id, cause in self.states.failed.items() if req_id in out.num_scheduled_tokens}
        self._executed.append(ExecuteModelState(batch, hidden, prompt_rows, prompt_hidden, start, time.perf_counter(), failed, pooled))

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[_StepResults]:
        """Sample for the oldest executed step and keep the tokens for the next ones.

        Returns the tokens, or where the device is still computing them, what waits for them.
        Raises RuntimeError if no executed step is waiting.
        """
        start = time.perf_counter()
        if not self._executed:
            raise RuntimeError("sample_tokens was called, but no executed step is waiting to be sampled")
        state = self._executed.popleft()
        rows: SampledRows | Pending[SampledRows] = SampledRows([])
        scores: _Arrays | Pending[_Arrays] = []
        vectors: _Arrays | Pending[_Arrays] = []
        if state.batch is not None:
            if state.prompt_rows is not None:
                scores = self._score_prompt(state.prompt_rows, state.prompt_hidden_states)
            if state.pooled is not None:
                vectors = self._pipeline.fetch([state.pooled.vectors])
            if len(state.batch.sampled_np):
                assert state.hidden_states is not None
                rows = self._sample(state.batch, state.hidden_states, grammar_output)
            self._pipeline.end_step(state.batch)
        make_output = partial(_make_output, state, start)
        if isinstance(rows, SampledRows) and isinstance(scores, list) and isinstance(vectors, list):
            return make_output((rows, scores, vectors))
        return AsyncOutput(_PendingResults(rows, scores, vectors), make_output)

    def _score_prompt(self, rows: PromptRows, hidden_states: torch.Tensor | None) -> _Arrays | Pending[_Arrays]:
        assert hidden_states is not None
        compute_logits, mode = self._model.compute_logits, self._logprobs_mode
        return self._pipeline.fetch(score_prompt_rows(hidden_states, rows, compute_logits=compute_logits, logprobs_mode=mode))

    # ------------------------------------------------------------------ state
    def _update_states(self, out: SchedulerOutput) -> None:
        # Who is gone comes first: the slots they free may be needed by those who come. In an order of their own: that of a
        # set differs from process to process, and with it would the slots.
        for req_id in sorted(out.finished_req_ids):
            self.states.remove(req_id)
        for req_id in sorted(out.preempted_req_ids):
            self.states.preempt(req_id)
        for new in out.scheduled_new_reqs:
            self._add_request(new)
        self._update_cached_requests(out.scheduled_cached_reqs)
        for req_id, draft_token_ids in out.scheduled_spec_decode_tokens.items():
            self.states.write_draft_tokens(req_id, draft_token_ids)

    def _add_request(self, new: NewRequestData) -> None:
        slot = self.states.add(
            new.req_id, new.prompt_token_ids, new.sampling_params, pooling_params=new.pooling_params, lora_name=new.lora_name
        )
        self.states.num_computed_tokens[slot] = new.num_computed_tokens
        self.block_tables.replace_rows(slot, new.block_ids)

    def _update_cached_requests(self, cached: CachedRequestData) -> None:
        states = self.states
        for i, req_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert block_ids is not None, f"request {req_id!r} resumes without blocks"
                slot = states.resume(req_id, cached.all_token_ids[req_id])
                self.block_tables.replace_rows(slot, block_ids)
            else:
                known_slot = states.slot_of(req_id)
                assert known_slot is not None, f"request {req_id!r} is unknown to the worker"
                slot = known_slot
                if req_id in cached.all_token_ids:
                    states.write_history(slot, cached.all_token_ids[req_id])
                if block_ids is not None:
                    self.block_tables.append_rows(slot, block_ids)
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
    def _forward(self, batch: InputBatch, *, block_ids_to_zero: list[int]) -> torch.Tensor:  # [>= num_tokens, hidden_size]
        if block_ids_to_zero:
            for kv_cache in self._kv_caches:
                self._backend.zero_blocks(kv_cache, block_ids_to_zero)
        adapters = adapter_runs(batch, self.states) if self.states.lora_names else ()
        size = self._graphs.size_for(num_reqs=batch.num_reqs, max_query_len=batch.max_query_len)
        if size is not None and self.use_graphs and not adapters:  # the graphs were captured without any
            return self._graphs.run(size)
        hidden_states: torch.Tensor = self._model(
            batch.input_ids,
            batch.positions,
            kv_caches=self._layer_caches,
            attention_metadata=tuple([self._backend.build_metadata(batch.attention_batch(group)) for group in batch.groups]),
            **({"adapters": adapters} if adapters else {}),
        )
        return hidden_states

    def _forward_padded(self, size: int) -> torch.Tensor:  # [size, hidden_size]
        inputs = self._pipeline.padded_inputs(size)
        hidden_states: torch.Tensor = self._model(
            inputs.input_ids,
            inputs.positions,
            kv_caches=self._layer_caches,
            attention_metadata=tuple([self._backend.build_metadata(batch) for batch in inputs.attention]),
        )
        return hidden_states

    def _sample(
        self,
        batch: InputBatch,
        hidden_states: torch.Tensor,  # [num_rows, hidden_size]
        grammar_output: GrammarOutput | None,
    ) -> SampledRows | Pending[SampledRows]:
        bitmasks = {} if grammar_output is None else grammar_output.bitmasks
        rows = enumerate(batch.req_ids[row] for row in batch.sampled_np.tolist()) if bitmasks else ()
        masks = {i: bitmasks[req_id] for i, req_id in rows if req_id in bitmasks}
        if self._pipeline.takes_argmax(batch, bitmasks=masks) and (token_ids := self._model.greedy_tokens(hidden_states)) is not None:
            return self._pipeline.keep_argmax(token_ids, batch)
        try:
            return self._pipeline.sample(self._model.compute_logits(hidden_states), batch, bitmasks=masks)
        except Exception as exc:  # of one request, as a rule: the others must not pay for it
            return self._pipeline.sample_after_failure(exc, self._model.compute_logits(hidden_states), batch, bitmasks=masks)


_Arrays = list[npt.NDArray[Any]]
# The tokens; what `read_prompt_entries` reads, or nothing; and what `read_pooled` reads, or nothing.
_StepResults = tuple[SampledRows, _Arrays, _Arrays]


@dataclass(frozen=True, slots=True)
class _PendingResults:
    """A step's results, some of which are on their way from the device."""

    rows: SampledRows | Pending[SampledRows]
    scores: _Arrays | Pending[_Arrays]
    vectors: _Arrays | Pending[_Arrays]

    def wait(self) -> _StepResults:
        rows = self.rows if isinstance(self.rows, SampledRows) else self.rows.wait()
        scores = self.scores if isinstance(self.scores, list) else self.scores.wait()
        return rows, scores, self.vectors if isinstance(self.vectors, list) else self.vectors.wait()


def _make_output(state: ExecuteModelState, sample_start: float, results: _StepResults) -> ModelRunnerOutput:
    """The result of a step, now that its tokens are known."""
    rows, scores, vectors = results
    req_ids = [] if state.batch is None else state.batch.req_ids
    sampled_token_ids: list[list[int]] = [[] for _ in req_ids]
    prompt = PromptEntries() if state.prompt_rows is None else read_prompt_entries(state.prompt_rows, scores)
    pooled, not_finite = ({}, {}) if state.pooled is None else read_pooled(state.pooled, vectors)
    failed, logprobs = not_finite | state.failed | prompt.failed, {}
    if state.batch is not None and rows.token_ids:
        sampled = list(dict.fromkeys(state.batch.sampled_np.tolist()))
        for place, (index, token_ids) in enumerate(zip(sampled, rows.token_ids, strict=True)):
            if place in rows.failed:
                failed.setdefault(req_ids[index], rows.failed[place])
            if req_ids[index] not in failed:
                sampled_token_ids[index] = token_ids
        logprobs = {req_ids[sampled[i]]: entries for i, entries in rows.logprobs.items() if req_ids[sampled[i]] not in failed}
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=sampled_token_ids,
        logprobs=logprobs,
        timing=WorkerTiming(state.execute_start, state.execute_end, sample_start, time.perf_counter()),
        prompt_logprobs={req_id: entries for req_id, entries in prompt.logprobs.items() if req_id not in failed},
        failed_req_ids=failed,
        pooler_output={req_id: vector for req_id, vector in pooled.items() if req_id not in failed},
    )
