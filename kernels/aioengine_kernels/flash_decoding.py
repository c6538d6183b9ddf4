"""Split-KV attention for few long sequences: how many segments, and the reduction that joins them.

One program per (query block, KV head) leaves most of a GPU idle when few requests decode over long contexts: 1 request of a
model with 8 KV heads occupies 8 of an H200's 132 SMs. So the cached positions are cut into segments, each attended by its own
program, which leaves the running maximum m, the sum l and the unnormalized accumulator a of its segment. The reduction is
exact in real arithmetic: out = sum_s 2^(m_s - M) a_s / sum_s 2^(m_s - M) l_s with M = max_s m_s
(Dao et al., Flash-Decoding, 2023; the online softmax of Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import Final

import torch

from aioengine_kernels._triton import jit, next_power_of_2, tl, use_triton

TARGET_PROGRAMS: Final = 264
"""Two programs for each of an H200's 132 SMs: one loads while the other computes."""

MAX_SEGMENTS: Final = 32
MIN_SEGMENT_TOKENS: Final = 256
"""A segment shorter than this spends its time starting up: about 8 tiles of 32 positions."""


def choose_num_segments(*, num_query_blocks: int, num_kv_heads: int, max_seq_len: int) -> int:
    """How many segments to cut the KV cache into: a power of two, 1 meaning no split.

    Segments are added until programs reach TARGET_PROGRAMS or a segment would fall under MIN_SEGMENT_TOKENS. With 8 KV heads
    and 8192 cached positions: 1 request -> 32 segments (256 programs), 4 -> 8 (256), 16 -> 2 (256), 32 -> 1 (256). With 512
    positions, 1 request -> 2 segments (16 programs); with 256 or fewer always 1. The device cuts each sequence by its own
    length, so a captured graph passes max_model_len here and stays right for every length.
    """
    wanted = TARGET_PROGRAMS // max(num_query_blocks * num_kv_heads, 1)
    possible = max_seq_len // MIN_SEGMENT_TOKENS
    limit = min(wanted, possible, MAX_SEGMENTS)
    return 1 << (limit.bit_length() - 1) if limit >= 1 else 1


@jit
def _reduce_segments_kernel(
    partial_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    out_stride,
    out_head_stride,
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segment = tl.arange(0, NUM_SEGMENTS)
    dim = tl.arange(0, DIM_PADDED)
    row = (token * NUM_HEADS + head) * NUM_SEGMENTS + segment
    maxima = tl.load(maxima_ptr + row)
    sums = tl.load(sums_ptr + row)
    largest = tl.max(maxima, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(maxima - largest)
    total = tl.sum(sums * weights, 0)
    partial = tl.load(partial_ptr + row[:, None] * DIM_PADDED + dim[None, :])
    out = tl.sum(partial * weights[:, None], 0) * v_scale / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + token * out_stride + head * out_head_stride + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def reduce_segments_ref(
    partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, *, out: torch.Tensor, v_scale: float = 1.0
) -> torch.Tensor:
    """`reduce_segments` in torch."""
    largest = maxima.amax(-1, keepdim=True)
    weights = torch.exp2(maxima - torch.where(largest == float("-inf"), torch.zeros_like(largest), largest))
    total = (sums * weights).sum(-1, keepdim=True)
    joined = (partial * weights.unsqueeze(-1)).sum(-2) * v_scale / torch.where(total == 0, torch.ones_like(total), total)
    return out.copy_(joined[..., : out.shape[-1]])


def reduce_segments_triton(
    partial: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor, *, out: torch.Tensor, v_scale: float = 1.0
) -> torch.Tensor:
    """Launch the kernel of `reduce_segments`; the arguments are those of `reduce_segments`."""
    num_tokens, num_heads, num_segments, _ = partial.shape
    if num_tokens == 0:
        return out
    _reduce_segments_kernel[(num_tokens, num_heads)](
        partial,
        maxima,
        sums,
        out,
        out.stride(0),
        out.stride(1),
        v_scale,
        NUM_HEADS=num_heads,
        HEAD_DIM=out.shape[-1],
        DIM_PADDED=next_power_of_2(out.shape[-1]),
        NUM_SEGMENTS=num_segments,
        num_warps=2,
    )
    return out


def reduce_segments(
    partial: torch.Tensor,  # [num_tokens, num_heads, num_segments, padded head_dim] float32, contiguous
    maxima: torch.Tensor,  # [num_tokens, num_heads, num_segments] float32, base-2 scores; -inf for an empty segment
    sums: torch.Tensor,  # [num_tokens, num_heads, num_segments] float32
    *,
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Join the segments of split-KV attention into `out`, multiplied by `v_scale`, and return it."""
    reduce = reduce_segments_triton if use_triton(out) else reduce_segments_ref
    return reduce(partial, maxima, sums, out=out, v_scale=v_scale)
