"""Attention over the paged KV cache: a launch for the decodes of a step, and one for its prompt chunks.

A query block is BLOCK_Q consecutive query tokens of one request; the query heads that share a KV head (GQA) are stacked with
them on the M dimension, BLOCK_M = BLOCK_Q x group rows, so keys and values are read once for the whole group. Chunks and decodes
want different tiles, so each has its launch: a step's decodes come first in the batch. In both a program finds its request by a
binary search over prefix sums instead of a table from the host (kernels/README.md, "Query blocks"). The online softmax follows
FlashAttention-2 (Dao, 2023), the addressing PagedAttention (Kwon et al., 2023), the split of decodes Flash-Decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from aioengine_kernels._triton import jit, next_power_of_2, tl, use_triton
from aioengine_kernels.flash_decoding import DecodeSplit, _segments_of, choose_num_segments, reduce_segments_triton
from aioengine_kernels.reshape_and_cache import check_cache


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a launch is cut: a function of the model alone, so that serving never meets a variant that was not compiled."""

    block_m: int  # rows of a query tile: query tokens x query heads of one group
    block_q: int  # query tokens of a query tile
    tile: int  # cached positions an iteration attends to
    num_warps: int
    num_stages: int
    precision: str = "ieee"  # of the products: "tf32x3" is float32 on tensor cores, in three products of 10-bit mantissas


@cache
def plan_attention(*, decode: bool, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> AttentionPlan:
    """The launch of decodes (one query token a request), or of prompt chunks, for queries of `dtype`.

    Decodes take query tiles of 16 rows, the smallest that a tensor core multiplies, and five stages: keys are found through the block
    table, so a load of a load, and the compiler spreads `num_stages` over both; with five it keeps two tiles of keys and values
    in flight, with three or four only one. Chunks take tiles of 128 rows, or 64 for heads wider than 128, which is what fits in
    registers. Float32 has twice the bytes and, as products in full float32 have no tensor-core instruction and spill by the ten
    thousand bytes, multiplies in "tf32x3", which keeps three pieces of each operand: tiles of 64, 32 and 16 rows for heads up to
    64, 128 and 256.
    """
    group = num_heads // num_kv_heads
    dim = next_power_of_2(head_dim)
    wide = dim > 128
    if dtype == torch.float32:
        block_m = max(16 if decode or wide else 4096 // max(dim, 64), next_power_of_2(group))
        num_warps = 8 if wide and not decode else 4
        return AttentionPlan(block_m, block_m // group, tile=32, num_warps=num_warps, num_stages=2, precision="tf32x3")
    if decode:
        block_m = max(16, next_power_of_2(group))
        return AttentionPlan(block_m, block_m // group, tile=32, num_warps=4, num_stages=5)
    block_m = max(64 if wide else 128, next_power_of_2(group))
    return AttentionPlan(block_m, block_m // group, tile=32 if wide else 64, num_warps=8, num_stages=3)


@jit
def _find_last(start_loc_ptr, base, block, item, count, steps):
    """The last i < count with (start_loc[i] - base) // block + i <= item, in `steps` = bits of `count` steps; 0 if there is none."""
    last = 0
    for step in tl.range(0, steps):
        candidate = last + (1 << (steps - 1 - step))
        inside = candidate < count
        first = (tl.load(start_loc_ptr + candidate, mask=inside, other=0) - base) // block + candidate
        last = tl.where(inside & (first <= item), candidate, last)
    return last


@jit
def _tile_range(context_len, first_query, seq_len, segment, num_segments, BLOCK_Q, TILE, WINDOW):
    """The tiles that a query block attends to: from the window's first position to its last query's own, cut into segments."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context_len + first_query - WINDOW + 1, 0) // TILE
    end = (tl.minimum(context_len + first_query + BLOCK_Q, seq_len) + TILE - 1) // TILE
    tiles = (end - begin + num_segments - 1) // num_segments
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
    kv_start_loc_ptr,
    segment_len_ptr,
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
    first_req: tl.int32,
    num_reqs: tl.int32,
    search_steps: tl.int32,
    num_segments: tl.int32,
    num_tokens: tl.int32,
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
    DECODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if DECODE:  # an item is a segment of a request, which has one query token
        segment_len = tl.load(segment_len_ptr)
        request = _find_last(kv_start_loc_ptr, 0, segment_len, item, num_reqs, search_steps)
        first_item, segments = _segments_of(kv_start_loc_ptr, request, segment_len)
        segment = item - first_item
        if segment >= segments:
            return
        query_start = request
        query_len = 1
        first_query = 0
        partial_row = item
    else:  # an item is a query block
        segment = tl.program_id(2)
        segments = num_segments
        base = tl.load(query_start_loc_ptr + first_req)
        request = first_req + _find_last(query_start_loc_ptr + first_req, base, BLOCK_Q, item, num_reqs, search_steps)
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        first_query = (item - ((query_start - base) // BLOCK_Q + request - first_req)) * BLOCK_Q
        if first_query >= query_len:
            return
        partial_row = segment * num_tokens + query_start - base + first_query
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
    begin, end = _tile_range(context_len, first_query, seq_len, segment, segments, BLOCK_Q, TILE, WINDOW)

    block_row_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    k_ptr = key_cache_ptr + kv_head * k_head_stride
    v_ptr = value_cache_ptr + kv_head * v_head_stride
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulator = tl.zeros((BLOCK_M, DIM_PADDED), tl.float32)
    for tile in tl.range(begin, end):
        position = tile * TILE + tl.arange(0, TILE)
        # Slots past the sequence, and blocks behind the window, which may be others' by now, may hold anything, NaN included:
        # 0 x NaN is NaN, so the loads are masked, not only the scores.
        in_sequence = position < seq_len
        if WINDOW > 0:
            in_sequence = in_sequence & (position > context_len + first_query - WINDOW)
        block = tl.load(block_row_ptr + position // BLOCK_SIZE, mask=in_sequence, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        key = tl.load(
            k_ptr + (block * k_block_stride + offset * k_slot_stride)[None, :] + dim[:, None],
            mask=dim_mask[:, None] & in_sequence[None, :],
            other=0.0,
        )
        scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * score_factor
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
        accumulator = tl.dot(weights.to(query.dtype), value.to(query.dtype), accumulator, input_precision=PRECISION)

    if segments == 1:
        result = accumulator * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=row_mask[:, None] & dim_mask[None, :],
        )
    else:
        place = (partial_row + row // GROUP).to(tl.int64) * NUM_HEADS + head
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
        first_query = seq_len - (rows.stop - rows.start)
        first = 0 if sliding_window is None else max(0, first_query - sliding_window + 1)  # what is before it may be anybody's
        position = torch.arange(first, seq_len, device=query.device)
        blocks, offsets = block_table[i, position // block_size].long(), position % block_size
        key, value = (
            cache[blocks, offsets].to(dtype).repeat_interleave(group, 1) * factor
            for cache, factor in ((key_cache, k_scale), (value_cache, v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].to(dtype), key) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        query_position = position[first_query - first :, None]
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
    num_decodes: int | None = None,
    split: DecodeSplit | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    num_segments: int | None = None,
) -> torch.Tensor:
    """Launch the kernels of `paged_attention`; the arguments are those of `paged_attention`, and the segments of chunks to use."""
    check_cache(key_cache, value_cache)
    out = torch.empty_like(query) if out is None else out
    num_reqs = seq_lens.shape[0]
    if query.shape[0] == 0 or num_reqs == 0:
        return out
    if num_decodes is None:
        num_decodes = num_reqs if max_query_len == 1 and query.shape[0] == num_reqs else 0
    log2e = math.log2(math.e)  # softmax in base 2: the hardware has exp2
    score_factor = scale * k_scale * log2e if logits_soft_cap is None else scale * k_scale / logits_soft_cap
    launch = _Launch(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, out, score_factor, logits_soft_cap, v_scale, sliding_window
    )
    if num_decodes:
        if split is None:
            split = DecodeSplit.of_bounds(seq_lens[:num_decodes], max_seq_len=max_seq_len, num_kv_heads=key_cache.shape[2])
        launch.decodes(num_decodes, split)
    if num_reqs > num_decodes:
        launch.chunks(num_decodes, num_reqs - num_decodes, max_seq_len=max_seq_len, num_segments=num_segments)
    return out


@dataclass(slots=True)  # not frozen: that costs microseconds a layer
class _Launch:
    """What the two launches of a call share."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    score_factor: float
    soft_cap: float | None
    v_scale: float
    window: int | None

    def decodes(self, num_reqs: int, split: DecodeSplit) -> None:
        """The first `num_reqs` requests, with one query token each."""
        plan = self._plan(decode=True)
        partial = self._partial(split.num_segments) if split.is_split else self._no_partial()
        grid = (split.num_segments, self.key_cache.shape[2])
        self._run(grid, plan, partial, split=split, first_req=0, num_reqs=num_reqs, num_segments=1, num_tokens=num_reqs)
        if split.is_split:
            reduce_segments_triton(*partial, out=self.out, v_scale=self.v_scale, split=split, num_tokens=num_reqs)

    def chunks(self, first_req: int, num_reqs: int, *, max_seq_len: int, num_segments: int | None) -> None:
        """The requests behind the first `first_req`, which are decodes."""
        plan, num_kv_heads = self._plan(decode=False), self.key_cache.shape[2]
        num_tokens = self.query.shape[0] - first_req
        num_blocks = num_tokens // plan.block_q + num_reqs
        if num_segments is None:
            num_segments = choose_num_segments(num_query_blocks=num_blocks, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
        partial = self._partial(num_segments, num_tokens) if num_segments > 1 else self._no_partial()
        grid = (num_blocks, num_kv_heads, num_segments)
        self._run(grid, plan, partial, split=None, first_req=first_req, num_reqs=num_reqs, num_segments=num_segments, num_tokens=num_tokens)
        if num_segments > 1:
            reduce_segments_triton(*partial, out=self.out, v_scale=self.v_scale, first_token=first_req, num_tokens=num_tokens)

    def _plan(self, *, decode: bool) -> AttentionPlan:
        _, num_heads, head_dim = self.query.shape
        num_kv_heads = self.key_cache.shape[2]
        return plan_attention(decode=decode, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=self.query.dtype)

    def _partial(self, *rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accumulators, maxima and sums of segments."""
        _, num_heads, head_dim = self.query.shape
        options: dict[str, Any] = {"dtype": torch.float32, "device": self.query.device}
        partial = torch.empty(*rows, num_heads, next_power_of_2(head_dim), **options)
        return partial, torch.empty(*rows, num_heads, **options), torch.empty(*rows, num_heads, **options)

    def _no_partial(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is not written to: of the same type, or it would make another variant of the kernel."""
        nothing = torch.empty(0, dtype=torch.float32, device=self.query.device)
        return nothing, nothing, nothing

    def _run(
        self,
        grid: tuple[int, ...],
        plan: AttentionPlan,
        partial: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        split: DecodeSplit | None,
        first_req: int,
        num_reqs: int,
        num_segments: int,
        num_tokens: int,
    ) -> None:
        query_strides, out_strides = self.query.stride(), self.out.stride()
        _, num_heads, head_dim = self.query.shape
        _, block_size, num_kv_heads, _ = self.key_cache.shape
        _paged_attention_kernel[grid](
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.query_start_loc if split is None else split.kv_start_loc,
            self.query_start_loc if split is None else split.segment_len,
            self.out,
            *partial,
            self.score_factor,
            (self.soft_cap or 0.0) * math.log2(math.e),
            self.v_scale,
            query_strides[0],
            query_strides[1],
            out_strides[0],
            out_strides[1],
            self.block_table.stride(0),
            *self.key_cache.stride()[:3],
            *self.value_cache.stride()[:3],
            first_req,
            num_reqs,
            num_reqs.bit_length(),
            num_segments,
            num_tokens,
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            DIM_PADDED=next_power_of_2(head_dim),
            BLOCK_SIZE=block_size,
            BLOCK_Q=plan.block_q,
            BLOCK_M=plan.block_m,
            TILE=plan.tile,
            WINDOW=self.window or 0,
            SOFT_CAP=self.soft_cap is not None,
            DECODE=split is not None,
            PRECISION=plan.precision,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], last dimension dense
    *,
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides but a dense last dimension
    value_cache: torch.Tensor,
    # [num_reqs, max_num_blocks_per_req] int32; entries past a request's blocks, and of blocks behind the window, are never read
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,  # [num_reqs] int32: cached positions including the query tokens
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    num_decodes: int | None = None,
    split: DecodeSplit | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each request's query tokens over its cached positions; the cache already holds their own keys.

    Request i's query rows query_start_loc[i] : query_start_loc[i + 1] stand at the last positions of its seq_lens[i].
    sliding_window: a query sees that many positions, its own included. logits_soft_cap: scores become cap x tanh(score / cap).
    k_scale, v_scale: factors of an fp8 cache. `max_query_len` and `max_seq_len` bound the host's lengths.
    num_decodes: so many requests from the first on have exactly one query token, and get a launch of their own; None: all if that
    is all they have, else none. split: how their positions are cut; None: evenly by the bounds.
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
            num_decodes=num_decodes,
            split=split,
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
