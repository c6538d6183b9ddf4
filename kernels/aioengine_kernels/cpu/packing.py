"""Weights in the panel layout of the native kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioengine_kernels.cpu.library import open_library

# Names of ggml -> numbers in the C ABI.
FORMATS = {
    "F32": 0,
    "F16": 1,
    "BF16": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "Q8_0": 5,
    "Q4_K": 6,
    "Q6_K": 7,
    "Q5_0": 8,
    "Q5_K": 9,
    "Q5_1": 10,
    "IQ4_NL": 11,
    "IQ4_XS": 12,
    "Q3_K": 13,
    "MXFP4": 14,
}
# Columns and bytes of a block in a file.
_STORED_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
    "Q5_K": (256, 176),
    "Q5_1": (32, 24),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "Q3_K": (256, 110),
    "MXFP4": (32, 17),
}
# Like Q4_1, with the scale and the minimum in float32: no format of ggml. A block is 4 + 4 + 16 bytes, kept in the panels of Q4_K.
_WIDE, _WIDE_BYTES = "Q4_1_F32", 24
# Formats without panels of their own -> those that hold every one of their numbers exactly.
_KEPT_AS = {"Q5_0": "Q8_0", "IQ4_NL": "Q8_0", "Q5_1": "Q5_K", "IQ4_XS": "Q6_K", "Q3_K": "Q6_K", "MXFP4": "Q6_K"}
_DENSE = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 64
_PANEL_ROWS = 16
_GROUP_COLUMNS = 32
# Of the formats that panels are kept in: bytes of a group's quants and of its scales, for the 16 rows of a panel.
_GROUP_BYTES = {"Q4_0": (256, 32), "Q4_1": (256, 64), "Q8_0": (512, 32), "Q4_K": (256, 128), "Q6_K": (512, 128), "Q5_K": (512, 128)}
_BYTES_PER_NUMBER = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A [rows, columns] matrix as panels of 16 rows. Rows past `rows` in the last panel are zero."""

    kind: str  # a key of FORMATS; kinds without panels of their own are kept as another
    rows: int
    columns: int
    data: torch.Tensor  # [bytes] uint8, 64-byte aligned

    @property
    def format(self) -> int:
        return FORMATS[self.kind]

    @property
    def nbytes(self) -> int:
        return self.data.numel()


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """Rows of several matrices one after the other, each kept in its own format: Q4_K_M files mix Q4_K and Q6_K in one layer."""

    parts: tuple[PackedMatrix, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a fused matrix needs at least one part")
        if len({part.columns for part in self.parts}) != 1:
            raise ValueError(f"the parts of a fused matrix have {[part.columns for part in self.parts]} columns: they must be alike")

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def aligned_zeros(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 at a 64-byte boundary."""
    raw = torch.zeros(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + num_bytes]


def supports_packing(kind: str, columns: int) -> str | None:
    """None if rows of this ggml type and length can be packed, else why not."""
    if kind not in FORMATS and kind != _WIDE:
        return f"no packed form of {kind} weights; there is one of {', '.join(FORMATS)}"
    size = _GROUP_COLUMNS if kind == _WIDE else _STORED_BLOCKS.get(kind, (1, 0))[0]
    return f"{columns} columns are not a multiple of {size}, the block of {kind}" if columns % size else None


class MatrixBuilder:
    """Packs a matrix part by part: q, k, v or gate, up become one matrix by packing their rows one after the other."""

    def __init__(self, kind: str, rows: int, columns: int) -> None:
        """Raises ValueError for a kind or a row length that cannot be packed."""
        reason = supports_packing(kind, columns) if kind != _WIDE else f"{_WIDE} is packed whole, by pack()"
        if reason is not None:
            raise ValueError(reason)
        if rows <= 0 or columns <= 0:
            raise ValueError(f"a packed matrix needs at least one row and one column, got [{rows}, {columns}]")
        self._library = open_library()
        self._stored_kind = kind
        num_bytes = self._library.aio_packed_bytes(FORMATS[kind], rows, columns)
        if num_bytes == 0:
            raise ValueError(f"the native library was built before it knew {kind}; build it anew: python setup.py build_ext --inplace")
        self.matrix = PackedMatrix(_KEPT_AS.get(kind, kind), rows, columns, aligned_zeros(num_bytes))

    def put(self, first_row: int, stored: torch.Tensor) -> None:
        """Rows `first_row` on. stored: [rows, bytes_per_row] uint8 of GGUF blocks, or [rows, columns] in the dense dtype."""
        matrix, kind = self.matrix, self._stored_kind
        if kind in _STORED_BLOCKS:
            columns, block_bytes = _STORED_BLOCKS[kind]
            width, dtype = matrix.columns // columns * block_bytes, torch.uint8
        else:
            width, dtype = matrix.columns, next(dtype for dtype, name in _DENSE.items() if name == kind)
        if stored.dtype != dtype or stored.dim() != 2 or stored.shape[1] != width:
            raise ValueError(f"{kind} rows of {matrix.columns} columns are {dtype} [n, {width}], got {stored.dtype} {list(stored.shape)}")
        if first_row < 0 or first_row + stored.shape[0] > matrix.rows:
            raise ValueError(f"rows {first_row}..{first_row + stored.shape[0]} do not fit into {matrix.rows} rows")
        source = stored.contiguous()
        self._library.aio_pack(
            FORMATS[kind],
            source.data_ptr(),
            source.shape[1] * source.element_size(),
            source.shape[0],
            matrix.columns,
            first_row,
            matrix.data.data_ptr(),
            torch.get_num_threads(),
        )


def pack(kind: str, columns: int, parts: Sequence[torch.Tensor]) -> PackedMatrix:
    """One matrix of the rows of all parts. See `MatrixBuilder.put` for the form of a part.

    Of kind "Q4_1_F32" a part is [n, columns / 32 * 24] uint8: for each 32 columns scale and minimum in float32, then the nibbles of a Q4_1.
    """
    if kind == _WIDE:
        return _pack_wide(columns, parts)
    builder = MatrixBuilder(kind, sum(part.shape[0] for part in parts), columns)
    row = 0
    for part in parts:
        builder.put(row, part)
        row += part.shape[0]
    return builder.matrix


def _pack_wide(columns: int, parts: Sequence[torch.Tensor]) -> PackedMatrix:
    """The quants of a Q4_1, and beside them the scales as Q4_K keeps them: products are those of Q4_K."""
    reason, width = supports_packing(_WIDE, columns), columns // _GROUP_COLUMNS * _WIDE_BYTES
    for part in parts:
        if reason is not None or part.dtype != torch.uint8 or part.dim() != 2 or part.shape[1] != width:
            raise ValueError(
                reason or f"{_WIDE} rows of {columns} columns are torch.uint8 [n, {width}], got {part.dtype} {list(part.shape)}"
            )
    groups = columns // _GROUP_COLUMNS
    blocks = torch.cat(list(parts)).view(-1, groups, _WIDE_BYTES)
    rows = blocks.shape[0]
    nibbles = torch.cat([blocks.new_zeros(rows, groups, 4), blocks[..., 8:]], dim=2)
    quants = pack("Q4_1", columns, [nibbles.view(rows, -1)])
    num_panels, num_bytes = -(-rows // _PANEL_ROWS), groups * _GROUP_BYTES["Q4_K"][0]
    scales = torch.zeros(num_panels * _PANEL_ROWS, groups, 2)
    scales[:rows] = blocks[..., :8].contiguous().view(torch.float32)
    by_group = scales.view(num_panels, _PANEL_ROWS, groups, 2).permute(0, 2, 3, 1).contiguous()  # [panels, groups, 2, 16]
    data = aligned_zeros(num_panels * groups * sum(_GROUP_BYTES["Q4_K"]))
    panels = data.view(num_panels, -1)
    panels[:, :num_bytes] = quants.data.view(num_panels, -1)[:, :num_bytes]
    panels[:, num_bytes:] = by_group.view(num_panels, -1).view(torch.uint8)
    return PackedMatrix("Q4_K", rows, columns, data)


def pack_dense(weight: torch.Tensor) -> PackedMatrix:
    """weight [rows, columns] in float32, float16 or bfloat16."""
    if weight.dtype not in _DENSE:
        raise ValueError(f"no packed form of {weight.dtype}")
    return pack(_DENSE[weight.dtype], weight.shape[1], [weight])


def gather_rows(matrix: PackedMatrix, ids: torch.Tensor) -> torch.Tensor:
    """The embedding look-up: ids [...] int64 -> [..., columns] float32, each row dequantized exactly. Ids are not checked."""
    if ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64, got {ids.dtype}")
    flat = ids.contiguous()
    out = torch.empty((*ids.shape, matrix.columns))
    count = math.prod(ids.shape)
    open_library().aio_gather_rows(
        matrix.format, matrix.data.data_ptr(), matrix.columns, flat.data_ptr(), count, out.data_ptr(), matrix.columns
    )
    return out


def can_cut(matrix: PackedMatrix, first: int, count: int) -> bool:
    """Whether `cut_columns` can: plain numbers anywhere, quantized ones between groups of 32 columns."""
    return matrix.kind in _BYTES_PER_NUMBER or (first % _GROUP_COLUMNS == 0 and count % _GROUP_COLUMNS == 0)


def cut_columns(matrix: PackedMatrix, first: int, count: int) -> PackedMatrix:
    """Columns `first` to `first + count`, with the same numbers, as a matrix of their own. Raises ValueError if they cannot be cut."""
    if first < 0 or count <= 0 or first + count > matrix.columns or not can_cut(matrix, first, count):
        raise ValueError(f"columns {first}..{first + count} cannot be cut from {matrix.columns} columns of {matrix.kind}")
    num_panels = -(-matrix.rows // _PANEL_ROWS)
    panels = matrix.data.view(num_panels, -1)
    if (width := _BYTES_PER_NUMBER.get(matrix.kind)) is not None:
        column = _PANEL_ROWS * width
        kept = [panels[:, first * column : (first + count) * column]]
    else:
        quants, scales = _GROUP_BYTES[matrix.kind]
        begin, end, start = first // _GROUP_COLUMNS, (first + count) // _GROUP_COLUMNS, matrix.columns // _GROUP_COLUMNS * quants
        kept = [panels[:, begin * quants : end * quants], panels[:, start + begin * scales : start + end * scales]]
    num_bytes = sum(part.shape[1] for part in kept)
    data = aligned_zeros(num_panels * (-(-num_bytes // _ALIGNMENT) * _ALIGNMENT))
    data.view(num_panels, -1)[:, :num_bytes] = torch.cat(kept, dim=1)
    return PackedMatrix(matrix.kind, matrix.rows, count, data)
