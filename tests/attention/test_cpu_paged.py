"""The native backend's own part: layout, and which op gets what. Its kernels are tested in tests/kernels/cpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.attention.base import AttentionBatch, AttentionConfig, RotationInputs
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.layers.rope import RopeConfig, RotaryEmbedding
from aioengine_kernels.cpu import status

CPU = torch.device("cpu")
CONFIG = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, kv_cache_dtype=torch.float32)
needs_library = pytest.mark.skipif(status() is not None, reason=str(status()))


def make_batch() -> AttentionBatch:
    """A decode at position 19, a whole prompt of 5, a chunk of 3 after 30."""
    query_start_loc, seq_lens = np.array([0, 1, 6, 9], dtype=np.int32), np.array([20, 5, 33], dtype=np.int32)
    table = torch.tensor([[7, 3, 2**30], [2, 2**30, 2**30], [1, 8, 4]], dtype=torch.int32)
    slots = [3 * 16 + 3, 32, 33, 34, 35, 36, 8 * 16 + 14, 8 * 16 + 15, 4 * 16]
    return AttentionBatch(
        num_reqs=3,
        num_tokens=9,
        max_query_len=5,
        max_seq_len=33,
        query_start_loc=torch.from_numpy(query_start_loc),
        query_start_loc_np=query_start_loc,
        seq_lens=torch.from_numpy(seq_lens),
        seq_lens_np=seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(slots),
    )


def fill(backend: Any, cache: torch.Tensor, randn: torch.Generator) -> None:
    """Keys and values in every slot of blocks 0..8, by steps of one request that owns them all."""
    slots = torch.arange(9 * 16)
    key, value = (torch.randn(len(slots), 2, 16, generator=randn) for _ in range(2))
    lens = np.array([len(slots)], dtype=np.int32)
    starts = np.array([0, len(slots)], dtype=np.int32)
    table = torch.arange(9, dtype=torch.int32)[None]
    batch = AttentionBatch(
        1, len(slots), len(slots), len(slots), torch.from_numpy(starts), starts, torch.from_numpy(lens), lens, table, slots
    )
    backend.forward(torch.zeros(len(slots), 6, 16), key, value, kv_cache=cache, metadata=backend.build_metadata(batch), scale=1.0)


@needs_library
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.int8, 3e-2)])
def test_equals_the_reference_backend(window: int | None, cap: float | None, dtype: torch.dtype, tolerance: float) -> None:
    config = replace(CONFIG, logits_soft_cap=cap)
    results = []
    backends: list[Any] = [TorchPagedBackend(config), CpuPagedBackend(replace(config, kv_cache_dtype=dtype))]
    for backend in backends:
        randn = torch.Generator().manual_seed(0)
        cache = backend.allocate_kv_cache(9, CPU)
        fill(backend, cache, randn)
        query, key, value = (torch.randn(9, heads, 16, generator=randn) for heads in (6, 2, 2))
        metadata = backend.build_metadata(replace(make_batch(), sliding_window=window))
        results.append(backend.forward(query, key, value, kv_cache=cache, metadata=metadata, scale=0.3))
    assert torch.allclose(results[0], results[1], rtol=0, atol=tolerance)


@needs_library
def test_rotates_by_itself() -> None:
    backend = CpuPagedBackend(CONFIG)
    rotary = RotaryEmbedding(RopeConfig(theta=1e4), head_dim=16, max_positions=64, device=CPU)
    positions = torch.tensor([19, 0, 1, 2, 3, 4, 30, 31, 32])
    qkv = torch.randn(9, 10 * 16, generator=torch.Generator().manual_seed(1))
    caches = [backend.allocate_kv_cache(9, CPU) for _ in range(2)]
    for cache in caches:
        fill(backend, cache, torch.Generator().manual_seed(0))
    query, key, value = qkv.view(9, 10, 16).clone().split_with_sizes((6, 2, 2), dim=1)
    rotation = rotary.gather(positions, torch.float32)
    batch = backend.build_metadata(make_batch())
    want = backend.forward(rotation.apply(query), rotation.apply(key), value, kv_cache=caches[0], metadata=batch, scale=0.25)
    inputs = RotationInputs(positions, rotary.table)
    got = backend.forward_qkv(qkv, rotation=inputs, kv_cache=caches[1], metadata=batch, scale=0.25)
    assert torch.equal(got, want)
    assert torch.equal(*caches)


@needs_library
def test_memory_and_zeroing() -> None:
    for dtype in (torch.float32, torch.float16, torch.int8):
        backend = CpuPagedBackend(replace(CONFIG, kv_cache_dtype=dtype))
        cache = backend.allocate_kv_cache(5, CPU)
        assert cache.nbytes == 5 * backend.kv_cache_bytes_per_block()
        cache.fill_(1)
        backend.zero_blocks(cache, [1, 3])
        assert cache.flatten(1).amax(1).tolist() == [1, 0, 1, 0, 1]


def test_says_what_it_cannot_do() -> None:
    def reason(device: str = "cpu", **changes: Any) -> str:
        return str(CpuPagedBackend.supports(replace(CONFIG, **changes), torch.device(device)))

    assert "cuda" in reason("cuda")
    assert "float32" in reason(dtype=torch.bfloat16)
    assert "block_size (8)" in reason(block_size=8)
    assert "head_dim (24)" in reason(head_dim=24)
    assert "bfloat16" in reason(kv_cache_dtype=torch.bfloat16)
    assert CpuPagedBackend.supports(CONFIG, CPU) == status()
