"""Write this step's keys and values into the paged cache."""

from __future__ import annotations

from typing import Final

import torch

from aioengine_kernels._triton import dispatcher, jit, next_power_of_2, tl

FP8_MAX: Final = 448.0
"""The largest finite float8_e4m3fn; larger magnitudes are clamped to it, where a plain cast gives NaN."""


@jit
def store_cache_row(cache_ptr, offsets, values, inverse_scale, mask, IS_FP8: tl.constexpr):
    """Convert float32 `values` to the cache's dtype, dividing by the scale and clamping for fp8, and store them."""
    if IS_FP8:
        values = tl.minimum(tl.maximum(values * inverse_scale, -448.0), 448.0)
    tl.store(cache_ptr + offsets, values.to(cache_ptr.dtype.element_ty), mask=mask)


@jit
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    inverse_k_scale,
    inverse_v_scale,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # padding
        return
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    mask = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    key = tl.load(key_ptr + token * key_stride + head * key_head_stride + dim, mask=mask).to(tl.float32)
    k_offsets = block * k_block_stride + offset * k_slot_stride + head * k_head_stride + dim
    store_cache_row(key_cache_ptr, k_offsets, key, inverse_k_scale, mask, IS_FP8)
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + dim, mask=mask).to(tl.float32)
    v_offsets = block * v_block_stride + offset * v_slot_stride + head * v_head_stride + dim
    store_cache_row(value_cache_ptr, v_offsets, value, inverse_v_scale, mask, IS_FP8)


def to_cache_dtype(values: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """`values` as the cache stores them: divided by `scale` and clamped for float8_e4m3fn, else only cast."""
    if dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    return (values.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def reshape_and_cache_ref(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension dense
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], last dimension dense
    *,
    key_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], any strides but a dense last dimension
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block_id * block_size + offset; negative: not written
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store key and value rows in their slots, converted to the cache's dtype.

    A float8_e4m3fn cache holds value / scale, clamped to +-448; reading it multiplies by the scale. Other dtypes ignore scales.
    Two tokens of one step never share a slot. Triton writes float8_e4m3fn on compute capability 8.9 and later.
    Raises ValueError if a cache does not have that layout.
    """
    block_size = key_cache.shape[1]
    tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots = slot_mapping[tokens]
    for cache, rows, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        stored = to_cache_dtype(rows[tokens], cache.dtype, scale)
        if cache.dtype == torch.float8_e4m3fn:  # torch indexes bytes, not fp8
            cache.view(torch.uint8)[slots // block_size, slots % block_size] = stored.view(torch.uint8)
        else:
            cache[slots // block_size, slots % block_size] = stored


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raise ValueError unless both caches are [num_blocks, block_size, num_kv_heads, head_dim] views with dense rows."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.stride(3) != 1:
            shape, strides = tuple(cache.shape), cache.stride()
            raise ValueError(f"{name} must have 4 dimensions and a dense last one, got shape {shape}, strides {strides}")
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"key_cache and value_cache differ: {tuple(key_cache.shape)} {key_cache.dtype}, {tuple(value_cache.shape)} {value_cache.dtype}"
        )


def reshape_and_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Launch the kernel of `reshape_and_cache`; the arguments are those of `reshape_and_cache`."""
    check_cache(key_cache, value_cache)
    if slot_mapping.shape[0] == 0:
        return
    _, num_kv_heads, head_dim = key.shape
    _reshape_and_cache_kernel[(slot_mapping.shape[0],)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        1.0 / k_scale,
        1.0 / v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS_PADDED=next_power_of_2(num_kv_heads),
        DIM_PADDED=next_power_of_2(head_dim),
        IS_FP8=key_cache.dtype == torch.float8_e4m3fn,
        num_warps=4 if num_kv_heads * head_dim > 256 else 1,
    )


reshape_and_cache = dispatcher(triton=reshape_and_cache_triton, reference=reshape_and_cache_ref)
