"""Matrix products on packed weights: against float64, bit for bit across batches and threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from aioengine_kernels.cpu import CpuKernels, FusedMatrix, PackedMatrix
from aioengine_kernels.cpu.packing import FORMATS, MatrixBuilder, can_cut, cut_columns, gather_rows, pack, pack_dense, supports_packing

Randn = Callable[..., torch.Tensor]

# Columns and bytes of a block, and where its float16 scales are.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "Q5_K": (256, 176, (0, 2)),
    "Q5_1": (32, 24, (0, 2)),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
    "Q3_K": (256, 110, (108,)),
    "MXFP4": (32, 17, ()),
}
KINDS = (*BLOCKS, "F32", "F16", "BF16")
ROW_COUNTS = (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 129, 512)


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random GGUF rows: -> stored [rows, bytes] uint8, dequantized by the gguf package [rows, columns] float32."""
    size, num_bytes, scales = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for offset in scales:
        scale = (rng.uniform(0.002, 0.01, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:2], dtype=np.uint8)  # the exponent of the scale
    stored = blocks.reshape(rows, -1)
    reference = dequantize(stored, GGMLQuantizationType[kind]).astype(np.float32)
    return torch.from_numpy(stored), torch.from_numpy(reference)


def make(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[PackedMatrix, torch.Tensor]:
    """-> packed, dequantized."""
    if kind in BLOCKS:
        stored, reference = random_rows(kind, rows, columns, seed)
        return pack(kind, columns, [stored]), reference
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)
    return pack_dense(weight), weight.float()


def exact_tolerance(isa: str, kind: str) -> float:
    """Float32 arithmetic for dense weights and without AVX2; else 16-bit activations: 2e-5 for normal ones."""
    return 3e-5 if kind in BLOCKS and isa != "portable" else 2e-6


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dequantized_bit_for_bit(kernels: CpuKernels, kind: str) -> None:
    packed, reference = make(kind, 40, 512)
    columns = kernels.linear(torch.eye(512), packed).T
    if exact_tolerance(kernels.isa, kind) < 1e-5:
        assert torch.equal(columns, reference)
    assert torch.allclose(columns, reference, rtol=1e-6, atol=1e-7)  # a single 1 loses nothing to 16 bits
    assert torch.equal(gather_rows(packed, torch.tensor([[39, 0], [17, 16]])), reference[torch.tensor([[39, 0], [17, 16]])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (33, 768)])
def test_close_to_float64(kernels: CpuKernels, kind: str, rows: int, columns: int, randn: Randn) -> None:
    packed, reference = make(kind, rows, columns)
    bias = randn(rows)
    for m in ROW_COUNTS:
        x = randn(m, columns)
        want = x.double() @ reference.double().T + bias.double()
        assert relative_error(kernels.linear(x, packed, bias), want) < exact_tolerance(kernels.isa, kind), m
        assert relative_error(kernels.linear(x, packed, bias, fast=True), want) < (1.2e-2 if kind in BLOCKS else 2e-6), m


@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 576), (3072, 576), (576, 1536), (1000, 576)])
def test_shapes_of_the_built_in_model(kernels: CpuKernels, rows: int, columns: int, randn: Randn) -> None:
    if kernels.isa == "portable":
        pytest.skip("slow, and the shape means nothing to it")
    packed, reference = make("Q4_1", rows, columns)
    for m in (1, 8, 40):
        x = randn(m, columns)
        want = x.double() @ reference.double().T
        assert relative_error(kernels.linear(x, packed), want) < exact_tolerance(kernels.isa, "Q4_1")
        assert relative_error(kernels.linear(x, packed, fast=True), want) < 1.2e-2


def test_a_vocabulary_of_rows(kernels: CpuKernels, randn: Randn) -> None:
    packed, reference = make("Q8_0", 49152 if kernels.isa != "portable" else 4096, 64)
    x = randn(3, 64)
    want = x.double() @ reference.double().T
    assert relative_error(kernels.linear(x, packed), want) < exact_tolerance(kernels.isa, "Q8_0")
    assert relative_error(kernels.linear(x, packed, fast=True), want) < 1.2e-2


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(isa: str, kind: str, fast: bool, randn: Randn) -> None:
    packed, _ = make(kind, 150, 512)
    bias, x = randn(150), randn(513, 512)
    x[::3, 77] *= 60.0  # fast mode gives such a group a second digit: in this row, not in those beside it
    x[1::7, 300] *= 60.0
    one, two = (CpuKernels(isa=isa, num_threads=n) for n in (1, 2))
    alone = torch.cat([one.linear(x[i : i + 1], packed, bias, fast=fast) for i in range(40)])
    for m in ROW_COUNTS:
        for start in (0, 1, 7):
            for kernels in (one, two):
                got = kernels.linear(x[start : start + m], packed, bias, fast=fast)
                rows = min(m, 40 - start)
                assert torch.equal(got[:rows], alone[start : start + rows]), (m, start)
    assert torch.equal(two.linear(x.flip(0), packed, bias, fast=fast).flip(0), two.linear(x, packed, bias, fast=fast))


@pytest.mark.parametrize("fast", [False, True])
def test_parts_are_stacked_rows(kernels: CpuKernels, fast: bool, randn: Randn) -> None:
    parts = [random_rows("Q4_1", rows, 96, seed=rows) for rows in (24, 7, 9)]
    packed = pack("Q4_1", 96, [stored for stored, _ in parts])
    separate = [pack("Q4_1", 96, [stored]) for stored, _ in parts]
    x = randn(5, 96)
    assert torch.equal(kernels.linear(x, packed, fast=fast), torch.cat([kernels.linear(x, p, fast=fast) for p in separate], dim=1))


@pytest.mark.parametrize("fast", [False, True])
def test_parts_of_several_formats(kernels: CpuKernels, fast: bool, randn: Randn) -> None:
    parts = tuple(make(kind, rows, 256, seed=rows)[0] for kind, rows in (("Q4_K", 24), ("Q6_K", 7), ("F32", 9), ("Q4_K", 32)))
    for m in (1, 5, 40):
        x, bias = randn(m, 256), randn(72)
        separate = torch.cat([kernels.linear(x, p, fast=fast) for p in parts], dim=1) + bias
        assert torch.equal(kernels.linear(x, FusedMatrix(parts), bias, fast=fast), separate)
    with pytest.raises(ValueError, match=r"\[256, 96\] columns"):
        FusedMatrix((parts[0], make("Q4_1", 8, 96)[0]))


@pytest.mark.parametrize("fast", [False, True])
def test_four_bits_with_scales_in_float32(kernels: CpuKernels, fast: bool, randn: Randn) -> None:
    """For what no float16 scale holds. Of any number of groups of 32 columns, in parts that end inside a panel."""
    rng = np.random.default_rng(2)
    rows, groups, limit = 21, 3, 0.02 if fast else 1e-4
    codes = rng.integers(0, 16, (rows, groups, 32), dtype=np.uint8)
    heads = np.stack([rng.uniform(0.002, 0.01, (rows, groups)), rng.uniform(-0.07, -0.03, (rows, groups))], axis=-1).astype(np.float32)
    stored = torch.from_numpy(np.concatenate([heads.view(np.uint8), codes[..., :16] | codes[..., 16:] << 4], axis=2).reshape(rows, -1))
    numbers = torch.from_numpy((codes * heads[..., :1] + heads[..., 1:]).reshape(rows, -1))
    packed = pack("Q4_1_F32", 96, [stored[:5], stored[5:]])
    cut = cut_columns(packed, 32, 64)
    torch.testing.assert_close(gather_rows(packed, torch.arange(rows)), numbers, rtol=0, atol=1e-8)
    for count in (1, 3, 40):
        x = randn(count, 96)
        assert relative_error(kernels.linear(x, packed, fast=fast), x.double() @ numbers.double().T) < limit
        last = x[:, 32:].contiguous()
        assert relative_error(kernels.linear(last, cut, fast=fast), last.double() @ numbers[:, 32:].double().T) < limit
    with pytest.raises(ValueError, match="Q4_1_F32 rows of 96 columns are"):
        pack("Q4_1_F32", 96, [stored[:, 1:]])
    with pytest.raises(ValueError, match="80 columns are not a multiple of 32, the block of Q4_1_F32"):
        pack("Q4_1_F32", 80, [stored])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [False, True])
def test_strided_rows_and_odd_sizes(kernels: CpuKernels, kind: str, fast: bool, randn: Randn) -> None:
    columns = 256
    packed, reference = make(kind, 1, columns)
    wide = randn(9, columns + 3)
    x = wide[:, 1 : columns + 1]  # rows apart, no row aligned
    assert torch.equal(kernels.linear(x, packed, fast=fast), kernels.linear(x.contiguous(), packed, fast=fast))
    assert relative_error(kernels.linear(x, packed), x.double() @ reference.double().T) < 2 * exact_tolerance(kernels.isa, kind)
    assert kernels.linear(x[:0], packed, fast=fast).shape == (0, 1)


def test_dense_columns_of_any_number(kernels: CpuKernels, randn: Randn) -> None:
    weight, x = randn(19, 77), randn(14, 77)
    want = x.double() @ weight.double().T
    assert relative_error(kernels.linear(x, pack_dense(weight)), want) < 1e-6
    assert relative_error(kernels.linear(x, pack_dense(weight.bfloat16())), want) < 1e-2


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q5_K", "IQ4_NL"])
def test_extreme_inputs(kernels: CpuKernels, kind: str) -> None:
    """The largest sums that integer arithmetic meets: a saturating instruction used wrongly shows here."""
    size, num_bytes, scales = BLOCKS[kind]
    for byte in (0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF):
        stored = torch.full((16, 256 // size * num_bytes), byte, dtype=torch.uint8)
        blocks = stored.view(16, -1, num_bytes)
        for offset in scales:
            blocks[..., offset : offset + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        packed = pack(kind, 256, [stored])
        reference = gather_rows(packed, torch.arange(16)).double()
        for x in (torch.full((2, 256), 3.0), torch.full((2, 256), -3.0), torch.tensor([[3.0, -3.0] * 128] * 2)):
            assert torch.allclose(kernels.linear(x, packed, fast=True).double(), x.double() @ reference.T, rtol=1e-4, atol=2e-3)
            assert torch.allclose(kernels.linear(x, packed).double(), x.double() @ reference.T, rtol=1e-5, atol=2e-3)


def test_zeros_and_tiny_rows(kernels: CpuKernels) -> None:
    packed, _ = make("Q4_1", 16, 64)
    x = torch.zeros(3, 64)
    x[1, 5] = 1e-38
    assert torch.equal(kernels.linear(x, packed, fast=True), torch.zeros(3, 16))
    assert kernels.linear(x, packed).abs().max() < 1e-36


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("spread", "limit"), [(0.0, 5e-5), (2.0, 1.2e-4), (4.0, 1.2e-4)])
def test_exact_mode_stays_within_its_error(kernels: CpuKernels, kind: str, spread: float, limit: float, randn: Randn) -> None:
    """Also where a few activations are far larger than their neighbours, which are then rounded in the units of the large ones."""
    packed, reference = make(kind, 64, 768)
    x = randn(16, 768) * torch.exp(spread * randn(16, 768))
    want = x.double() @ reference.double().T
    errors = (kernels.linear(x, packed).double() - want).norm(dim=1) / want.norm(dim=1)  # of every row
    assert float(errors.max()) < limit


def test_exact_mode_rounds_to_sixteen_bits(kernels: CpuKernels) -> None:
    """An activation is off by at most half a unit, the largest of its 32 columns over 32639; other columns have their own unit."""
    if kernels.isa == "portable":
        pytest.skip("float32 there")
    packed, reference = make("Q8_0", 16, 64)
    x = torch.zeros(4, 64)
    x[:, 0], x[:, 40] = 32639.0, 0.25
    x[:, 7] = torch.tensor([0.4, 0.6, -1.4, -32639.0])
    rounded = x.double()
    rounded[:, 7] = torch.tensor([0.0, 1.0, -1.0, -32639.0])
    assert torch.allclose(kernels.linear(x, packed).double(), rounded @ reference.double().T, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_fast_mode_keeps_what_stands_out(kernels: CpuKernels, kind: str, randn: Randn) -> None:
    """In 8 bits, a column 100 times the others would leave its 31 neighbours two or three steps each."""
    packed, reference = make(kind, 64, 768)
    x = randn(16, 768)
    x[:, 40] = 100.0
    rest = x.double()
    rest[:, 40] = 0.0  # the products of the large column are not what is looked at
    got = kernels.linear(x, packed, fast=True).double() - 100.0 * reference[:, 40].double()
    by_eight_bits = x.double().view(16, -1, 32)
    step = by_eight_bits.abs().amax(-1, keepdim=True) / 127
    plain = ((by_eight_bits / step).round() * step).view(16, 768)
    plain[:, 40] = 0.0
    want = rest @ reference.double().T
    assert relative_error(got, want) < 1.2e-2  # as without the large column
    assert relative_error(plain @ reference.double().T, want) > 3e-2  # what rounding alone would have given


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("columns", [(40,), (40, 41, 55), (0, 31, 300, 767)])
@pytest.mark.parametrize("large", [30.0, 1e3, 1e6])
def test_fast_mode_is_right_about_what_stands_out(
    kernels: CpuKernels, kind: str, columns: tuple[int, ...], large: float, randn: Randn
) -> None:
    """However far it does: two digits hold it, and its neighbours lose no more than its own rounding."""
    packed, reference = make(kind, 64, 768)
    x = randn(13, 768)
    x[1::2, columns] *= large  # in every second row
    want = x.double() @ reference.double().T
    errors = (kernels.linear(x, packed, fast=True).double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(errors.max()) < 1.5e-2
    assert float(errors[1::2].max()) < (1.5e-2 if large < 1e6 else 5e-3)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(
    kernels: CpuKernels, kind: str, fast: bool, bad: float, randn: Randn
) -> None:
    packed, _ = make(kind, 24, 256)
    x = randn(7, 256)
    want = kernels.linear(x, packed, fast=fast)
    x[3, 77] = bad
    got = kernels.linear(x, packed, fast=fast)
    others = [0, 1, 2, 4, 5, 6]
    assert not got[3].isfinite().any()
    assert torch.equal(got[others], want[others])


def test_misuse_is_refused(kernels: CpuKernels) -> None:
    packed, _ = make("Q4_1", 16, 64)
    with pytest.raises(ValueError, match=r"x must be float32 \[2, 64\]"):
        kernels.linear(torch.zeros(2, 32), packed)
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(torch.zeros(2, 64, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(torch.zeros(64, 2).T, packed)
    with pytest.raises(ValueError, match="not a multiple of 256"):
        MatrixBuilder("Q4_K", 16, 64)
    with pytest.raises(ValueError, match="do not fit"):
        MatrixBuilder("F32", 16, 64).put(10, torch.zeros(7, 64))
    with pytest.raises(ValueError, match="uint8"):
        MatrixBuilder("Q4_1", 16, 64).put(0, torch.zeros(7, 64))
    assert "no packed form of IQ2_XS" in str(supports_packing("IQ2_XS", 256))
    assert supports_packing("Q4_1", 576) is None
    assert len(set(FORMATS.values())) == len(FORMATS)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_columns_are_the_columns(kernels: CpuKernels, kind: str, randn: Randn) -> None:
    """Also where the file's blocks of 256 columns are cut, and the last panel is not full."""
    packed, _ = make(kind, 40, 512)
    rows = torch.arange(40)
    cut = cut_columns(packed, 96, 288)
    assert torch.equal(gather_rows(cut, rows), gather_rows(packed, rows)[:, 96:384])
    x = randn(3, 288)
    whole = torch.zeros(3, 512)
    whole[:, 96:384] = x
    assert torch.allclose(kernels.linear(x, cut), kernels.linear(whole, packed), rtol=1e-5, atol=1e-5)


def test_quantized_columns_are_cut_between_groups_only() -> None:
    packed, _ = make("Q8_0", 16, 64)
    assert not can_cut(packed, 16, 32)
    with pytest.raises(ValueError, match=r"columns 16\.\.48 cannot be cut from 64 columns of Q8_0"):
        cut_columns(packed, 16, 32)
    dense, reference = make("BF16", 16, 64)
    assert torch.equal(gather_rows(cut_columns(dense, 15, 7), torch.arange(16)), reference[:, 15:22])
