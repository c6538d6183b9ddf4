"""The arg-max by rounded activations is that of the exact product: the first of its largest numbers, in every row, always."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine_kernels.cpu import CpuKernels, GreedyHead, PackedMatrix
from aioengine_kernels.cpu.packing import gather_rows, pack
from tests.kernels.cpu.test_linear import BLOCKS, make, random_rows

KINDS = ("Q4_0", "Q8_0", "Q6_K")


def head_of(kernels: CpuKernels, matrix: PackedMatrix) -> GreedyHead:
    head = GreedyHead.build(kernels, matrix)
    if head is None:
        assert kernels.isa == "portable" or (kernels.isa == "avx2" and matrix.kind != "Q4_0")
        pytest.skip(f"the exact product of {matrix.kind} is the fastest on {kernels.isa}")
    return head


def columns_of(head: GreedyHead, x: torch.Tensor, rows: int) -> list[int] | None:
    got = head.columns(x, scores=torch.full((len(x), rows), torch.nan))
    return None if got is None else got.tolist()


def exact_columns(kernels: CpuKernels, matrix: PackedMatrix, x: torch.Tensor) -> list[int]:
    return [int(column) for column in kernels.linear(x, matrix).numpy().argmax(axis=-1)]


def hidden_rows(count: int, columns: int, rng: np.random.Generator) -> torch.Tensor:
    """Normal ones, skewed ones, ones with columns that stand out, of few numbers, and with whole groups of zeros."""
    x = rng.standard_normal((count, columns)).astype(np.float32)
    x[1::5] *= np.exp(2 * rng.standard_normal(x[1::5].shape))
    x[2::5, rng.integers(0, columns, 3)] *= 100
    x[3::5] = np.round(x[3::5])
    x[4::5, : columns // 2] = 0
    return torch.from_numpy(x)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("kind", KINDS)
def test_random_rows(kernels: CpuKernels, kind: str, scale: float) -> None:
    rng, num_decided = np.random.default_rng(1), 0
    for seed, (rows, columns) in enumerate([(4099, 512), (1000, 256), (17, 768), (3, 256)]):
        matrix, _ = make(kind, rows, columns, seed)
        head = head_of(kernels, matrix)
        for count in (2, 7, 33):
            x = hidden_rows(count, columns, rng) * scale
            got = columns_of(head, x, rows)
            assert got is None or got == exact_columns(kernels, matrix, x)
            num_decided += got is not None
    assert num_decided >= (10 if scale > 1e-20 else 0)  # below, all activations count as zeros, and every column is equal


def near_ties(kind: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[PackedMatrix, int]:
    """-> the matrix, and the first of 60 rows of it that lie side by side and are alike but for some bits of their quants."""
    stored, _ = random_rows(kind, rows, columns, 5)
    data = stored.numpy().copy()
    first = int(rng.integers(0, rows - 60))
    data[first : first + 60] = data[first]
    start, count = {"Q4_0": (2, 16), "Q8_0": (2, 32), "Q6_K": (0, 128)}[kind]  # a block's quants, or the lower bits of them
    num_blocks = columns // BLOCKS[kind][0]
    for row in range(first, first + 60):
        quants = data[row].reshape(num_blocks, -1)
        for _ in range(int(rng.choice([0, 6, 12]))):
            quants[rng.integers(0, num_blocks), rng.integers(start, start + count)] ^= 1
    return pack(kind, columns, [torch.from_numpy(data)]), first


@pytest.mark.parametrize("kind", KINDS)
def test_ties_and_near_ties(kernels: CpuKernels, kind: str) -> None:
    rng, num_close, num_decided = np.random.default_rng(2), 0, 0
    for _ in range(12):
        rows, columns = 3000, 256
        matrix, first = near_ties(kind, rows, columns, rng)
        head = head_of(kernels, matrix)
        x = hidden_rows(200, columns, rng)
        towards = gather_rows(matrix, torch.tensor([first]))  # so that one of them wins
        x += towards * (x.norm(dim=1, keepdim=True) / towards.norm())
        exact = kernels.linear(x, matrix)
        fast = kernels.linear(x, matrix, fast=True)
        num_close += int((exact.argmax(dim=-1) != fast.argmax(dim=-1)).sum())
        for row in range(len(x)):  # in pairs: one that cannot be decided must not excuse the others
            pair = x[[row, row]]
            got = columns_of(head, pair, rows)
            assert got is None or got == exact_columns(kernels, matrix, pair)
            num_decided += got is not None
    assert num_close >= 3, "no row here is close enough for rounding to matter"
    assert num_decided > 1600


def test_the_first_of_equal_columns(kernels: CpuKernels) -> None:
    stored, reference = random_rows("Q4_0", 3000, 256)
    x = reference[[700, 701]].contiguous()  # its own row is the best by far
    for twin in (3, 2990):
        data = stored.clone()
        data[twin] = stored[700]
        matrix = pack("Q4_0", 256, [data])
        assert columns_of(head_of(kernels, matrix), x, 3000) == [min(twin, 700), 701]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4e38])
def test_rows_that_are_not_finite_are_left_to_the_exact_product(kernels: CpuKernels, bad: float) -> None:
    matrix, _ = make("Q4_0", 1000, 256)
    head = head_of(kernels, matrix)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    assert columns_of(head, x, 1000) is not None
    x[2, 77] = bad
    assert columns_of(head, x, 1000) is None


def test_equal_columns_without_end_are_left_to_the_exact_product(kernels: CpuKernels) -> None:
    stored, _ = random_rows("Q4_0", 1, 256)
    matrix = pack("Q4_0", 256, [stored.expand(3000, -1).contiguous()])
    assert columns_of(head_of(kernels, matrix), torch.ones(2, 256), 3000) is None


def test_threads_agree(isa: str) -> None:
    matrix, _ = make("Q4_0", 4099, 512)
    x = hidden_rows(33, 512, np.random.default_rng(4))
    one, three = (columns_of(head_of(kernels, matrix), x, 4099) for kernels in (CpuKernels(isa=isa, num_threads=n) for n in (1, 3)))
    assert one is not None
    assert one == three


def test_weights_that_are_not_finite_have_no_bound(kernels: CpuKernels) -> None:
    stored, _ = random_rows("Q4_0", 100, 256)
    stored[5, 0:2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinity
    assert GreedyHead.build(kernels, pack("Q4_0", 256, [stored])) is None
