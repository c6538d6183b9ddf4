"""The reference backend against a dense float64 attention that knows nothing of pages."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from aioengine.attention.base import AttentionBatch, AttentionConfig
from aioengine.attention.torch_paged import TorchPagedBackend, lazy_zeros

CPU = torch.device("cpu")
BASE = AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=16, block_size=16, dtype=torch.float32, kv_cache_dtype=torch.float32)


def make_batch(query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block_size: int) -> AttentionBatch:
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens_np = np.asarray(seq_lens, dtype=np.int32)
    block_table = np.full((len(tables), max(map(len, tables))), 999_999, dtype=np.int32)  # undefined entries must not be read
    slots: list[int] = []
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = table
        slots += [table[p // block_size] * block_size + p % block_size for p in range(seq_lens[i] - query_lens[i], seq_lens[i])]
    return AttentionBatch(
        num_reqs=len(tables),
        num_tokens=int(query_start_loc[-1]),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc=torch.from_numpy(query_start_loc),
        query_start_loc_np=query_start_loc,
        seq_lens=torch.from_numpy(seq_lens_np),
        seq_lens_np=seq_lens_np,
        block_table=torch.from_numpy(block_table),
        slot_mapping=torch.tensor(slots),
    )


def dense_reference(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor,  # [seq_len, num_kv_heads, head_dim]
    *,
    config: AttentionConfig,
    window: int | None = None,
    scale: float,
) -> torch.Tensor:
    group = config.num_heads // config.num_kv_heads
    output = torch.zeros_like(query, dtype=torch.float64)
    for i in range(len(query)):
        position = len(keys) - len(query) + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(config.num_heads):
            scores = (keys[first : position + 1, head // group].double() @ query[i, head].double()) * scale
            if config.logits_soft_cap is not None:
                scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
            output[i, head] = scores.softmax(0) @ values[first : position + 1, head // group].double()
    return output


@dataclass
class Case:
    """Requests with some tokens in the cache and some new ones, on scattered blocks; all other slots hold NaN."""

    config: AttentionConfig
    query_lens: list[int]
    seq_lens: list[int]
    contiguous: bool = False
    window: int | None = None
    poison: bool = True

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        config, block_size = self.config, self.config.block_size
        generator = torch.Generator().manual_seed(1)
        num_blocks = [-(-n // block_size) for n in self.seq_lens]
        ids = torch.arange(sum(num_blocks)) + 1
        if not self.contiguous:
            ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
        tables = [part.tolist() for part in ids.split(num_blocks)]

        def rand(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(config.dtype)

        backend = TorchPagedBackend(config)
        kv_cache = backend.allocate_kv_cache(len(ids) + 2, CPU)
        if self.poison:
            kv_cache.fill_(math.nan)
        scale = config.head_dim**-0.5
        queries, new_keys, new_values, expected = [], [], [], []
        for query_len, seq_len, table in zip(self.query_lens, self.seq_lens, tables, strict=True):
            query = rand(query_len, config.num_heads, config.head_dim) * 3
            keys, values = rand(seq_len, config.num_kv_heads, config.head_dim), rand(seq_len, config.num_kv_heads, config.head_dim)
            for p in range(seq_len - query_len):
                kv_cache[0, table[p // block_size], p % block_size] = keys[p]
                kv_cache[1, table[p // block_size], p % block_size] = values[p]
            queries.append(query)
            new_keys.append(keys[seq_len - query_len :])
            new_values.append(values[seq_len - query_len :])
            expected.append(dense_reference(query, keys, values, config=config, window=self.window, scale=scale))
        batch = replace(make_batch(self.query_lens, self.seq_lens, tables, block_size), sliding_window=self.window)
        metadata = backend.build_metadata(batch)
        output = backend.forward(
            torch.cat(queries), torch.cat(new_keys), torch.cat(new_values), kv_cache=kv_cache, metadata=metadata, scale=scale
        )
        return output, torch.cat(expected)


RAGGED_QUERIES = [1, 5, 16, 1, 17, 1, 33, 2]
RAGGED_SEQ_LENS = [1, 5, 16, 17, 32, 48, 40, 34]  # alone, at a block's edge, past it, with and without a context


@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (4, 1)], ids=["gqa", "mha", "mqa"])
def test_ragged_batch(num_heads: int, num_kv_heads: int, block_size: int, contiguous: bool) -> None:
    config = replace(BASE, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size)
    output, expected = Case(config, RAGGED_QUERIES, RAGGED_SEQ_LENS, contiguous=contiguous).run()
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 2.0], ids=["plain", "soft_cap"])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40, 1000])
@pytest.mark.parametrize("block_size", [4, 16])
def test_window_and_soft_cap(block_size: int, window: int | None, soft_cap: float | None) -> None:
    config = replace(BASE, block_size=block_size, logits_soft_cap=soft_cap)
    output, expected = Case(config, RAGGED_QUERIES, RAGGED_SEQ_LENS, window=window).run()
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 5.0], ids=["plain", "soft_cap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    config = replace(BASE, dtype=dtype, kv_cache_dtype=dtype, logits_soft_cap=soft_cap)
    output, expected = Case(config, RAGGED_QUERIES, RAGGED_SEQ_LENS).run()
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, atol=3e-2, rtol=3e-2)


def test_cache_of_another_dtype_than_the_model() -> None:
    config = replace(BASE, kv_cache_dtype=torch.float16)
    output, expected = Case(config, RAGGED_QUERIES, RAGGED_SEQ_LENS).run()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=5e-3, rtol=5e-3)


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    alone, _ = Case(BASE, [1, 5], [40, 21]).run()
    batched, _ = Case(BASE, [1, 5, *RAGGED_QUERIES], [40, 21, *RAGGED_SEQ_LENS]).run()
    assert torch.equal(alone, batched[:6])


def test_requests_of_one_step_may_share_blocks_that_this_step_fills() -> None:
    """The second request hit the first one's prefix in the prefix cache before its keys were written."""
    config = replace(BASE, block_size=4)
    backend = TorchPagedBackend(config)
    kv_cache = backend.allocate_kv_cache(5, CPU).fill_(math.nan)
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(8, 3, 16, generator=generator) for _ in range(2))
    query = torch.randn(10, 9, 16, generator=generator)
    # Request 0 computes positions 0..7 in blocks 1 and 2; request 1 shares block 1 and computes 4..5 in block 3.
    batch = make_batch([8, 2], [8, 6], [[1, 2], [1, 3]], 4)
    output = backend.forward(
        query,
        torch.cat([keys, keys[4:6]]),
        torch.cat([values, values[4:6]]),
        kv_cache=kv_cache,
        metadata=backend.build_metadata(batch),
        scale=0.25,
    )
    expected = torch.cat(
        [
            dense_reference(query[:8], keys, values, config=config, scale=0.25),
            dense_reference(query[8:], keys[:6], values[:6], config=config, scale=0.25),
        ]
    )
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)


def test_zero_blocks_clears_these_blocks_only() -> None:
    backend = TorchPagedBackend(BASE)
    kv_cache = backend.allocate_kv_cache(4, CPU).fill_(1.0)
    backend.zero_blocks(kv_cache, [1, 3])
    assert kv_cache[:, [1, 3]].abs().max() == 0
    assert kv_cache[:, [0, 2]].min() == 1


def test_cache_shape_and_size() -> None:
    backend = TorchPagedBackend(BASE)
    kv_cache = backend.allocate_kv_cache(7, CPU)
    assert kv_cache.shape == (2, 7, 16, 3, 16)
    assert kv_cache.dtype == torch.float32
    assert not kv_cache.any()
    assert backend.kv_cache_bytes_per_block() * 7 == kv_cache.nbytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazy_zeros_are_aligned_writable_and_cheap(dtype: torch.dtype) -> None:
    def resident_bytes() -> int:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    zeros = lazy_zeros((64, 1 << 20), dtype=dtype, device=CPU)
    assert resident_bytes() - before < zeros.nbytes / 4, "the pages were written"
    assert zeros.data_ptr() % 64 == 0
    zeros[3, :5] = 1
    assert zeros[3].sum() == 5


def test_supports_names_what_does_not_fit() -> None:
    assert TorchPagedBackend.supports(BASE, CPU) is None
    reason = TorchPagedBackend.supports(replace(BASE, num_heads=10), CPU)
    assert reason is not None
    assert "10" in reason
    assert "3" in reason
    assert TorchPagedBackend.supports(replace(BASE, kv_cache_dtype=torch.int8), CPU) is not None
