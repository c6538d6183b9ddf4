"""Paged attention, and the write of keys and values that goes before it, against a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from aioengine_kernels.cpu import CpuKernels, KvCacheFormat

Randn = Callable[..., torch.Tensor]
# Of a cache: its dtype, whether it is multiplied in bfloat16 (where the CPU can), and how far a result may be from float64.
KINDS = {
    "float32": (torch.float32, False, 2e-6),
    "float16": (torch.float16, False, 1e-3),
    "bfloat16": (torch.float16, True, 1e-2),
    "int8": (torch.int8, False, 2e-2),
}


@dataclass
class Batch:
    """Keys and values of every position, a poisoned cache, and tables of shuffled blocks."""

    kind: str
    num_heads: int
    format: KvCacheFormat
    query: list[torch.Tensor]  # [query_len, num_heads, head_dim] a request
    key: list[torch.Tensor]  # [context, num_kv_heads, head_dim]
    value: list[torch.Tensor]
    table: torch.Tensor
    cache: torch.Tensor

    def slots(self, request: int, first: int, last: int) -> torch.Tensor:
        position, size = torch.arange(first, last), self.format.block_size
        return self.table[request, position // size].long() * size + position % size

    def write(self, kernels: CpuKernels) -> None:
        for i, key in enumerate(self.key):
            none = torch.empty(len(key), self.num_heads, self.format.head_dim)
            slots = self.slots(i, 0, len(key))
            kernels.rope_and_cache(none, key.clone(), self.value[i], kv_cache=self.cache, cache_format=self.format, slots=slots)

    def attend(self, kernels: CpuKernels, requests: list[int], lens: list[int] | None = None, **options: Any) -> list[torch.Tensor]:
        """The last lens[i] query rows of each request (all by default), as one batch."""
        lens = lens or [len(self.query[i]) for i in requests]
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        out = kernels.attention(
            torch.cat([self.query[i][-n:] for i, n in zip(requests, lens, strict=True)]),
            kv_cache=self.cache,
            cache_format=self.format,
            block_table=self.table[requests],
            seq_lens=torch.tensor([len(self.key[i]) for i in requests], dtype=torch.int32),
            query_start_loc=starts,
            scale=self.format.head_dim**-0.5,
            fast=KINDS[self.kind][1],
            **options,
        )
        return list(out.split(lens))

    def reference(self, i: int, *, sliding_window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        group = self.num_heads // self.format.num_kv_heads
        q, k, v = (x.double() for x in (self.query[i], self.key[i].repeat_interleave(group, 1), self.value[i].repeat_interleave(group, 1)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.format.head_dim**-0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_pos, query_pos = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))[:, None]
        visible = key_pos <= query_pos
        if sliding_window:
            visible &= key_pos > query_pos - sliding_window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def make_batch(
    randn: Randn,
    lens: list[tuple[int, int]],  # (query rows, context) of each request
    *,
    heads: tuple[int, int] = (9, 3),
    dim: int = 64,
    kind: str = "float32",
    block_size: int = 16,
) -> Batch:
    form = KvCacheFormat(KINDS[kind][0], block_size, heads[1], dim)
    needed = [-(-context // block_size) for _, context in lens]
    blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lens), max(needed) + 2), 2**30, dtype=torch.int32)  # past the request's blocks: far outside
    for i, n in enumerate(needed):
        table[i, :n] = blocks[sum(needed[:i]) :][:n]
    cache = torch.full(form.shape(sum(needed) + 3), 0xFF, dtype=torch.uint8)  # NaN in float32 and float16
    return Batch(
        kind,
        heads[0],
        form,
        [randn(q, heads[0], dim) for q, _ in lens],
        [randn(context, heads[1], dim) for _, context in lens],
        [randn(context, heads[1], dim) for _, context in lens],
        table,
        cache,
    )


def check(batch: Batch, kernels: CpuKernels, **options: Any) -> None:
    batch.write(kernels)
    for i, got in enumerate(batch.attend(kernels, list(range(len(batch.query))), **options)):
        want = batch.reference(i, **options)
        error = float((got.double() - want).norm() / want.norm())
        assert error < KINDS[batch.kind][2], (i, error)


RAGGED = [(1, 1), (1, 16), (1, 17), (5, 5), (3, 40), (1, 255), (1, 256), (1, 257), (70, 130), (33, 300), (1, 600)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch(kernels: CpuKernels, kind: str, randn: Randn) -> None:
    check(make_batch(randn, RAGGED, kind=kind), kernels)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2), (14, 2), (1, 1)])
def test_head_geometries(kernels: CpuKernels, heads: tuple[int, int], randn: Randn) -> None:
    check(make_batch(randn, [(1, 70), (9, 33), (20, 20)], heads=heads), kernels)


@pytest.mark.parametrize("dim", [16, 32, 80, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_head_sizes(kernels: CpuKernels, dim: int, kind: str, randn: Randn) -> None:
    check(make_batch(randn, [(1, 50), (7, 30)], dim=dim, kind=kind), kernels)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_block_sizes(kernels: CpuKernels, block_size: int, kind: str, randn: Randn) -> None:
    check(make_batch(randn, [(1, 128), (3, 129), (40, 300)], block_size=block_size, kind=kind), kernels)


@pytest.mark.parametrize("window", [1, 7, 16, 64, 100, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_sliding_window(kernels: CpuKernels, window: int, kind: str, randn: Randn) -> None:
    check(make_batch(randn, [(1, 5), (1, 300), (40, 333), (70, 70)], kind=kind), kernels, sliding_window=window)


def test_blocks_before_the_window_are_not_read(kernels: CpuKernels, randn: Randn) -> None:
    batch = make_batch(randn, [(2, 200)])
    batch.write(kernels)
    want = batch.attend(kernels, [0], sliding_window=50)[0]
    batch.table[0, : (200 - 2 - 50 + 1) // 16] = 2**30
    assert torch.equal(batch.attend(kernels, [0], sliding_window=50)[0], want)


@pytest.mark.parametrize("window", [50, 51])  # one of which begins in the middle of a pair
@pytest.mark.parametrize("kind", KINDS)
def test_slots_before_the_window_may_hold_anything(kernels: CpuKernels, kind: str, window: int, randn: Randn) -> None:
    batch = make_batch(randn, [(1, 200)], kind=kind)
    batch.write(kernels)
    want = batch.attend(kernels, [0], sliding_window=window)[0]
    batch.key[0][: 200 - window] = batch.value[0][: 200 - window] = math.nan
    batch.write(kernels)
    assert torch.equal(batch.attend(kernels, [0], sliding_window=window)[0], want)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(kernels: CpuKernels, cap: float, randn: Randn) -> None:
    check(make_batch(randn, [(1, 70), (20, 90)]), kernels, soft_cap=cap)


def test_large_scores(kernels: CpuKernels, randn: Randn) -> None:
    batch = make_batch(randn, [(1, 300), (20, 90)])
    for query in batch.query:
        query *= 60.0
    batch.write(kernels)
    for i, got in enumerate(batch.attend(kernels, [0, 1])):
        assert torch.allclose(got.double(), batch.reference(i), atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_depends_on_nothing_but_itself(isa: str, kind: str, window: int, randn: Randn) -> None:
    """Bit for bit: batch mates, how the prompt was cut into chunks, threads, and whether spans were split over them."""
    one, two, many = (CpuKernels(isa=isa, num_threads=n) for n in (1, 2, 5))
    batch = make_batch(randn, [(270, 530), (1, 300), (33, 300), (1, 64)], kind=kind)
    batch.write(one)
    everyone = batch.attend(one, [0, 1, 2, 3], sliding_window=window)
    for kernels in (one, two, many):
        for i in range(4):
            assert torch.equal(batch.attend(kernels, [i], sliding_window=window)[0], everyone[i])
        for got, want in zip(batch.attend(kernels, [3, 2, 1, 0], sliding_window=window), reversed(everyone), strict=True):
            assert torch.equal(got, want)
    for n in (1, 2, 16, 100):
        assert torch.equal(batch.attend(two, [0, 2], [n, 1], sliding_window=window)[0], everyone[0][-n:])
    whole = batch.query[0], batch.key[0], batch.value[0]
    for end in (261, 262, 400):  # a chunk that ends earlier: later positions exist in the cache but not for it
        batch.query[0], batch.key[0] = whole[0][: end - 260], whole[1][:end]
        assert torch.equal(batch.attend(two, [0], sliding_window=window)[0], everyone[0][: end - 260])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_does_not_depend_on_the_batch(kernels: CpuKernels, kind: str, randn: Randn) -> None:
    whole, single = (make_batch(lambda *shape: torch.ones(*shape), [(1, 40)], kind=kind) for _ in range(2))
    whole.key[0], whole.value[0] = randn(40, 3, 64), randn(40, 3, 64)
    single.key, single.value = whole.key, whole.value
    whole.write(kernels)
    for t in range(40):
        form, none = single.format, torch.empty(1, 9, 64)
        key, value = single.key[0][t : t + 1].clone(), single.value[0][t : t + 1]
        kernels.rope_and_cache(none, key, value, kv_cache=single.cache, cache_format=form, slots=single.slots(0, t, t + 1))
    assert torch.equal(whole.cache, single.cache)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_cache(kernels: CpuKernels, dim: int, norm: bool, randn: Randn) -> None:
    n, heads, kv_heads = 37, 4, 2
    form = KvCacheFormat(torch.float32, 16, kv_heads, dim)
    qkv = randn(n, (heads + 2 * kv_heads) * dim)  # one buffer, as the fused product writes it
    query, key, value = qkv.view(n, -1, dim).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    table, positions = randn(100, dim), torch.randint(0, 100, (n,), generator=torch.Generator().manual_seed(0))
    weights = (randn(dim), randn(dim)) if norm else (None, None)
    want_query, want_key = query.clone(), key.clone()
    if weights[0] is not None and weights[1] is not None:
        want_query = torch.nn.functional.rms_norm(want_query, (dim,), weights[0], 1e-5)
        want_key = torch.nn.functional.rms_norm(want_key, (dim,), weights[1], 1e-5)
    want_query, want_key = rotate(want_query, table[positions]), rotate(want_key, table[positions])
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0))[:n]
    slots[5] = -1
    cache = torch.zeros(form.shape(3), dtype=torch.uint8)
    kernels.rope_and_cache(
        query,
        key,
        value,
        kv_cache=cache,
        cache_format=form,
        slots=slots,
        cos_sin=table,
        positions=positions,
        query_norm=weights[0],
        key_norm=weights[1],
        norm_eps=1e-5,
    )
    for got, want in ((query, want_query), (key, want_key)):
        assert torch.allclose(got, want, atol=1e-5) if norm else torch.equal(got, want)
    floats = cache.view(torch.float32)
    keys = floats[:, :, 0].view(3, kv_heads, dim, 16).permute(0, 3, 1, 2).flatten(0, 1)
    values = floats[:, :, 1].view(3, kv_heads, 16, dim).transpose(1, 2).flatten(0, 1)
    written = slots >= 0
    assert torch.equal(keys[slots[written]], key[written])
    assert torch.equal(values[slots[written]], value[written])
    assert int((values != 0).any(-1).any(-1).sum()) == n - 1


def test_misuse_is_refused(kernels: CpuKernels, randn: Randn) -> None:
    assert "block_size" in str(KvCacheFormat.why_not(torch.float32, 8, 9, 3, 64))
    assert "head_dim" in str(KvCacheFormat.why_not(torch.float32, 16, 9, 3, 60))
    assert "bfloat16" in str(KvCacheFormat.why_not(torch.bfloat16, 16, 9, 3, 64))
    assert "num_kv_heads" in str(KvCacheFormat.why_not(torch.float32, 16, 9, 4, 64))
    batch = make_batch(randn, [(1, 5)])
    batch.table = batch.table.long()
    with pytest.raises(ValueError, match="block_table must be int32"):
        batch.attend(kernels, [0])
    batch = make_batch(randn, [(1, 5)])
    batch.cache = batch.cache[:, :, :, :-4]
    with pytest.raises(ValueError, match="kv_cache must be"):
        batch.attend(kernels, [0])
