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
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.resolved_config import CacheConfig, LogprobsMode, SchedulerConfig
from aioengine.worker.block_table import BlockTables
from aioengine.worker.input_batch import GroupInputs, InputBatch, StepPlan, plan_step
from aioengine.worker.pipeline.base import PaddedInputs, SampledRows, StepPipeline, sampled_rows
from aioengine.worker.pipeline.staging import ALIGNMENT, StagedArrays, Staging, staging_capacity
from aioengine.worker.pipeline.transfers import Download, Transfers
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.device_sampler import StagedSampling, sample_on_device, sampling_arrays, staged_sampling
from aioengine.worker.sample.logprobs import make_entries
from aioengine.worker.sample.sampler import NAN_LOGITS, NOTHING_ALLOWED
from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs
from aioengine_kernels.flash_decoding import MIN_SEGMENT_TOKENS, DecodeSplit, choose_segment_len, max_num_segments
from aioengine_kernels.write_rows import write_rows

IntArray = npt.NDArray[np.int32]
_NO_PIECES: IntArray = np.zeros((0, 4), dtype=np.int32)
_NO_VALUES: IntArray = np.zeros(0, dtype=np.int32)


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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        if not self.pieces:
            return {"pieces": _NO_PIECES, "values": _NO_VALUES}
        return {"pieces": np.array(self.pieces, dtype=np.int32), "values": np.concatenate(self.values)}


@dataclass(frozen=True, slots=True)
class DecodeCut:
    """How a step's decodes share out their cached positions (see `aioengine_kernels.flash_decoding`)."""

    num_decodes: int
    kv_start_loc: IntArray  # [num_reqs + 1]: sums of what the decodes see; requests behind them add nothing
    segment_len: int
    is_split: bool  # some decode has more than one segment

    @property
    def num_segments(self) -> int:
        return self.num_decodes + int(self.kv_start_loc[-1]) // self.segment_len


def cut_decodes(plan: StepPlan, *, num_kv_heads: int, max_visible: int) -> DecodeCut:
    """For a plan whose decodes come first; max_visible: the positions that a query sees at most."""
    num_decodes = int((plan.num_scheduled == 1).sum())
    visible = np.minimum(plan.seq_lens, max_visible)
    visible[num_decodes:] = 0
    longest, total = int(visible.max(initial=0)), int(visible.sum())
    segment_len = choose_segment_len(num_positions=total, longest=longest, num_kv_heads=num_kv_heads)
    kv_start_loc = np.zeros(len(visible) + 1, dtype=np.int32)
    np.cumsum(visible, out=kv_start_loc[1:])
    return DecodeCut(num_decodes, kv_start_loc, segment_len, longest > segment_len)


def cut_arrays(cuts: Sequence[DecodeCut]) -> dict[str, npt.NDArray[Any]]:
    """Fields of `StepRows`, of the cuts of all KV-cache groups."""
    segment_lens = np.array([cut.segment_len for cut in cuts], dtype=np.int32)
    return {"kv_start_loc": np.stack([cut.kv_start_loc for cut in cuts]), "segment_len": segment_lens}


def pipeline_bytes(scheduler: SchedulerConfig, cache: CacheConfig, *, vocab_size: int) -> int:
    """Device memory of a `DevicePipeline`: its tables, its inputs, and both buffers of each staging."""
    num_slots, num_tokens, num_groups = scheduler.max_num_seqs, scheduler.max_num_batched_tokens, len(cache.kv_cache_groups)
    num_columns = -(-scheduler.max_model_len // cache.block_size)
    staged = (
        step_bytes(
            num_slots,
            max_model_len=scheduler.max_model_len,
            max_num_tokens=num_tokens,
            num_columns=num_columns,
            num_groups=num_groups,
        ),
        bitmask_bytes(num_slots, vocab_size=vocab_size),
        prompt_bytes(num_tokens),
    )
    tables = num_slots * 4 * (scheduler.max_model_len + 2 * num_columns * num_groups)
    inputs = (16 + 8 * num_groups) * num_tokens + (28 + 4 * num_groups) * (num_slots + 1) + 48 * num_groups
    return tables + inputs + sum(2 * staging_capacity(num_bytes) for num_bytes in staged)


def bitmask_bytes(num_slots: int, *, vocab_size: int) -> int:
    """Masks of all requests' grammars, their rows, and the alignment of the two."""
    return num_slots * (-(-vocab_size // 8) + 8) + 32


def prompt_bytes(max_num_tokens: int) -> int:
    """Where the rows of prompt log-probabilities are, and their tokens."""
    return 16 * max_num_tokens + 32


_BYTES_PER_ROW = 256  # of a request in a step: the row's own arrays, its sampling parameters, and their alignment
_BYTES_PER_GROUP_ROW = 32  # of a request in a step and a KV-cache group: a piece of its block table, and where its positions start


def step_bytes(num_slots: int, *, max_model_len: int, max_num_tokens: int, num_columns: int, num_groups: int = 1) -> int:
    """What a step sends at most, but for many long prompts or long lists of biased tokens that start together."""
    tokens = max_model_len + max_num_tokens  # a whole prompt whose first chunk this is, and others that fit into the step
    return 4 * (tokens + 2 * num_columns * num_groups) + num_slots * (_BYTES_PER_ROW + (num_groups - 1) * _BYTES_PER_GROUP_ROW)


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
        block_tables: BlockTables,
        transfers: Transfers,
        max_num_tokens: int,
        vocab_size: int,
        num_kv_heads: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self._states = states
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._block_tables = block_tables
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._eos_token_ids = torch.from_numpy(states.sampling.eos_token_ids).to(transfers.torch_device)  # [e] int64
        self._num_kv_heads = num_kv_heads
        # Of each KV-cache group: the positions that a query sees at most.
        self._max_visible = [min(states.max_model_len, window or states.max_model_len) for window in block_tables.windows]
        num_slots, device = states.max_num_reqs, transfers.torch_device
        num_columns, num_groups = block_tables.max_num_blocks_per_req, len(block_tables.tables)
        capacity = step_bytes(
            num_slots, max_model_len=states.max_model_len, max_num_tokens=max_num_tokens, num_columns=num_columns, num_groups=num_groups
        )
        self._staging = Staging(transfers, capacity=capacity)
        # Of their own: a step's arrays are read until after its bitmasks are sent, and until its prompt rows are.
        self._bitmask_staging = Staging(transfers, capacity=bitmask_bytes(num_slots, vocab_size=vocab_size))
        self._upload_staging = Staging(transfers, capacity=prompt_bytes(max_num_tokens))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def group_rows(length: int, *, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            """[num_groups, length]; each row begins at a multiple of `ALIGNMENT` bytes."""
            per_line = ALIGNMENT // dtype.itemsize
            return zeros(num_groups, -(-length // per_line) * per_line, dtype=dtype)[:, :length]

        self._tables = RequestTables(
            token_table=zeros(num_slots, states.max_model_len),
            block_table=zeros(num_groups, num_slots, num_columns),
            last_sampled_tokens=zeros(num_slots),
        )
        self._inputs = BatchInputs(
            input_ids=zeros(max_num_tokens, dtype=torch.int64),
            positions=zeros(max_num_tokens, dtype=torch.int64),
            slot_mapping=group_rows(max_num_tokens, dtype=torch.int64).fill_(-1),
            seq_lens=zeros(num_slots),
            logits_indices=zeros(num_slots, dtype=torch.int64),
            block_table=zeros(num_groups, num_slots, num_columns),
            kv_start_loc=group_rows(num_slots + 1),
            segment_len=group_rows(1).fill_(MIN_SEGMENT_TOKENS),
        )
        # Views of each group's part, made once.
        self._block_rows = self._tables.block_table.flatten(0, 1)
        self._kv_start_locs, self._segment_lens = self._inputs.kv_start_loc.unbind(0), self._inputs.segment_len.unbind(0)
        self._slot_mappings, self._batch_block_tables = self._inputs.slot_mapping.unbind(0), self._inputs.block_table.unbind(0)
        # Tokens of each slot that the device's table holds; one more may be known, in `last_sampled_tokens`.
        self._num_table_tokens: IntArray = np.zeros(num_slots, dtype=np.int32)
        self._one_token_each = torch.arange(num_slots + 1, dtype=torch.int32, device=device)

    # ------------------------------------------------------------------ inputs
    def build_batch(self, out: SchedulerOutput) -> InputBatch:
        if out.scheduled_spec_decode_tokens:
            raise RuntimeError("draft tokens can be checked on the CPU only: here the host does not wait for what was sampled")
        token_writes, block_writes = self._collect_writes(out)
        plan = plan_step(out, states=self._states, block_tables=self._block_tables, decodes_first=True)
        num_tokens, limit = int(plan.query_start_loc[-1]), self._inputs.input_ids.shape[0]
        assert num_tokens <= limit, f"a step of {num_tokens} tokens, but max_num_batched_tokens is {limit}"
        cuts = [cut_decodes(plan, num_kv_heads=self._num_kv_heads, max_visible=visible) for visible in self._max_visible]
        sampled = plan.sampled
        slots = plan.slots[sampled]
        output_indices = plan.row_seq_lens - self._states.num_prompt_tokens[slots]
        sampling = self._states.sampling.gather(slots, output_indices)
        logits_indices = plan.query_start_loc[sampled + 1].astype(np.int64) - 1

        staged = self._staging.stage(
            {
                "tokens": token_writes.arrays(),
                "blocks": block_writes.arrays(),
                "rows": {**self._row_arrays(plan), **cut_arrays(cuts)},
                "logits": {"indices": logits_indices},
                **sampling_arrays(sampling, slots, vocab_size=self._vocab_size),
            }
        )
        sent = staged.groups
        for table, writes, name in ((self._tables.token_table, token_writes, "tokens"), (self._block_rows, block_writes, "blocks")):
            if writes.pieces:
                write_rows(table, **sent[name], max_length=writes.max_length)
        step_rows = StepRows(**sent["rows"])
        max_query_len = int(plan.num_scheduled.max())
        batch_inputs(self._tables, step_rows, self._inputs, block_size=self._block_tables.block_size, max_query_len=max_query_len)
        self._num_table_tokens[plan.slots] = np.maximum(self._num_table_tokens[plan.slots], plan.seq_lens)
        return self._make_batch(
            plan,
            cuts,
            query_start_loc=step_rows.query_start_loc,
            logits_indices=sent["logits"]["indices"],
            sampling=staged_sampling(sent, sampling, token_table=self._tables.token_table),
            arrays=staged,
        )

    def _collect_writes(self, out: SchedulerOutput) -> tuple[_TableWrites, _TableWrites]:
        """What `out` added to the host's tables, which hold it already."""
        tokens, blocks = _TableWrites(), _TableWrites()
        states = self._states
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
                self._add_blocks(blocks, slot, [len(ids) for ids in block_ids])
        return tokens, blocks

    def _replace_row(self, slot: int, num_tokens: int, tokens: _TableWrites, blocks: _TableWrites) -> None:
        tokens.add(slot, 0, self._states.token_ids[slot, :num_tokens])
        self._add_blocks(blocks, slot, [int(table.num_blocks[slot]) for table in self._block_tables.tables])
        self._num_table_tokens[slot] = num_tokens

    def _add_blocks(self, blocks: _TableWrites, slot: int, counts: Sequence[int]) -> None:
        """The last `counts` entries of the slot's rows, one count a group. On the device the rows of group g follow those of g - 1."""
        for group, (table, count) in enumerate(zip(self._block_tables.tables, counts, strict=True)):
            end = int(table.num_blocks[slot])
            if count:
                blocks.add(group * self._states.max_num_reqs + slot, end - count, table.array[slot, end - count : end])

    def _slot(self, req_id: str) -> int:
        slot = self._states.slot_of(req_id)
        assert slot is not None, f"request {req_id!r} is scheduled but the worker holds no slot for it"
        return slot

    def _row_arrays(self, plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
        """Fields of `StepRows`. Raises RuntimeError if the step reads more than one token that only the device knows."""
        num_table = np.minimum(self._num_table_tokens[plan.slots], self._states.num_known_tokens[plan.slots])
        self._num_table_tokens[plan.slots] = num_table
        beyond = (plan.seq_lens > num_table + 1).nonzero()[0]
        if len(beyond):
            i = int(beyond[0])
            raise RuntimeError(
                f"request {plan.req_ids[i]!r} is scheduled up to position {plan.seq_lens[i]}, but the device's table holds {num_table[i]} "
                "tokens, and only the last sampled one can be added to them"
            )
        return {
            "idx_mapping": plan.slots.astype(np.int32),
            "query_start_loc": plan.query_start_loc,
            "num_computed_tokens": plan.starts,
            "num_table_tokens": num_table,
        }

    def _make_batch(
        self,
        plan: StepPlan,
        cuts: Sequence[DecodeCut],
        *,
        query_start_loc: torch.Tensor,
        logits_indices: torch.Tensor,
        sampling: StagedSampling,
        arrays: StagedArrays,
    ) -> InputBatch:
        inputs, num_reqs, num_tokens = self._inputs, len(plan.req_ids), int(plan.query_start_loc[-1])
        num_decodes = cuts[0].num_decodes
        groups = tuple(
            GroupInputs(
                slot_mapping=self._slot_mappings[group][:num_tokens],
                block_table=self._batch_block_tables[group][:num_reqs],
                sliding_window=window,
                split=DecodeSplit(self._kv_start_locs[group], self._segment_lens[group], cut.num_segments, cut.is_split),
            )
            for group, (cut, window) in enumerate(zip(cuts, self._block_tables.windows, strict=True))
        )
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
            groups=groups,
            logits_indices=logits_indices,
            sampled_np=plan.sampled,
            row_seq_lens_np=plan.row_seq_lens,
            staged=sampling,
            arrays=arrays,
            num_decodes=num_decodes,
            max_chunk_seq_len=int(plan.seq_lens[num_decodes:].max(initial=0)),
        )

    def padded_inputs(self, size: int) -> PaddedInputs:
        inputs = self._inputs
        attention = tuple(self._padded_batch(size, group, window) for group, window in enumerate(self._block_tables.windows))
        return PaddedInputs(inputs.input_ids[:size], inputs.positions[:size], attention)

    def _padded_batch(self, size: int, group: int, window: int | None) -> AttentionBatch:
        return AttentionBatch(
            num_reqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self._states.max_model_len,
            query_start_loc=self._one_token_each[: size + 1],
            query_start_loc_np=np.arange(size + 1, dtype=np.int32),
            seq_lens=self._inputs.seq_lens[:size],
            seq_lens_np=np.zeros(size, dtype=np.int32),
            block_table=self._batch_block_tables[group][:size],
            slot_mapping=self._slot_mappings[group][:size],
            sliding_window=window,
            num_decodes=size,
            split=DecodeSplit(
                self._kv_start_locs[group],
                self._segment_lens[group],
                num_segments=max_num_segments(num_reqs=size, num_kv_heads=self._num_kv_heads),
                is_split=self._max_visible[group] > MIN_SEGMENT_TOKENS,
            ),
        )

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
        rows = np.fromiter(bitmasks, dtype=np.int64, count=len(bitmasks))
        sent = self._send(self._bitmask_staging, {"rows": rows, "bits": bits})
        return sent["rows"], sent["bits"]

    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        return self._send(self._upload_staging, arrays)

    def _send(self, staging: Staging, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays as tensors in memory of their own, without waiting for the device."""
        staged = staging.stage({"arrays": arrays})
        tensors = {name: tensor.clone() for name, tensor in staged.groups["arrays"].items()}
        staged.release()
        return tensors

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Download:
        return self._transfers.download(tensors)

    def end_step(self, batch: InputBatch) -> None:
        assert batch.arrays is not None
        batch.arrays.release()
