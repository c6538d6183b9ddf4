from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioengine_kernels.activation import gelu_mul, gelu_mul_ref, silu_mul, silu_mul_ref
from aioengine_kernels.qk_norm_rope_cache import qk_norm_rope_cache, qk_norm_rope_cache_ref
from aioengine_kernels.rms_norm import rms_norm, rms_norm_ref
from aioengine_kernels.rope import apply_rope, apply_rope_ref, build_cos_sin_cache, inverse_frequencies

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(out.double(), expected.double(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("hidden_size", [576, 100])
def test_rms_norm(dtype: torch.dtype, hidden_size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 2 * hidden_size).to(dtype)[:, :hidden_size], torch.randn(hidden_size).to(dtype)
    near(rms_norm(x, weight, eps=1e-5), rms_norm_ref(x.double(), weight.double(), eps=1e-5), dtype)
    offset = rms_norm_ref(x.double(), weight.double(), eps=1e-5, weight_offset=1.0)
    near(rms_norm(x, weight, eps=1e-5, weight_offset=1.0), offset, dtype)


@dtypes
def test_rms_norm_adds_the_residual_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 576).to(dtype), torch.randn(3, 576).to(dtype), torch.randn(576).to(dtype)
    expected_residual = residual.double()
    expected = rms_norm_ref(x.double(), weight.double(), eps=1e-5, residual=expected_residual)
    near(rms_norm(x, weight, eps=1e-5, residual=residual), expected, dtype)
    assert torch.equal(residual, expected_residual.to(dtype))


@dtypes
@pytest.mark.parametrize(("op", "reference"), [(silu_mul, silu_mul_ref), (gelu_mul, gelu_mul_ref)])
def test_gated_activations(
    dtype: torch.dtype, op: Callable[[torch.Tensor], torch.Tensor], reference: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 2 * 1100) * 4).to(dtype)
    near(op(x), reference(x.double()), dtype)


@dtypes
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (64, 32)])
def test_rope(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(0)
    cache = build_cos_sin_cache(inverse_frequencies(rotary_dim, theta=1e4), max_position=40)
    positions = torch.tensor([0, 3, 7, 39, 2])
    fused = torch.randn(5, 12, head_dim).to(dtype)
    query, key = fused[:, :9], fused[:, 9:]
    expected_query, expected_key = query.double(), key.double()
    apply_rope_ref(expected_query, expected_key, positions=positions, cos_sin_cache=cache)
    apply_rope(query, key, positions=positions, cos_sin_cache=cache)
    near(query, expected_query, dtype)
    near(key, expected_key, dtype)


def test_a_position_past_the_cache_is_caught() -> None:
    cache = build_cos_sin_cache(inverse_frequencies(64, theta=1e4), max_position=8)
    with pytest.raises(Exception, match="out of bounds"):
        apply_rope(torch.zeros(1, 2, 64), torch.zeros(1, 1, 64), positions=torch.tensor([100_000]), cos_sin_cache=cache)


@dtypes
@pytest.mark.parametrize(
    ("heads", "head_dim", "norm"), [((9, 3), 64, False), ((4, 2), 128, True), ((3, 3), 96, True), ((8, 1), 80, True)], ids=str
)
def test_qk_norm_rope_cache(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, norm: bool) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    weights = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if norm else (None, None)
    arguments: dict[str, Any] = {
        "num_heads": num_heads,
        "positions": torch.tensor([0, 5, 17, 3, 9]),
        "cos_sin_cache": build_cos_sin_cache(inverse_frequencies(head_dim, theta=1e4), max_position=20),
        "slot_mapping": torch.tensor([33, 0, -1, 17, 47]),
    }
    cache, expected_cache = torch.zeros(3, 2, 16, num_kv_heads, head_dim).to(dtype), torch.zeros(3, 2, 16, num_kv_heads, head_dim).double()
    query = qk_norm_rope_cache(
        qkv, key_cache=cache[:, 0], value_cache=cache[:, 1], query_weight=weights[0], key_weight=weights[1], **arguments
    )
    expected = qk_norm_rope_cache_ref(
        qkv.double(),
        key_cache=expected_cache[:, 0],
        value_cache=expected_cache[:, 1],
        query_weight=None if weights[0] is None else weights[0].double(),
        key_weight=None if weights[1] is None else weights[1].double(),
        **arguments,
    )
    near(query, expected, dtype)
    near(cache, expected_cache, dtype)
    assert cache.ne(0).any(-1).sum() == 4 * 2 * num_kv_heads


def test_qk_norm_rope_cache_writes_fp8() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(4, 5 * 64).bfloat16() * 50
    caches = []
    for op in (qk_norm_rope_cache, qk_norm_rope_cache_ref):
        cache = torch.zeros(2, 2, 16, 1, 64).to(torch.float8_e4m3fn)
        op(
            qkv,
            num_heads=3,
            positions=torch.arange(4),
            cos_sin_cache=build_cos_sin_cache(inverse_frequencies(64, theta=1e4), max_position=4),
            key_cache=cache[:, 0],
            value_cache=cache[:, 1],
            slot_mapping=torch.arange(4),
            k_scale=0.5,
            v_scale=2.0,
        )
        caches.append(cache.float())
    torch.testing.assert_close(caches[0], caches[1], atol=0, rtol=0.07)  # a rounding apart: one step of 3 mantissa bits
    assert (caches[0] != caches[1]).float().mean() < 0.01
