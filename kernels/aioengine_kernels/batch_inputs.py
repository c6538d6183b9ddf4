"""Turn the persistent request tables into one step's model inputs, in one launch.

The host knows how many tokens each request gets, not which token a request sampled in the step before: that one may still be
in flight. So the token is read here, on the device, and the host never waits for it.

Layers with different attention windows have block tables of their own, one a KV-cache group; groups are the first dimension here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioengine_kernels._triton import cdiv, jit, tl, use_triton

_BLOCK = 512


@dataclass(frozen=True, slots=True)
class RequestTables:
    """State that outlives a step; row r belongs to the request in slot r."""

    token_table: torch.Tensor  # [max_num_reqs, max_model_len] int32
    block_table: torch.Tensor  # [num_groups, max_num_reqs, max_num_blocks_per_req] int32
    last_sampled_tokens: torch.Tensor  # [max_num_reqs] int32, written by the sampler of the step before


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the host sends for a step; entry i belongs to the i-th request of the batch."""

    idx_mapping: torch.Tensor  # [num_reqs] int32: the slot of each request
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    num_computed_tokens: torch.Tensor  # [num_reqs] int32: the position of the request's first token in this step
    num_table_tokens: torch.Tensor  # [num_reqs] int32: tokens that token_table holds; the next one is the last sampled token
    kv_start_loc: torch.Tensor  # [num_groups, num_reqs + 1] int32: how the decodes are cut, see `flash_decoding.DecodeSplit`
    segment_len: torch.Tensor  # [num_groups] int32


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Outputs, allocated once at the largest size. Entries past the step's requests and tokens are padding."""

    input_ids: torch.Tensor  # [max_num_tokens] int32 or int64; padding 0
    positions: torch.Tensor  # [max_num_tokens] int64; padding 0
    slot_mapping: torch.Tensor  # [num_groups, max_num_tokens] int64; padding -1: no slot is written
    seq_lens: torch.Tensor  # [max_num_batch_reqs] int32: cached positions including this step's; padding 0
    logits_indices: torch.Tensor  # [max_num_batch_reqs] int32 or int64: the last token of each request; padding 0
    # [num_groups, max_num_batch_reqs, max_num_blocks_per_req] int32: rows in batch order; unused entries untouched
    block_table: torch.Tensor
    kv_start_loc: torch.Tensor  # [num_groups, max_num_batch_reqs + 1] int32; padding: no positions
    segment_len: torch.Tensor  # [num_groups, 1] int32


@jit
def _batch_inputs_kernel(
    token_table_ptr,
    block_table_ptr,
    last_sampled_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_ptr,
    num_table_ptr,
    kv_start_ptr,
    segment_len_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    logits_indices_ptr,
    batch_block_table_ptr,
    batch_kv_start_ptr,
    batch_segment_len_ptr,
    token_table_stride,
    block_table_group_stride,
    block_table_stride,
    slot_mapping_group_stride,
    batch_block_table_group_stride,
    batch_block_table_stride,
    batch_kv_start_group_stride,
    batch_segment_len_group_stride,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    max_num_tokens: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    chunk = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    block_table_ptr += group * block_table_group_stride
    kv_start_ptr += group * (num_reqs + 1)
    slot_mapping_ptr += group * slot_mapping_group_stride
    batch_block_table_ptr += group * batch_block_table_group_stride
    batch_kv_start_ptr += group * batch_kv_start_group_stride
    is_first = group == 0  # its programs also write what all groups have in common
    lanes = tl.arange(0, BLOCK)
    if i == num_reqs:  # the padding that a captured graph reads
        end = tl.load(query_start_loc_ptr + num_reqs)
        for first in tl.range(end + chunk * BLOCK, max_num_tokens, BLOCK * tl.num_programs(1)):
            token = first + lanes
            mask = token < max_num_tokens
            zeros = tl.zeros((BLOCK,), tl.int32)
            tl.store(input_ids_ptr + token, zeros.to(input_ids_ptr.dtype.element_ty), mask=mask & is_first)
            tl.store(positions_ptr + token, zeros.to(tl.int64), mask=mask & is_first)
            tl.store(slot_mapping_ptr + token, zeros.to(tl.int64) - 1, mask=mask)
        for first in tl.range(num_reqs + chunk * BLOCK, max_num_reqs, BLOCK * tl.num_programs(1)):
            row = first + lanes
            mask = row < max_num_reqs
            zeros = tl.zeros((BLOCK,), tl.int32)
            tl.store(seq_lens_ptr + row, zeros, mask=mask & is_first)
            tl.store(logits_indices_ptr + row, zeros.to(logits_indices_ptr.dtype.element_ty), mask=mask & is_first)
            tl.store(batch_kv_start_ptr + row + 1, zeros + tl.load(kv_start_ptr + num_reqs), mask=mask)
        if chunk == 0:
            tl.store(batch_kv_start_ptr + num_reqs, tl.load(kv_start_ptr + num_reqs))
            tl.store(batch_segment_len_ptr + group * batch_segment_len_group_stride, tl.load(segment_len_ptr + group))
        return

    slot = tl.load(idx_mapping_ptr + i).to(tl.int64)
    start = tl.load(query_start_loc_ptr + i)
    query_len = tl.load(query_start_loc_ptr + i + 1) - start
    num_computed = tl.load(num_computed_ptr + i)
    num_table = tl.load(num_table_ptr + i)
    seq_len = num_computed + query_len
    tokens_ptr = token_table_ptr + slot * token_table_stride
    blocks_ptr = block_table_ptr + slot * block_table_stride

    offset = chunk * BLOCK + lanes
    mask = offset < query_len
    common_mask = mask & is_first
    position = num_computed + offset
    from_table = position < num_table
    token = tl.load(tokens_ptr + position, mask=common_mask & from_table, other=0)
    last_sampled = tl.load(last_sampled_ptr + slot)
    token = tl.where(from_table, token, last_sampled)
    tl.device_assert((token >= 0) | ~common_mask, "a token that is not known yet reached the model")
    tl.store(tokens_ptr + position, token, mask=common_mask & (position == num_table))  # the table is whole again
    block = tl.load(blocks_ptr + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(input_ids_ptr + start + offset, token.to(input_ids_ptr.dtype.element_ty), mask=common_mask)
    tl.store(positions_ptr + start + offset, position.to(tl.int64), mask=common_mask)
    tl.store(slot_mapping_ptr + start + offset, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)

    if chunk == 0:
        tl.store(batch_kv_start_ptr + i, tl.load(kv_start_ptr + i))
        tl.store(seq_lens_ptr + i, seq_len, mask=is_first)
        last = tl.maximum(start + query_len - 1, 0)
        tl.store(logits_indices_ptr + i, last.to(logits_indices_ptr.dtype.element_ty), mask=is_first)
    num_blocks = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for first in tl.range(chunk * BLOCK, num_blocks, BLOCK * tl.num_programs(1)):
        entry = first + lanes
        copy_mask = entry < num_blocks
        ids = tl.load(blocks_ptr + entry, mask=copy_mask, other=0)
        tl.store(batch_block_table_ptr + i.to(tl.int64) * batch_block_table_stride + entry, ids, mask=copy_mask)


def batch_inputs_ref(tables: RequestTables, rows: StepRows, out: BatchInputs, *, block_size: int) -> None:
    """`batch_inputs` in torch, one request at a time."""
    for tensor, padding in (
        (out.input_ids, 0),
        (out.positions, 0),
        (out.slot_mapping, -1),
        (out.seq_lens, 0),
        (out.logits_indices, 0),
    ):
        tensor.fill_(padding)
    num_reqs = rows.idx_mapping.shape[0]
    out.kv_start_loc[:, : num_reqs + 1] = rows.kv_start_loc
    out.kv_start_loc[:, num_reqs + 1 :] = rows.kv_start_loc[:, -1:]
    out.segment_len[:, 0] = rows.segment_len
    starts = rows.query_start_loc.tolist()
    for i, (slot, computed, known) in enumerate(
        zip(rows.idx_mapping.tolist(), rows.num_computed_tokens.tolist(), rows.num_table_tokens.tolist(), strict=True)
    ):
        query = slice(starts[i], starts[i + 1])
        seq_len = computed + starts[i + 1] - starts[i]
        if known < seq_len:
            tables.token_table[slot, known] = tables.last_sampled_tokens[slot]
        positions = torch.arange(computed, seq_len, device=out.positions.device)
        out.input_ids[query] = tables.token_table[slot, computed:seq_len].to(out.input_ids.dtype)
        out.positions[query] = positions
        block_ids = tables.block_table[:, slot, positions // block_size].long()
        out.slot_mapping[:, query] = block_ids * block_size + positions % block_size
        out.seq_lens[i] = seq_len
        out.logits_indices[i] = max(starts[i + 1] - 1, 0)
        num_blocks = cdiv(seq_len, block_size)
        out.block_table[:, i, :num_blocks] = tables.block_table[:, slot, :num_blocks]


def batch_inputs_triton(tables: RequestTables, rows: StepRows, out: BatchInputs, *, block_size: int, max_query_len: int) -> None:
    """Launch the kernel of `batch_inputs`; the arguments are those of `batch_inputs`."""
    num_reqs = rows.idx_mapping.shape[0]
    grid = (num_reqs + 1, max(cdiv(max_query_len, _BLOCK), 1), tables.block_table.shape[0])
    _batch_inputs_kernel[grid](
        tables.token_table,
        tables.block_table,
        tables.last_sampled_tokens,
        rows.idx_mapping,
        rows.query_start_loc,
        rows.num_computed_tokens,
        rows.num_table_tokens,
        rows.kv_start_loc,
        rows.segment_len,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.seq_lens,
        out.logits_indices,
        out.block_table,
        out.kv_start_loc,
        out.segment_len,
        tables.token_table.stride(0),
        *tables.block_table.stride()[:2],
        out.slot_mapping.stride(0),
        *out.block_table.stride()[:2],
        out.kv_start_loc.stride(0),
        out.segment_len.stride(0),
        num_reqs,
        out.seq_lens.shape[0],
        out.input_ids.shape[0],
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def batch_inputs(tables: RequestTables, rows: StepRows, out: BatchInputs, *, block_size: int, max_query_len: int) -> None:
    """Fill `out` for one ragged step: request i takes rows query_start_loc[i] : query_start_loc[i + 1].

    Its tokens stand at positions num_computed_tokens[i], +1, ... Positions below num_table_tokens[i] are read from the token
    table; the one at num_table_tokens[i] is last_sampled_tokens of the slot, and is also stored into the table, so the host
    counts one more token there from the next step on. A step reads at most one position past the table.
    `max_query_len` is the host's maximum over the step. No value is read back to the host.
    """
    if use_triton(out.input_ids):
        batch_inputs_triton(tables, rows, out, block_size=block_size, max_query_len=max_query_len)
    else:
        batch_inputs_ref(tables, rows, out, block_size=block_size)
