from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aioengine_kernels.flash_decoding import DecodeSplit, reduce_segments, reduce_segments_ref
from aioengine_kernels.paged_attention import paged_attention, paged_attention_ref, paged_attention_triton
from aioengine_kernels.reshape_and_cache import reshape_and_cache_triton, to_cache_dtype

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
INVALID_BLOCK = 10**6

# (query tokens, cached positions before them): a batch with decodes, whole prompts, chunks, block and tile boundaries.
MIXED = [(1, 127), (7, 0), (1, 0), (33, 15), (0, 20), (5, 16), (1, 31), (16, 47)]
DECODES = [(1, 127), (1, 0), (1, 15), (1, 16), (1, 31), (1, 300)]


class Batch:
    """A ragged batch over a shuffled cache: NaN in every slot no request owns, invalid ids in unused block-table entries."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        *,
        heads: tuple[int, int] = (9, 3),
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = heads
        query_lens = [query for query, _ in requests]
        seq_lens = [query + context for query, context in requests]
        needed = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=generator).int()
        self.block_table = torch.full((len(requests), max(needed) + 1), INVALID_BLOCK, dtype=torch.int32)
        cache = torch.randn(num_blocks, 2, block_size, num_kv_heads, head_dim, generator=generator)
        owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
        used = 0
        for i, count in enumerate(needed):
            self.block_table[i, :count] = order[used : used + count]
            positions = torch.arange(seq_lens[i])
            owned[self.block_table[i, positions // block_size].long(), positions % block_size] = True
            used += count
        cache.transpose(1, 2)[~owned] = float("nan")
        stored = to_cache_dtype(cache, cache_dtype or dtype, 1.0)
        self.key_cache, self.value_cache = stored[:, 0], stored[:, 1]
        self.query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
        self.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.max_query_len, self.max_seq_len = max(query_lens), max(seq_lens)
        self.scale = head_dim**-0.5
        self.scales = scales

    def check(
        self,
        *,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        num_decodes: int | None = None,
        split: DecodeSplit | None = None,
        num_segments: int | None = None,
        tolerance: float | None = None,
    ) -> None:
        """The kernel's output is near float64 attention, and no NaN is left of a NaN-filled output."""
        out = torch.full_like(self.query, float("nan"))
        common: dict[str, Any] = {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "scale": self.scale,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "k_scale": self.scales[0],
            "v_scale": self.scales[1],
        }
        paged_attention_triton(
            self.query,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            out=out,
            num_decodes=num_decodes,
            split=split,
            num_segments=num_segments,
            **common,
        )
        expected = paged_attention_ref(
            self.query.double(),
            key_cache=self.key_cache.float().double(),
            value_cache=self.value_cache.float().double(),
            **common,
        )
        error = (out.double() - expected).abs().max().item()
        assert error < (tolerance or TOLERANCES[self.query.dtype])


def cut(batch: Batch, segment_len: int, *, num_decodes: int | None = None, is_split: bool = True) -> DecodeSplit:
    """Segments shorter than serving would choose, so that small sequences have many."""
    lengths = batch.seq_lens[:num_decodes].tolist()
    split = DecodeSplit.of_lengths(lengths, num_kv_heads=1, device=torch.device("cpu"))
    num_segments = len(lengths) + sum(lengths) // segment_len
    return replace(split, segment_len=torch.tensor([segment_len], dtype=torch.int32), num_segments=num_segments, is_split=is_split)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_mixed_batch_matches_float64(dtype: torch.dtype) -> None:
    Batch(MIXED, dtype=dtype).check()


@pytest.mark.parametrize(
    ("window", "cap"), [(24, None), (None, 20.0), (1, None), (24, 30.0)], ids=["window", "cap", "own position only", "both"]
)
def test_window_and_soft_cap(window: int | None, cap: float | None) -> None:
    Batch(MIXED).check(sliding_window=window, logits_soft_cap=cap)


@pytest.mark.parametrize("window", [1, 24, 50])
def test_nothing_is_read_behind_the_window(window: int) -> None:
    """The blocks there may be others' by now; here they are none at all, and to read one is an error."""
    batch = Batch(MIXED)
    num_gone = 0
    for i, (_, context) in enumerate(MIXED):
        behind = max(0, context - window + 1) // 16
        batch.block_table[i, :behind] = INVALID_BLOCK
        num_gone += behind
    assert num_gone > 0
    batch.check(sliding_window=window)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (32, 1), (6, 2)], ids=["MHA", "MQA", "MQA of 32", "GQA of 3"])
def test_head_groups(heads: tuple[int, int]) -> None:
    Batch([(3, 20), (1, 40), (2, 0)], heads=heads).check()


@pytest.mark.parametrize("head_dim", [32, 80, 96, 256])
def test_head_dims(head_dim: int) -> None:
    Batch([(3, 20), (1, 40)], heads=(2, 1), head_dim=head_dim).check()


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
def test_block_sizes(block_size: int) -> None:
    contexts = [block_size - 1, block_size, block_size + 1]
    Batch([(1, context) for context in contexts] + [(3, 0)], heads=(2, 1), head_dim=32, block_size=block_size).check()


@pytest.mark.parametrize("segment_len", [16, 40, 96])
def test_split_decodes(segment_len: int) -> None:
    """Sequences of one segment and of many in one launch, and the grid of a captured graph, which is larger than it need be."""
    batch = Batch(DECODES)
    batch.check(split=cut(batch, segment_len))
    split = cut(batch, segment_len)
    batch.check(split=replace(split, num_segments=split.num_segments + 40))


def test_split_decodes_with_window_and_cap() -> None:
    batch = Batch([(1, 127), (1, 40), (1, 10), (1, 300)], dtype=torch.bfloat16)
    batch.check(sliding_window=24, logits_soft_cap=30.0, split=cut(batch, 32))


@pytest.mark.parametrize("num_segments", [2, 8])
def test_split_chunks(num_segments: int) -> None:
    """Also where most segments are empty, as for a prompt of one token."""
    Batch([(2, 127), (3, 0), (1, 40), (4, 60)], heads=(4, 2)).check(num_decodes=0, num_segments=num_segments)
    Batch([(3, 127), (3, 0)], dtype=torch.bfloat16).check(num_segments=num_segments, sliding_window=24, logits_soft_cap=30.0)


@pytest.mark.parametrize("num_segments", [1, 4])
def test_decodes_and_chunks_of_a_batch_in_two_launches(num_segments: int) -> None:
    batch = Batch([(1, 127), (1, 0), (1, 300), (7, 0), (33, 15), (1, 16), (16, 47)], heads=(4, 2))
    batch.check(num_decodes=3, split=cut(batch, 64, num_decodes=3), num_segments=num_segments)
    batch.check(num_decodes=2)
    batch.check(num_decodes=0)


def test_long_decodes_are_split_by_themselves() -> None:
    Batch([(1, 1030)], heads=(2, 1), head_dim=32).check()


def test_large_query_tiles() -> None:
    Batch([(140, 10), (1, 90)], heads=(4, 2), head_dim=32, dtype=torch.float16).check()


def test_fp8_cache() -> None:
    Batch([(1, 40), (5, 3)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, scales=(0.5, 0.25)).check()


def test_strided_query_and_padded_batch() -> None:
    """Queries that are a view of a fused projection; requests and tokens that only pad a captured graph."""
    batch = Batch([(1, 20), (2, 5)])
    fused = torch.randn(5, 15, 64)
    fused[:3, :9] = batch.query
    out = torch.full((5, 9, 64), float("nan"))
    paged_attention(
        fused[:, :9],
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=torch.cat((batch.block_table, torch.full((2, batch.block_table.shape[1]), INVALID_BLOCK, dtype=torch.int32))),
        seq_lens=torch.tensor([21, 7, 0, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 3, 3, 3], dtype=torch.int32),
        max_query_len=2,
        max_seq_len=21,
        scale=batch.scale,
        out=out,
    )
    expected = paged_attention_ref(
        batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        scale=batch.scale,
    )
    torch.testing.assert_close(out[:3], expected, atol=2e-5, rtol=0)
    assert out[3:].isnan().all()


@pytest.mark.parametrize("segment_len", [16, 256])
def test_the_padding_of_a_captured_decode_step(segment_len: int) -> None:
    """Two requests decode in a graph of four: the others have one query token over nothing, and a block table of any content."""
    batch = Batch([(1, 127), (1, 15)])
    batch.query = torch.cat((batch.query, torch.ones_like(batch.query)))
    batch.query_start_loc = torch.arange(5, dtype=torch.int32)
    batch.seq_lens = torch.tensor([128, 16, 0, 0], dtype=torch.int32)
    batch.block_table = torch.cat((batch.block_table, torch.full_like(batch.block_table, INVALID_BLOCK)))
    batch.check(split=cut(batch, segment_len))


def test_a_block_id_out_of_range_is_caught() -> None:
    batch = Batch([(1, 40)])
    batch.block_table[0, 1] = INVALID_BLOCK
    with pytest.raises(Exception, match="out of bounds"):
        batch.check()


def test_an_unmasked_slot_is_caught() -> None:
    """The poison works: a context one longer than what was written reads NaN."""
    batch = Batch([(1, 40)])
    batch.seq_lens += 1
    out = paged_attention(
        batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        max_query_len=1,
        max_seq_len=42,
        scale=batch.scale,
    )
    assert out.isnan().all()


def test_reduction_with_empty_segments() -> None:
    partial = torch.randn(4, 3, 2, 64)
    maxima, sums = torch.randn(4, 3, 2), torch.rand(4, 3, 2) + 0.5
    for empty in ((slice(1, 4), 0, 0), (slice(0, 3), 1, 1), (slice(None), 2, 0)):  # the last: a row with nothing to see
        partial[empty], maxima[empty], sums[empty] = 0.0, float("-inf"), 0.0
    out = torch.full((3, 2, 48), float("nan"))
    reduce_segments(partial, maxima, sums, out=out, v_scale=2.0)
    expected = reduce_segments_ref(partial.double(), maxima.double(), sums.double(), out=torch.empty(3, 2, 48).double(), v_scale=2.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert out[2, 0].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("num_segments", [1, 4])
def test_matrix(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, num_segments: int) -> None:
    batch = Batch([(1, 127), (1, 300), *MIXED], heads=heads, head_dim=head_dim, dtype=dtype)
    batch.check(sliding_window=40, num_decodes=2, split=cut(batch, 128 // num_segments, num_decodes=2), num_segments=num_segments)


@pytest.mark.slow
def test_addresses_past_two_to_the_31() -> None:
    """An fp8 cache of more than 2^31 elements (2.3 GB, of which little is touched): the last block is read where it lies."""
    block_elements = 2 * 16 * 1 * 64
    num_blocks = 2**31 // block_elements + 100
    cache = torch.empty(num_blocks, 2, 16, 1, 64, dtype=torch.float8_e4m3fn)
    key, value = torch.randn(16, 1, 64), torch.randn(16, 1, 64)
    slots = (num_blocks - 1) * 16 + torch.arange(16)
    reshape_and_cache_triton(key, value, key_cache=cache[:, 0], value_cache=cache[:, 1], slot_mapping=slots)
    assert torch.equal(cache[-1, 0].float(), key.to(torch.float8_e4m3fn).float())
    query = torch.randn(1, 2, 64)
    arguments: dict[str, Any] = {
        "key_cache": cache[:, 0],
        "value_cache": cache[:, 1],
        "block_table": torch.tensor([[num_blocks - 1]], dtype=torch.int32),
        "seq_lens": torch.tensor([16], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
        "scale": 0.125,
    }
    out = paged_attention_triton(query, max_query_len=1, max_seq_len=16, **arguments)
    torch.testing.assert_close(out, paged_attention_ref(query, **arguments), atol=2e-5, rtol=0)
