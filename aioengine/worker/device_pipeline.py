"""Steps built and sampled on a device that runs behind the host: no call here waits for it.

Copies of the token table and the block table live on the device. A step sends what the host has learned since (new prompts,
resumed histories, new blocks), the step's shape and its sampling parameters, all in one copy; kernels write the tables and
gather the inputs. Sampled tokens stay in `last_sampled_tokens`, where the next step's gather reads them: the host counts them,
and learns what they are later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.config import LogprobsMode
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.worker.block_table import BlockTable
from aioengine.worker.input_batch import InputBatch, StepPlan, plan_step
from aioengine.worker.pipeline import PaddedInputs, SampledRows, StepPipeline, sampled_rows
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.device_sampler import StagedSampling, sample_on_device, sampling_arrays, staged_sampling
from aioengine.worker.sample.logprobs import make_entries
from aioengine.worker.sample.sampler import NAN_LOGITS, NOTHING_ALLOWED
from aioengine.worker.staging import Staging
from aioengine.worker.transfers import Download, Transfers
from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs
from aioengine_kernels.write_rows import write_rows

IntArray = npt.NDArray[np.int32]
_NO_PIECES: IntArray = np.zeros((0, 4), dtype=np.int32)
_NO_VALUES: IntArray = np.zeros(0, dtype=np.int32)
_NUM_TABLE_ARRAYS = 4  # of those a step sends: pieces and values for the token table, and for the block table
_NUM_ROW_ARRAYS = 4  # then the fields of `StepRows`


@dataclass(slots=True)
class _TableWrites:
    """Pieces of rows of one table, collected from a step's plan."""

    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)  # row, first column, length, first value
    values: list[IntArray] = field(default_factory=list)
    num_values: int = 0
    max_length: int = 0

    def add(self, row: int, column: int, values: IntArray) -> None:
        length = len(values)
        self.pieces.append((row, column, length, self.num_values))
        self.values.append(values)
        self.num_values += length
        self.max_length = max(self.max_length, length)

    def arrays(self) -> list[npt.NDArray[Any]]:
        if not self.pieces:
            return [_NO_PIECES, _NO_VALUES]
        return [np.array(self.pieces, dtype=np.int32), np.concatenate(self.values)]


@dataclass(frozen=True, slots=True)
class _PendingRows:
    """A step's tokens on their way to the host."""

    download: Download
    logprob_rows: list[int]
    num_logprobs: list[int]
    failed: dict[int, str]  # by row: those that could not be sampled for, as the host knows

    def wait(self) -> SampledRows:
        token_ids, best, *rest = self.download.wait()
        failed = {row: NOTHING_ALLOWED if best[row] == -np.inf else NAN_LOGITS for row in (~np.isfinite(best)).nonzero()[0].tolist()}
        failed |= self.failed
        tokens = [[token] for token in token_ids.tolist()]
        if not rest:
            return SampledRows(tokens, failed=failed)
        ids, values, ranks = (array.tolist() for array in rest)
        entries = make_entries(ids, values, ranks, self.num_logprobs)
        return SampledRows(tokens, {row: [entry] for row, entry in zip(self.logprob_rows, entries, strict=True)}, failed)


class DevicePipeline(StepPipeline):
    """See the module. Memory: the two tables, and the inputs of the largest step."""

    def __init__(
        self,
        *,
        states: RequestStates,
        block_table: BlockTable,
        transfers: Transfers,
        max_num_tokens: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self._states = states
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._block_table = block_table
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._eos_token_ids = torch.from_numpy(states.sampling.eos_token_ids).to(transfers.torch_device)  # [e] int64
        self._staging = Staging(transfers)
        self._bitmask_staging = Staging(transfers)  # of its own: a step's arrays are read until after its bitmasks are sent

        num_slots, device = states.max_num_reqs, transfers.torch_device
        num_columns = block_table.max_num_blocks_per_req

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tables = RequestTables(
            token_table=zeros(num_slots, states.max_model_len),
            block_table=zeros(num_slots, num_columns),
            last_sampled_tokens=zeros(num_slots),
        )
        self._inputs = BatchInputs(
            input_ids=zeros(max_num_tokens, dtype=torch.int64),
            positions=zeros(max_num_tokens, dtype=torch.int64),
            slot_mapping=zeros(max_num_tokens, dtype=torch.int64) - 1,
            seq_lens=zeros(num_slots),
            logits_indices=zeros(num_slots, dtype=torch.int64),
            block_table=zeros(num_slots, num_columns),
        )
        # Tokens of each slot that the device's table holds; one more may be known, in `last_sampled_tokens`.
        self._num_table_tokens: IntArray = np.zeros(num_slots, dtype=np.int32)
        self._one_token_each = torch.arange(num_slots + 1, dtype=torch.int32, device=device)

    # ------------------------------------------------------------------ inputs
    def build_batch(self, out: SchedulerOutput) -> InputBatch:
        if out.scheduled_spec_decode_tokens:
            raise RuntimeError("guessed tokens can be checked on the CPU only: here the host does not wait for what was sampled")
        token_writes, block_writes = self._collect_writes(out)
        plan = plan_step(out, states=self._states, block_table=self._block_table)
        num_tokens, limit = int(plan.query_start_loc[-1]), self._inputs.input_ids.shape[0]
        assert num_tokens <= limit, f"a step of {num_tokens} tokens, but max_num_batched_tokens is {limit}"
        rows = self._row_arrays(plan)
        sampled = plan.sampled
        slots = plan.slots[sampled]
        output_indices = plan.row_seq_lens - self._states.num_prompt_tokens[slots]
        sampling = self._states.sampling.gather(slots, output_indices)
        logits_indices = plan.query_start_loc[sampled + 1].astype(np.int64) - 1

        staged = self._staging.stage(
            [
                *token_writes.arrays(),
                *block_writes.arrays(),
                *rows,
                logits_indices,
                *sampling_arrays(sampling, slots, vocab_size=self._vocab_size),
            ]
        )
        first_of_rest = _NUM_TABLE_ARRAYS + _NUM_ROW_ARRAYS
        self._write_tables(staged.tensors[:_NUM_TABLE_ARRAYS], token_writes, block_writes)
        step_rows = StepRows(*staged.tensors[_NUM_TABLE_ARRAYS:first_of_rest])
        max_query_len = int(plan.num_scheduled.max())
        batch_inputs(self._tables, step_rows, self._inputs, block_size=self._block_table.block_size, max_query_len=max_query_len)
        self._num_table_tokens[plan.slots] = np.maximum(self._num_table_tokens[plan.slots], plan.seq_lens)
        return self._make_batch(
            plan,
            query_start_loc=step_rows.query_start_loc,
            logits_indices=staged.tensors[first_of_rest],
            sampling=staged_sampling(staged, sampling, first=first_of_rest + 1, token_table=self._tables.token_table),
        )

    def _collect_writes(self, out: SchedulerOutput) -> tuple[_TableWrites, _TableWrites]:
        """What `out` added to the host's tables, which hold it already."""
        tokens, blocks = _TableWrites(), _TableWrites()
        states, table = self._states, self._block_table
        for new in out.scheduled_new_reqs:
            slot = self._slot(new.req_id)
            self._replace_row(slot, len(new.prompt_token_ids), tokens, blocks)
        cached = out.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            slot = self._slot(req_id)
            history = cached.all_token_ids.get(req_id)
            if req_id in cached.resumed_req_ids:
                assert history is not None, f"request {req_id!r} resumes without its tokens"
                self._replace_row(slot, len(history), tokens, blocks)
                continue
            if history is not None and len(history) > self._num_table_tokens[slot]:
                held = int(self._num_table_tokens[slot])
                tokens.add(slot, held, states.token_ids[slot, held : len(history)])
                self._num_table_tokens[slot] = len(history)
            if block_ids is not None:
                end = int(table.num_blocks[slot])
                start = end - len(block_ids[0])
                blocks.add(slot, start, table.array[slot, start:end])
        return tokens, blocks

    def _replace_row(self, slot: int, num_tokens: int, tokens: _TableWrites, blocks: _TableWrites) -> None:
        tokens.add(slot, 0, self._states.token_ids[slot, :num_tokens])
        blocks.add(slot, 0, self._block_table.array[slot, : int(self._block_table.num_blocks[slot])])
        self._num_table_tokens[slot] = num_tokens

    def _slot(self, req_id: str) -> int:
        slot = self._states.slot_of(req_id)
        assert slot is not None, f"request {req_id!r} is scheduled but the worker holds no slot for it"
        return slot

    def _row_arrays(self, plan: StepPlan) -> list[npt.NDArray[Any]]:
        """The fields of `StepRows`. Raises RuntimeError if the step reads more than one token that only the device knows."""
        num_table = np.minimum(self._num_table_tokens[plan.slots], self._states.num_known_tokens[plan.slots])
        self._num_table_tokens[plan.slots] = num_table
        beyond = (plan.seq_lens > num_table + 1).nonzero()[0]
        if len(beyond):
            i = int(beyond[0])
            raise RuntimeError(
                f"request {plan.req_ids[i]!r} is scheduled up to position {plan.seq_lens[i]}, but the device's table holds {num_table[i]} "
                "tokens, and only the last sampled one can be added to them"
            )
        return [plan.slots.astype(np.int32), plan.query_start_loc, plan.starts, num_table]

    def _write_tables(self, tensors: list[torch.Tensor], token_writes: _TableWrites, block_writes: _TableWrites) -> None:
        token_pieces, token_values, block_pieces, block_values = tensors
        if token_writes.pieces:
            write_rows(self._tables.token_table, token_pieces, token_values, max_length=token_writes.max_length)
        if block_writes.pieces:
            write_rows(self._tables.block_table, block_pieces, block_values, max_length=block_writes.max_length)

    def _make_batch(
        self, plan: StepPlan, *, query_start_loc: torch.Tensor, logits_indices: torch.Tensor, sampling: StagedSampling
    ) -> InputBatch:
        inputs, num_reqs, num_tokens = self._inputs, len(plan.req_ids), int(plan.query_start_loc[-1])
        return InputBatch(
            req_ids=plan.req_ids,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=int(plan.num_scheduled.max()),
            max_seq_len=int(plan.seq_lens.max()),
            idx_mapping_np=plan.slots,
            query_start_loc=query_start_loc,
            query_start_loc_np=plan.query_start_loc,
            seq_lens=inputs.seq_lens[:num_reqs],
            seq_lens_np=plan.seq_lens,
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slot_mapping[:num_tokens],
            block_table=inputs.block_table[:num_reqs],
            logits_indices=logits_indices,
            sampled_np=plan.sampled,
            row_seq_lens_np=plan.row_seq_lens,
            staged=sampling,
        )

    def padded_inputs(self, size: int) -> PaddedInputs:
        inputs = self._inputs
        attention = AttentionBatch(
            num_reqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self._states.max_model_len,
            query_start_loc=self._one_token_each[: size + 1],
            query_start_loc_np=np.arange(size + 1, dtype=np.int32),
            seq_lens=inputs.seq_lens[:size],
            seq_lens_np=np.zeros(size, dtype=np.int32),
            block_table=inputs.block_table[:size],
            slot_mapping=inputs.slot_mapping[:size],
        )
        return PaddedInputs(inputs.input_ids[:size], inputs.positions[:size], attention)

    # ------------------------------------------------------------------ sampling
    def sample(self, logits: torch.Tensor, batch: InputBatch, *, bitmasks: Mapping[int, bytes]) -> _PendingRows:
        staged = batch.staged
        assert staged is not None
        num_bytes = -(-self._vocab_size // 8)
        too_short = {row: len(bitmask) for row, bitmask in bitmasks.items() if len(bitmask) < num_bytes}
        whole = {row: bitmask for row, bitmask in bitmasks.items() if row not in too_short}
        allowed = self._send_bitmasks(whole) if whole else None
        samples = sample_on_device(
            logits,
            staged,
            last_sampled_tokens=self._tables.last_sampled_tokens,
            allowed=allowed,
            eos_token_ids=self._eos_token_ids,
            logprobs_mode=self._logprobs_mode,
        )
        req_ids, slots, _ = sampled_rows(batch, self._states)
        self._states.count_sampled(req_ids, slots)
        failed = {row: f"a bitmask of {size} bytes does not cover {self._vocab_size} tokens" for row, size in too_short.items()}
        return _PendingRows(self._transfers.download(samples.tensors()), staged.logprob_rows_np.tolist(), staged.num_logprobs, failed)

    def _send_bitmasks(self, bitmasks: Mapping[int, bytes]) -> tuple[torch.Tensor, torch.Tensor]:
        num_bytes = -(-self._vocab_size // 8)
        bits = np.zeros((len(bitmasks), num_bytes), dtype=np.uint8)
        for place, bitmask in enumerate(bitmasks.values()):
            bits[place] = np.frombuffer(bitmask, dtype=np.uint8, count=num_bytes)
        staged = self._bitmask_staging.stage([np.fromiter(bitmasks, dtype=np.int64, count=len(bitmasks)), bits])
        rows, bits_tensor = (tensor.clone() for tensor in staged.tensors)
        staged.release()
        return rows, bits_tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Download:
        return self._transfers.download(tensors)

    def end_step(self, batch: InputBatch) -> None:
        assert batch.staged is not None
        batch.staged.arrays.release()
