"""Rotary position embedding (Su et al., RoFormer, 2021) in the half-split layout of Llama and Qwen checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from aioengine_kernels._triton import dispatcher, jit, next_power_of_2, tl


@jit
def _rotate_heads(x_ptr, head_stride, cos, sin, pair, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr):
    head = tl.arange(0, HEADS_PADDED)[:, None]
    mask = (head < HEADS) & (pair < HALF)[None, :]
    first_ptr = x_ptr + head * head_stride + pair[None, :]
    x1 = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(first_ptr, (x1 * cos[None, :] - x2 * sin[None, :]).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(first_ptr + HALF, (x2 * cos[None, :] + x1 * sin[None, :]).to(x_ptr.dtype.element_ty), mask=mask)


@jit
def _apply_rope_kernel(
    query_ptr,
    key_ptr,
    positions_ptr,
    cos_sin_ptr,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, HALF_PADDED)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0)
    _rotate_heads(query_ptr + token * query_stride, query_head_stride, cos, sin, pair, NUM_HEADS, HEADS_PADDED, HALF)
    _rotate_heads(key_ptr + token * key_stride, key_head_stride, cos, sin, pair, NUM_KV_HEADS, KV_HEADS_PADDED, HALF)


def inverse_frequencies(rotary_dim: int, *, theta: float, scaling: Mapping[str, Any] | None = None) -> torch.Tensor:
    """[rotary_dim // 2] float64: the angle a position adds to each pair, theta^(-2i / rotary_dim), stretched by `scaling`.

    `scaling` is a checkpoint's rope_scaling: rope_type "default", "linear" (every frequency over `factor`; Chen et al., 2023)
    or "llama3" (long wavelengths over `factor`, short ones kept, a linear ramp between, as published with Llama 3.1).
    Raises ValueError for any other type.
    """
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind != "llama3":
        raise ValueError(f"rope scaling type must be default, linear or llama3, got {kind!r}")
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / float(scaling["factor"])


def build_cos_sin_cache(frequencies: torch.Tensor, *, max_position: int, device: torch.device | None = None) -> torch.Tensor:
    """[max_position, rotary_dim] float32: the cosines of each position's angles, then the sines, computed in float64."""
    angles = torch.arange(max_position, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float().to(device)


def rotate_ref(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate [n, heads, head_dim] by the gathered [n, rotary_dim] rows of a cos-sin cache; dimensions past rotary_dim stay."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos_sin.to(dtype).unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[-1]
    x1, x2 = x[..., :rotary_dim].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def apply_rope_ref(query: torch.Tensor, key: torch.Tensor, *, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Rotate the first rotary_dim dimensions of every head, in place, pairing dimension i with i + rotary_dim / 2.

    query: [num_tokens, num_heads, head_dim], key: [num_tokens, num_kv_heads, head_dim], last dimensions dense;
    positions: [num_tokens] int64, below max_position; cos_sin_cache: [max_position, rotary_dim] float32, contiguous.
    """
    cos_sin = cos_sin_cache[positions]
    query.copy_(rotate_ref(query, cos_sin))
    key.copy_(rotate_ref(key, cos_sin))


def apply_rope_triton(query: torch.Tensor, key: torch.Tensor, *, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    """Launch the kernel of `apply_rope`; the arguments are those of `apply_rope`."""
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0:
        return
    num_kv_heads = key.shape[1]
    half = cos_sin_cache.shape[1] // 2
    _apply_rope_kernel[(num_tokens,)](
        query,
        key,
        positions,
        cos_sin_cache,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PADDED=next_power_of_2(num_heads),
        KV_HEADS_PADDED=next_power_of_2(num_kv_heads),
        HALF=half,
        HALF_PADDED=next_power_of_2(half),
        num_warps=4,
    )


apply_rope = dispatcher(triton=apply_rope_triton, reference=apply_rope_ref)
