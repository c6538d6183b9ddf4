"""What lies between the QKV projection and attention, in one launch: QK-norm, RoPE and the KV write.

Apart from this, a layer reads and writes the query three times and the key four times, in four launches, each of which costs
more to start than to run in a decode step. A program takes one token and one KV head with the query heads that share it.
"""

from __future__ import annotations

import torch

from aioengine_kernels._triton import dispatcher, jit, next_power_of_2, tl
from aioengine_kernels.reshape_and_cache import check_cache, reshape_and_cache_ref, store_cache_row
from aioengine_kernels.rms_norm import rms_norm_ref
from aioengine_kernels.rope import rotate_ref


@jit
def _load_weight(weight_ptr, pair, mask, weight_offset):
    return tl.load(weight_ptr + pair, mask=mask, other=0.0).to(tl.float32) + weight_offset


@jit
def _qk_norm_rope_cache_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    query_out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    eps,
    weight_offset,
    inverse_k_scale,
    inverse_v_scale,
    qkv_stride,
    query_out_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, DIM_PADDED // 2)
    pair_mask = pair < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + pair, mask=pair_mask, other=0.0)
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + pair, mask=pair_mask, other=0.0)
    row_ptr = qkv_ptr + token * qkv_stride

    member = tl.arange(0, GROUP_PADDED)[:, None]
    query_mask = (member < GROUP) & pair_mask[None, :]
    query_offset = (kv_head * GROUP + member) * HEAD_DIM + pair[None, :]
    q1 = tl.load(row_ptr + query_offset, mask=query_mask, other=0.0).to(tl.float32)
    q2 = tl.load(row_ptr + query_offset + HALF, mask=query_mask, other=0.0).to(tl.float32)
    key_offset = (NUM_HEADS + kv_head) * HEAD_DIM + pair
    k1 = tl.load(row_ptr + key_offset, mask=pair_mask, other=0.0).to(tl.float32)
    k2 = tl.load(row_ptr + key_offset + HALF, mask=pair_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        q_factor = tl.rsqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / HEAD_DIM + eps)[:, None]
        q1 *= q_factor * _load_weight(query_weight_ptr, pair, pair_mask, weight_offset)[None, :]
        q2 *= q_factor * _load_weight(query_weight_ptr + HALF, pair, pair_mask, weight_offset)[None, :]
        k_factor = tl.rsqrt((tl.sum(k1 * k1, 0) + tl.sum(k2 * k2, 0)) / HEAD_DIM + eps)
        k1 *= k_factor * _load_weight(key_weight_ptr, pair, pair_mask, weight_offset)
        k2 *= k_factor * _load_weight(key_weight_ptr + HALF, pair, pair_mask, weight_offset)
    out_ptr = query_out_ptr + token * query_out_stride + query_offset
    tl.store(out_ptr, (q1 * cos[None, :] - q2 * sin[None, :]).to(query_out_ptr.dtype.element_ty), mask=query_mask)
    tl.store(out_ptr + HALF, (q2 * cos[None, :] + q1 * sin[None, :]).to(query_out_ptr.dtype.element_ty), mask=query_mask)

    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # padding
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_base = block * k_block_stride + offset * k_slot_stride + kv_head * k_head_stride
    store_cache_row(key_cache_ptr, k_base + pair, k1 * cos - k2 * sin, inverse_k_scale, pair_mask, IS_FP8)
    store_cache_row(key_cache_ptr, k_base + HALF + pair, k2 * cos + k1 * sin, inverse_k_scale, pair_mask, IS_FP8)
    dim = tl.arange(0, DIM_PADDED)
    dim_mask = dim < HEAD_DIM
    value_offset = (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim
    value = tl.load(row_ptr + value_offset, mask=dim_mask, other=0.0).to(tl.float32)
    v_base = block * v_block_stride + offset * v_slot_stride + kv_head * v_head_stride
    store_cache_row(value_cache_ptr, v_base + dim, value, inverse_v_scale, dim_mask, IS_FP8)


def qk_norm_rope_cache_ref(
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 x num_kv_heads) x head_dim], last dimension dense
    *,
    num_heads: int,
    positions: torch.Tensor,  # [num_tokens] int64
    cos_sin_cache: torch.Tensor,  # [max_position, head_dim] float32, contiguous
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides but a dense last dimension
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64; negative: the key and value are not written
    query_weight: torch.Tensor | None = None,  # [head_dim]: RMSNorm of every query head before rotation; None: no QK-norm
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, store keys and values in the cache, return queries [num_tokens, num_heads, head_dim].

    Everything is computed in float32 and rounded once, so results are closer to float64 than those of the separate ops.
    The arguments mean what they do in `rms_norm`, `apply_rope` and `reshape_and_cache`.
    Raises ValueError if a cache has another layout, or if the rotation does not cover whole heads.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    query, key, value = qkv.reshape(qkv.shape[0], -1, head_dim).to(dtype).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if query_weight is not None and key_weight is not None:
        query = rms_norm_ref(query, query_weight, eps=eps, weight_offset=weight_offset)
        key = rms_norm_ref(key, key_weight, eps=eps, weight_offset=weight_offset)
    cos_sin = cos_sin_cache[positions]
    reshape_and_cache_ref(
        rotate_ref(key, cos_sin),
        value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return rotate_ref(query, cos_sin).to(qkv.dtype)


def qk_norm_rope_cache_triton(
    qkv: torch.Tensor,
    *,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Launch the kernel of `qk_norm_rope_cache`; the arguments are those of `qk_norm_rope_cache`."""
    check_cache(key_cache, value_cache)
    num_tokens = qkv.shape[0]
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    if cos_sin_cache.shape[1] != head_dim:
        raise ValueError(f"cos_sin_cache must rotate whole heads of {head_dim}, got {cos_sin_cache.shape[1]} dimensions; use apply_rope")
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    group = num_heads // num_kv_heads
    has_norm = query_weight is not None and key_weight is not None
    _qk_norm_rope_cache_kernel[(num_tokens, num_kv_heads)](
        qkv,
        query_weight if has_norm else qkv,
        key_weight if has_norm else qkv,
        positions,
        cos_sin_cache,
        slot_mapping,
        query,
        key_cache,
        value_cache,
        eps,
        weight_offset,
        1.0 / k_scale,
        1.0 / v_scale,
        qkv.stride(0),
        query.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=next_power_of_2(group),
        HEAD_DIM=head_dim,
        DIM_PADDED=next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        HAS_NORM=has_norm,
        IS_FP8=key_cache.dtype == torch.float8_e4m3fn,
        num_warps=1 if group * head_dim <= 512 else 4,
    )
    return query


qk_norm_rope_cache = dispatcher(triton=qk_norm_rope_cache_triton, reference=qk_norm_rope_cache_ref)
