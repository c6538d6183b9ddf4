"""Blocks leave the caches as bytes and come back, in every backend's layout and dtype."""

from __future__ import annotations

import pytest
import torch

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.attention.triton_paged import TritonPagedBackend
from aioengine.worker.kv_blocks import block_bytes, read_blocks, write_blocks

CPU = torch.device("cpu")
CASES = [
    (TorchPagedBackend, torch.float32),
    (TorchPagedBackend, torch.bfloat16),
    (TritonPagedBackend, torch.float16),
    (TritonPagedBackend, torch.float8_e4m3fn),
    (CpuPagedBackend, torch.float32),
    (CpuPagedBackend, torch.float16),
    (CpuPagedBackend, torch.int8),
]


@pytest.mark.parametrize(("backend_class", "dtype"), CASES)
def test_blocks_come_back_as_they_were_and_others_stay(backend_class: type[AttentionBackend], dtype: torch.dtype) -> None:
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, kv_cache_dtype=dtype)
    backend = backend_class(config)
    caches = [backend.allocate_kv_cache(9, CPU) for _ in range(3)]
    for cache in caches:
        cache.view(torch.uint8).random_(0, 100)
    blocks = [backend.by_block(cache) for cache in caches]
    assert block_bytes(blocks) == 3 * backend.kv_cache_bytes_per_block()
    before = [cache.clone() for cache in caches]
    content = read_blocks(blocks, [7, 2, 3])
    write_blocks(blocks, [1, 4, 8], content)
    for cache, old in zip(blocks, map(backend.by_block, before), strict=True):
        cache, old = cache.view(torch.uint8), old.view(torch.uint8)  # random bytes are no numbers that compare
        assert torch.equal(cache[[1, 4, 8]], old[[7, 2, 3]])
        assert torch.equal(cache[[0, 2, 3, 5, 6, 7]], old[[0, 2, 3, 5, 6, 7]])


def test_content_of_another_shape_is_refused() -> None:
    blocks = [torch.zeros(4, 8)]
    with pytest.raises(ValueError, match=r"shape \[2, 31\], the cache takes \[2, 32\]"):
        write_blocks(blocks, [1, 2], torch.zeros(2, 31, dtype=torch.uint8))
