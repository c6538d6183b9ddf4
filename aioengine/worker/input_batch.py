"""The model's input of one step, built from the slot tables in a few vectorised operations and thrown away afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.worker.block_table import BlockTables
from aioengine.worker.device import Device
from aioengine.worker.request_state import RequestStates

if TYPE_CHECKING:
    from aioengine.worker.pipeline.staging import StagedArrays
    from aioengine.worker.sample.device_sampler import StagedSampling
    from aioengine_kernels.flash_decoding import DecodeSplit

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What a KV-cache group has of its own in a step; the fields as in `AttentionBatch`."""

    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset
    block_table: torch.Tensor  # [num_reqs, max_num_blocks of this step] int32
    sliding_window: int | None
    split: DecodeSplit | None = None


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One ragged step: request i of the batch owns the tokens query_start_loc[i] : query_start_loc[i + 1]."""

    req_ids: list[str]  # [num_reqs], in the order of `SchedulerOutput.num_scheduled_tokens`
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    idx_mapping_np: LongArray  # [num_reqs]: batch index -> slot
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    query_start_loc_np: IntArray  # [num_reqs + 1]
    seq_lens: torch.Tensor  # [num_reqs] int32: computed tokens and this step's
    seq_lens_np: IntArray  # [num_reqs]
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    groups: tuple[GroupInputs, ...]
    logits_indices: torch.Tensor  # [num_rows] int64: the rows of the hidden states that are sampled from
    sampled_np: LongArray  # [num_rows]: the batch index of each of them; a request with draft tokens has several in a row
    row_seq_lens_np: LongArray  # [num_rows]: how many tokens come before the one that a row samples
    staged: StagedSampling | None = None  # what the device's sampler reads; None where the sampler reads the host's tables
    arrays: StagedArrays | None = None  # what the tensors of a device's step are views of
    num_decodes: int = 0  # these two as in `AttentionBatch`
    max_chunk_seq_len: int = 0

    def attention_batch(self, group: GroupInputs) -> AttentionBatch:
        """The step of one of `groups`."""
        return AttentionBatch(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc=self.query_start_loc,
            query_start_loc_np=self.query_start_loc_np,
            seq_lens=self.seq_lens,
            seq_lens_np=self.seq_lens_np,
            block_table=group.block_table,
            slot_mapping=group.slot_mapping,
            sliding_window=group.sliding_window,
            num_decodes=self.num_decodes,
            split=group.split,
            max_chunk_seq_len=self.max_chunk_seq_len,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the host alone knows of a step's shape; parallel arrays in batch order."""

    req_ids: list[str]  # [num_reqs]
    slots: LongArray  # [num_reqs]
    num_scheduled: IntArray  # [num_reqs]
    starts: IntArray  # [num_reqs]: the position of the first token of this step
    seq_lens: IntArray  # [num_reqs]
    query_start_loc: IntArray  # [num_reqs + 1]
    sampled: LongArray  # [num_rows]: the batch index of each row that is sampled from
    row_seq_lens: LongArray  # [num_rows]: how many tokens come before the one that a row samples


def plan_step(out: SchedulerOutput, *, states: RequestStates, block_tables: BlockTables, decodes_first: bool = False) -> StepPlan:
    """Lay out a step, from `states.num_computed_tokens` on for each request.

    A request samples if the step reaches the last token that is known, unless it wants an embedding; with draft tokens behind it,
    once after that token and once after each of them. The draft tokens stand in the token table and count as known for this step
    only.
    decodes_first: requests with one token come before the others; else the order is the scheduler's, but for adapters.
    Raises RuntimeError if the step wants a token that is not known yet or a position that has no block.
    """
    scheduled = out.num_scheduled_tokens
    req_ids = sorted(scheduled, key=lambda req_id: scheduled[req_id] != 1) if decodes_first else list(scheduled)
    if states.lora_names:  # what has the same adapter is neighbours, and goes through it in one product
        req_ids.sort(key=lambda req_id: (decodes_first and scheduled[req_id] != 1, states.lora_names.get(req_id, "")))
    slots = np.fromiter((_slot(states, r) for r in req_ids), dtype=np.int64, count=len(req_ids))
    num_scheduled = np.fromiter((scheduled[r] for r in req_ids), dtype=np.int32, count=len(req_ids))
    starts = states.num_computed_tokens[slots]
    seq_lens = starts + num_scheduled
    known = states.num_known_tokens[slots]
    draft_token_ids = out.scheduled_spec_decode_tokens
    if draft_token_ids:
        num_draft_tokens = np.fromiter((len(draft_token_ids.get(r, ())) for r in req_ids), dtype=np.int32, count=len(req_ids))
        known = known + num_draft_tokens
    _check_in_reach(req_ids, seq_lens, known=known, held=block_tables.num_positions(slots))
    query_start_loc = np.zeros(len(req_ids) + 1, dtype=np.int32)
    np.cumsum(num_scheduled, out=query_start_loc[1:])
    samples = seq_lens == known
    if states.pooled_req_ids:
        samples &= np.fromiter((r not in states.pooled_req_ids for r in req_ids), dtype=bool, count=len(req_ids))
    sampled = samples.nonzero()[0]
    row_seq_lens = seq_lens[sampled].astype(np.int64)
    if draft_token_ids:
        num_rows = 1 + num_draft_tokens[sampled]
        sampled, row_seq_lens = np.repeat(sampled, num_rows), np.repeat(row_seq_lens, num_rows)
        num_to_come = np.repeat(num_rows.cumsum(), num_rows) - np.arange(len(sampled)) - 1  # rows of the same request
        row_seq_lens -= num_to_come
    return StepPlan(req_ids, slots, num_scheduled, starts, seq_lens, query_start_loc, sampled=sampled, row_seq_lens=row_seq_lens)


def build_input_batch(out: SchedulerOutput, *, states: RequestStates, block_tables: BlockTables, device: Device) -> InputBatch:
    """Turn a step's plan into tensors, on the host.

    With [2, 5, 3] scheduled tokens: req_indices [0, 0, 1, 1, 1, 1, 1, 2, 2, 2] and query_pos [0, 1, 0, 1, 2, 3, 4, 0, 1, 2];
    everything else is gathered with these two. Raises what `plan_step` raises.
    """
    plan = plan_step(out, states=states, block_tables=block_tables)
    slots, query_start_loc = plan.slots, plan.query_start_loc
    num_tokens = int(query_start_loc[-1])
    req_indices = np.repeat(np.arange(len(slots)), plan.num_scheduled)
    query_pos = np.arange(num_tokens) - query_start_loc[req_indices]
    positions = (plan.starts[req_indices] + query_pos).astype(np.int64)
    token_slots = slots[req_indices]

    # On the flattened table: torch.index_select beats numpy.take on large tables.
    token_indices = device.to_device(token_slots * states.max_model_len + positions)
    input_ids = states.token_ids_tensor.view(-1).index_select(0, token_indices).long()

    block_size = block_tables.block_size
    block_indices, offsets = positions // block_size, positions % block_size
    max_seq_len = int(plan.seq_lens.max())
    max_num_blocks = -(-max_seq_len // block_size)
    groups = tuple(
        GroupInputs(
            slot_mapping=device.to_device(table.array[token_slots, block_indices].astype(np.int64) * block_size + offsets),
            block_table=device.to_device(table.array[slots, :max_num_blocks]),
            sliding_window=window,
        )
        for table, window in zip(block_tables.tables, block_tables.windows, strict=True)
    )
    return InputBatch(
        req_ids=plan.req_ids,
        num_reqs=len(slots),
        num_tokens=num_tokens,
        max_query_len=int(plan.num_scheduled.max()),
        max_seq_len=max_seq_len,
        idx_mapping_np=slots,
        query_start_loc=device.to_device(query_start_loc),
        query_start_loc_np=query_start_loc,
        seq_lens=device.to_device(plan.seq_lens),
        seq_lens_np=plan.seq_lens,
        input_ids=input_ids,
        positions=device.to_device(positions),
        groups=groups,
        logits_indices=device.to_device(query_start_loc[plan.sampled] - plan.starts[plan.sampled] + plan.row_seq_lens - 1),
        sampled_np=plan.sampled,
        row_seq_lens_np=plan.row_seq_lens,
    )


def _slot(states: RequestStates, req_id: str) -> int:
    slot = states.slot_of(req_id)
    if slot is None:
        raise RuntimeError(f"request {req_id!r} is scheduled but the worker holds no slot for it")
    return slot


def _check_in_reach(req_ids: list[str], seq_lens: IntArray, *, known: IntArray, held: IntArray) -> None:
    wrong = ((seq_lens > known) | (seq_lens > held)).nonzero()[0]
    if len(wrong):
        i = int(wrong[0])
        raise RuntimeError(
            f"request {req_ids[i]!r} is scheduled up to position {seq_lens[i]}, "
            f"but {known[i]} tokens are known and its blocks hold {held[i]}"
        )
