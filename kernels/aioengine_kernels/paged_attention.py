"""Attention over the paged KV cache: one ragged kernel for chunks of prompts and single decode tokens together.

A query block is BLOCK_Q consecutive query tokens of one request; the query heads that share a KV head (GQA) are stacked with
them on the M dimension, BLOCK_M = BLOCK_Q x group rows, so keys and values are read once for the whole group. Request r's query
blocks are the program ids from query_start_loc[r] // BLOCK_Q + r on: that is at least the number it needs, and lets a
program find its request by a binary search instead of a table from the host. The online softmax follows FlashAttention-2
(Dao, 2023), the addressing PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from aioengine_kernels._triton import jit, next_power_of_2, tl, use_triton
from aioengine_kernels.flash_decoding import choose_num_segments, reduce_segments_triton
from aioengine_kernels.reshape_and_cache import check_cache


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a launch is cut."""

    block_m: int  # rows of a query tile: query tokens x query heads of one group
    block_q: int  # query tokens of a query tile
    tile: int  # cached positions an iteration attends to
    num_segments: int  # programs that share one query tile's cached positions; 1: no reduction
    num_warps: int
    num_stages: int


def plan_attention(
    *, num_reqs: int, max_query_len: int, max_seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> AttentionPlan:
    """Choose the launch for a batch; every argument is known on the host, and equal shapes give equal plans.

    Query tiles of 16 rows (the smallest a tensor core takes) when every request's rows fit in one, else of 128, or 64 for heads
    wider than 128, which is what fits in registers. Only small tiles split the KV cache, see `choose_num_segments`.
    Llama-3-8B (32 query heads, 8 KV heads of 128), cached positions 8192: one decoding request launches 1 query block x 8 heads
    x 32 segments = 256 programs, 256 requests 320 x 8 = 2560 (512 of them exit at once); a chunk of 2048 tokens has
    128 / 4 = 32 tokens a tile: 65 x 8 = 520 programs.

    Five stages for small tiles: keys are found through the block table, so a load of a load, and the compiler spreads
    `num_stages` over both; with five it keeps two tiles of keys and values in flight, with three or four only one.
    """
    group = num_heads // num_kv_heads
    dim = next_power_of_2(head_dim)
    small = max(16, next_power_of_2(group))
    if max_query_len * group <= small:
        num_segments = choose_num_segments(num_query_blocks=num_reqs, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
        return AttentionPlan(small, small // group, tile=32, num_segments=num_segments, num_warps=4, num_stages=5)
    block_m = max(128 if dim <= 128 else 64, next_power_of_2(group))
    return AttentionPlan(block_m, block_m // group, tile=64 if dim <= 128 else 32, num_segments=1, num_warps=8, num_stages=3)


@jit
def _find_request(query_start_loc_ptr, query_block, num_reqs, BLOCK_Q: tl.constexpr):
    """The last request whose first query block is at or before `query_block`."""
    low = 0
    high = num_reqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle
        if first <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def _tile_range(context_len, first_query, seq_len, segment, BLOCK_Q, TILE, WINDOW, NUM_SEGMENTS):
    """The tiles that a query block attends to: from the window's first position to its last query's own, cut into segments."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len + first_query - WINDOW + 1, 0) // TILE
    end = (tl.minimum(context_len + first_query + BLOCK_Q, seq_len) + TILE - 1) // TILE
    if NUM_SEGMENTS > 1:
        tiles = (end - begin + NUM_SEGMENTS - 1) // NUM_SEGMENTS
        begin = begin + segment * tiles
        end = tl.minimum(begin + tiles, end)
    return begin, end


@jit
def _paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    score_factor,
    cap_log2e,
    v_scale,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    block_table_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    num_reqs: tl.int32,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    request = _find_request(query_start_loc_ptr, query_block, num_reqs, BLOCK_Q)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_query = (query_block - (query_start // BLOCK_Q + request)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = tl.full((DIM_PADDED,), 1, tl.int1) if HEAD_DIM == DIM_PADDED else dim < HEAD_DIM
    query_index = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_mask = (query_index < query_len) & (row < BLOCK_Q * GROUP)
    token = (query_start + query_index).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :],
        mask=row_mask[:, None] & dim_mask[None, :],
        other=0.0,
    )
    query_position = context_len + query_index
    begin, end = _tile_range(context_len, first_query, seq_len, segment, BLOCK_Q, TILE, WINDOW, NUM_SEGMENTS)

    block_row_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    k_ptr = key_cache_ptr + kv_head * k_head_stride
    v_ptr = value_cache_ptr + kv_head * v_head_stride
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    for tile in tl.range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        # Slots past the sequence may hold anything, NaN included: 0 x NaN is NaN, so the loads are masked, not only the scores.
        in_sequence = position < seq_len
        block = tl.load(block_row_ptr + position // BLOCK_SIZE, mask=in_sequence, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        key = tl.load(
            k_ptr + (block * k_block_stride + offset * k_slot_stride)[None, :] + dim[:, None],
            mask=dim_mask[:, None] & in_sequence[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * score_factor
        if SOFT_CAP:  # score_factor holds scale / cap; tanh(x) = 2 sigmoid(2x) - 1, as Triton has no portable tanh
            scores = cap_log2e * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        visible = (position[None, :] <= query_position[:, None]) & row_mask[:, None]
        if WINDOW > 0:
            visible = visible & (query_position[:, None] - position[None, :] < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        maximum = new_maximum
        value = tl.load(
            v_ptr + (block * v_block_stride + offset * v_slot_stride)[:, None] + dim[None, :],
            mask=in_sequence[:, None] & dim_mask[None, :],
            other=0.0,
        )
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(weights.to(query.dtype), value.to(query.dtype), accumulator, input_precision="ieee")

    if NUM_SEGMENTS == 1:
        result = accumulator * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=row_mask[:, None] & dim_mask[None, :],
        )
    else:
        place = (token * NUM_HEADS + head) * NUM_SEGMENTS + segment
        tl.store(partial_ptr + place[:, None] * DIM_PADDED + dim[None, :], accumulator, mask=row_mask[:, None])
        tl.store(maxima_ptr + place, maximum, mask=row_mask)
        tl.store(sums_ptr + place, total, mask=row_mask)


def paged_attention_ref(
    query: torch.Tensor,
    *,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in torch, one request at a time, in float32, or float64 for float64 queries."""
    out = torch.empty_like(query) if out is None else out
    dtype = torch.promote_types(query.dtype, torch.float32)
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if seq_len == 0:
            out[rows] = 0
        if seq_len == 0 or rows.start == rows.stop:
            continue
        blocks = block_table[i, : -(-seq_len // block_size)].long()
        key, value = (
            cache[blocks].to(dtype).flatten(0, 1)[:seq_len].repeat_interleave(group, 1) * factor
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].to(dtype), key) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        position = torch.arange(seq_len, device=query.device)
        query_position = position[seq_len - (rows.stop - rows.start) :, None]
        visible = position <= query_position
        if sliding_window is not None:
            visible &= query_position - position < sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
    return out


def paged_attention_triton(
    query: torch.Tensor,
    *,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Launch the kernel of `paged_attention`; the arguments are those of `paged_attention`, and a plan to use."""
    check_cache(key_cache, value_cache)
    out = torch.empty_like(query) if out is None else out
    num_tokens, num_heads, head_dim = query.shape
    num_reqs = seq_lens.shape[0]
    _, block_size, num_kv_heads, _ = key_cache.shape
    if num_tokens == 0 or num_reqs == 0:
        return out
    plan = plan or plan_attention(
        num_reqs=num_reqs,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    dim_padded = next_power_of_2(head_dim)
    partial = maxima = sums = out
    if plan.num_segments > 1:
        shape = (num_tokens, num_heads, plan.num_segments)
        partial = torch.empty(*shape, dim_padded, dtype=torch.float32, device=query.device)
        maxima = torch.empty(shape, dtype=torch.float32, device=query.device)
        sums = torch.empty_like(maxima)
    log2e = math.log2(math.e)  # softmax in base 2: the hardware has exp2
    score_factor = scale * k_scale * log2e if logits_soft_cap is None else scale * k_scale / logits_soft_cap
    grid = (num_tokens // plan.block_q + num_reqs, num_kv_heads, plan.num_segments)
    _paged_attention_kernel[grid](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        partial,
        maxima,
        sums,
        score_factor,
        (logits_soft_cap or 0.0) * log2e,
        v_scale,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_reqs,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        BLOCK_Q=plan.block_q,
        BLOCK_M=plan.block_m,
        TILE=plan.tile,
        WINDOW=sliding_window or 0,
        SOFT_CAP=logits_soft_cap is not None,
        NUM_SEGMENTS=plan.num_segments,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.num_segments > 1:
        reduce_segments_triton(partial, maxima, sums, out=out, v_scale=v_scale)
    return out


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], last dimension dense
    *,
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides but a dense last dimension
    value_cache: torch.Tensor,
    block_table: torch.Tensor,  # [num_reqs, max_num_blocks_per_req] int32; entries past a request's blocks are never read
    seq_lens: torch.Tensor,  # [num_reqs] int32: cached positions including the query tokens
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each request's query tokens over its cached positions; the cache already holds their own keys.

    Request i's query rows query_start_loc[i] : query_start_loc[i + 1] stand at the last positions of its seq_lens[i].
    sliding_window: a query sees that many positions, its own included. logits_soft_cap: scores become cap x tanh(score / cap).
    k_scale, v_scale: factors of an fp8 cache. `max_query_len` and `max_seq_len` bound the host's lengths (see `plan_attention`).
    Padding of a captured graph: rows of `query` past query_start_loc[-1] are not written, and the row of a request with one query
    token and seq_lens[i] = 0 is zero. Returns [num_tokens, num_heads, head_dim].
    """
    if use_triton(query):
        return paged_attention_triton(
            query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
        )
    return paged_attention_ref(
        query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )
