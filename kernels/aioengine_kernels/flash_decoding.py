"""Split-KV attention: how cached positions are cut into segments of even length, and the reduction that joins them.

One program per (query block, KV head) leaves most of a GPU idle when few requests decode over long contexts, and lets one long
request walk alone beside many short ones. So a sequence's cached positions are cut into segments, each attended by its own
program, which leaves the running maximum m, the sum l and the unnormalized accumulator a of its segment. The reduction is
exact in real arithmetic: out = sum_s 2^(m_s - M) a_s / sum_s 2^(m_s - M) l_s with M = max_s m_s
(Dao et al., Flash-Decoding, 2023; the online softmax of Milakov and Gimelshein, 2018).

Decodes are cut by length: no segment is longer than `choose_segment_len` says, which shares all positions of the step evenly.
The segments of a step are numbered so that a program finds its own by a binary search: request i's come from
kv_start_loc[i] // segment_len + i on, which is at least as many numbers as it needs (see kernels/README.md). All of them together
are at most num_reqs + TARGET_PROGRAMS / num_kv_heads, whatever the lengths: the grid of a captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from aioengine_kernels._triton import cdiv, dispatcher, jit, next_power_of_2, tl

TARGET_PROGRAMS: Final = 264
"""Two programs for each of an H200's 132 SMs: one loads while the other computes."""

MAX_SEGMENTS: Final = 32
MIN_SEGMENT_TOKENS: Final = 256
"""A segment shorter than this spends its time starting up: about 8 tiles of 32 positions."""

_TILE: Final = 32  # of the decodes' query tiles: segments end where tiles do


def choose_segment_len(*, num_positions: int, longest: int, num_kv_heads: int) -> int:
    """The positions of a segment, for decodes over `num_positions` cached positions in all, of which one has `longest`.

    An even share of the positions for each of TARGET_PROGRAMS programs, but not under MIN_SEGMENT_TOKENS, and so long that no
    sequence has more than MAX_SEGMENTS segments. With 8 KV heads: one request of 8192 -> 256 (32 segments, 256 programs);
    34 requests, one of 131072 and 33 of 1024 -> 5024 (27 segments for the long one); 256 of 1024 -> 7968 (no split).
    """
    share = cdiv(num_positions * num_kv_heads, TARGET_PROGRAMS)
    return cdiv(max(share, MIN_SEGMENT_TOKENS, cdiv(longest, MAX_SEGMENTS)), _TILE) * _TILE


def max_num_segments(*, num_reqs: int, num_kv_heads: int) -> int:
    """An upper bound of all segments of `num_reqs` decodes, whatever their lengths: the grid of a captured graph."""
    return num_reqs + TARGET_PROGRAMS // num_kv_heads


def choose_num_segments(*, num_query_blocks: int, num_kv_heads: int, max_seq_len: int) -> int:
    """Into how many segments the positions of prompt chunks are cut; 1 means no split.

    Segments are added until programs reach TARGET_PROGRAMS or a segment would fall under MIN_SEGMENT_TOKENS. With 8 KV heads a
    chunk of 2048 tokens (65 query blocks) is not split; one of 40 tokens (2 blocks) behind 32768 cached positions 16 times.
    """
    wanted = TARGET_PROGRAMS // max(num_query_blocks * num_kv_heads, 1)
    return max(1, min(wanted, max_seq_len // MIN_SEGMENT_TOKENS, MAX_SEGMENTS))


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """How the decodes of a step are cut; the tensors may change under a captured graph, the numbers are bounds that hold then."""

    kv_start_loc: torch.Tensor  # [num_decodes + 1] int32: the sum of the visible positions of the requests before each
    segment_len: torch.Tensor  # [1] int32
    num_segments: int  # of all requests together; programs past the last one exit at once
    is_split: bool  # some request may have more than one

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], *, num_kv_heads: int, device: torch.device) -> DecodeSplit:
        """For decodes that see that many cached positions each."""
        total = sum(lengths)
        segment_len = choose_segment_len(num_positions=total, longest=max(lengths, default=0), num_kv_heads=num_kv_heads)
        starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int()
        return cls(
            kv_start_loc=starts.to(device),
            segment_len=torch.tensor([segment_len], dtype=torch.int32, device=device),
            num_segments=len(lengths) + total // segment_len,
            is_split=max(lengths, default=0) > segment_len,
        )

    @classmethod
    def of_bounds(cls, seq_lens: torch.Tensor, *, max_seq_len: int, num_kv_heads: int) -> DecodeSplit:
        """For decodes whose lengths [n] int32 lie on the device, of which the host knows a bound."""
        num_reqs = seq_lens.shape[0]
        segment_len = choose_segment_len(num_positions=num_reqs * max_seq_len, longest=max_seq_len, num_kv_heads=num_kv_heads)
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=seq_lens.device)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return cls(
            kv_start_loc=starts,
            segment_len=torch.full((1,), segment_len, dtype=torch.int32, device=seq_lens.device),
            num_segments=max_num_segments(num_reqs=num_reqs, num_kv_heads=num_kv_heads),
            is_split=max_seq_len > segment_len,
        )


@jit
def _segments_of(kv_start_loc_ptr, request, segment_len):
    """The number of a decode's first segment, and how many it has."""
    start = tl.load(kv_start_loc_ptr + request)
    length = tl.load(kv_start_loc_ptr + request + 1) - start
    return start // segment_len + request, tl.maximum((length + segment_len - 1) // segment_len, 1)


@jit
def _reduce_segments_kernel(
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    kv_start_loc_ptr,
    segment_len_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    v_scale,
    first_token: tl.int32,
    num_segments: tl.int32,
    num_tokens: tl.int32,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SEGMENTS_PADDED: tl.constexpr,
    DECODE: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.arange(0, SEGMENTS_PADDED)
    if DECODE:
        first, count = _segments_of(kv_start_loc_ptr, token, tl.load(segment_len_ptr))
        if count == 1:  # its one program has written the output
            return
        row = first + segment
    else:
        count = num_segments
        row = segment * num_tokens + token
    mask = segment < count
    place = row.to(tl.int64) * NUM_HEADS + head
    dim = tl.arange(0, DIM_PADDED)
    maxima = tl.load(maxima_ptr + place, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + place, mask=mask, other=0.0)
    largest = tl.max(maxima, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(maxima - largest)
    total = tl.sum(sums * weights, 0)
    partial = tl.load(partial_ptr + place[:, None] * DIM_PADDED + dim[None, :], mask=mask[:, None], other=0.0)
    out = tl.sum(partial * weights[:, None], 0) * v_scale / tl.where(total == 0.0, 1.0, total)
    out_row_ptr = out_ptr + (first_token + token).to(tl.int64) * out_stride + head * out_head_stride
    tl.store(out_row_ptr + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def reduce_segments_ref(
    partial: torch.Tensor,  # [num_segments, num_tokens, num_heads, padded head_dim] float32, contiguous; num_segments <= MAX_SEGMENTS
    maxima: torch.Tensor,  # [num_segments, num_tokens, num_heads] float32, base-2 scores; -inf for an empty segment
    sums: torch.Tensor,  # [num_segments, num_tokens, num_heads] float32
    *,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Join the segments of split-KV attention into `out`, multiplied by `v_scale`, and return it."""
    largest = maxima.amax(0, keepdim=True)
    weights = torch.exp2(maxima - torch.where(largest == float("-inf"), torch.zeros_like(largest), largest))
    total = (sums * weights).sum(0).unsqueeze(-1)
    joined = (partial * weights.unsqueeze(-1)).sum(0) * v_scale / torch.where(total == 0, torch.ones_like(total), total)
    return out.copy_(joined[..., : out.shape[-1]])


def reduce_segments_triton(
    partial: torch.Tensor,
    maxima: torch.Tensor,
    sums: torch.Tensor,
    *,
    out: torch.Tensor,
    v_scale: float = 1.0,
    split: DecodeSplit | None = None,
    first_token: int = 0,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """Launch the reduction of `num_tokens` rows of `out` from `first_token` on: those of decodes cut as `split` says, or [all of]
    those whose segments lie in `partial` [num_segments, num_tokens, ...] as `reduce_segments` has them."""
    num_tokens = out.shape[0] if num_tokens is None else num_tokens
    if num_tokens == 0:
        return out
    num_heads, head_dim = out.shape[1:]
    _reduce_segments_kernel[(num_tokens, num_heads)](
        partial,
        maxima,
        sums,
        maxima if split is None else split.kv_start_loc,
        maxima if split is None else split.segment_len,
        out,
        out.stride(0),
        out.stride(1),
        v_scale,
        first_token,
        0 if split is not None else partial.shape[0],
        num_tokens,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        DIM_PADDED=next_power_of_2(head_dim),
        SEGMENTS_PADDED=MAX_SEGMENTS,
        DECODE=split is not None,
        num_warps=2,
    )
    return out


reduce_segments = dispatcher(triton=reduce_segments_triton, reference=reduce_segments_ref)
