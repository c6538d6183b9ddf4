"""Quantized matrices of safetensors folders, each a `StoredTensor` over the tensors that it is stored as.

GPTQ, AWQ and compressed-tensors' 4 bits are scale * (q - zero point), with scale and zero point for a group of columns: the form of
Q4_1, whose minimum is -scale * zero point. fp8 and bitsandbytes' 4 bits have no such form: they are read as plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aioengine.checkpoint.quantization import Layout
from aioengine.checkpoint.safetensors import SafetensorsTensor
from aioengine.checkpoint.stored_tensor import UnreadRows
from aioengine.errors import ModelError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word AWQ keeps the 4 bits of eight neighbours
_BLOCK = 32
_HALF = 8  # the zero point of symmetric weights


@dataclass(frozen=True, slots=True)
class FourBitMatrix:
    """scale * (q - zero point), by groups of columns."""

    name: str
    shape: tuple[int, int]
    layout: Layout
    group_size: int
    act_order: bool
    parts: Mapping[str, SafetensorsTensor]  # by the last part of the name

    @property
    def stored_bytes(self) -> int:
        return self.shape[0] * self.shape[1] // 2

    def read_into(self, out: torch.Tensor) -> None:
        scales, zeros, codes = self._scales(), self._zeros(), self._codes()
        if (groups := self._groups_of_columns()) is None:
            by_group = codes.view(self.shape[0], -1, self.group_size).float()
            numbers = by_group.sub_(zeros[..., None]).mul_(scales[..., None]).view(self.shape)
        else:
            numbers = codes.float().sub_(zeros[:, groups]).mul_(scales[:, groups])
        out.copy_(numbers)

    def read_packed(self) -> UnreadRows | None:
        """Q4_0 or Q4_1 where float16 holds scales and minima exactly, else Q4_1 with those in float32. Nothing is rounded."""
        if self.why_dense() is not None:
            return None
        scales, zeros = self._scales(), self._zeros()
        kind = "Q4_1_F32"
        if _fits_half(scales):
            if bool((zeros == _HALF).all()):
                kind = "Q4_0"
            elif _fits_half(scales * zeros):
                kind = "Q4_1"
        return UnreadRows(kind, lambda: self._pack(kind))

    def why_dense(self) -> str | None:
        if self.group_size % _BLOCK:
            return f"{self.shape[1]} columns are not a multiple of {_BLOCK}, the block of the packed kernels"
        if self._groups_of_columns() is not None:
            return "their columns are in no order of groups (desc_act, g_idx)"
        return None

    def _pack(self, kind: str) -> torch.Tensor:
        """[rows, bytes] uint8: for each 32 columns scale, minimum, and the nibbles of columns 0-15, and above them 16-31."""
        rows, per_group = self.shape[0], self.group_size // _BLOCK
        scales, zeros = self._scales(), self._zeros()
        heads = [scales] if kind == "Q4_0" else [scales, -(scales * zeros)]
        dtype = torch.float32 if kind == "Q4_1_F32" else torch.float16
        head = torch.stack(heads, dim=-1).to(dtype).view(torch.uint8).repeat_interleave(per_group, dim=1)  # [rows, blocks, bytes]
        codes = self._codes().view(rows, -1, 2, _BLOCK // 2)
        return torch.cat([head, codes[:, :, 0] | codes[:, :, 1] << 4], dim=2).view(rows, -1)

    def _codes(self) -> torch.Tensor:
        """[rows, columns] uint8, contiguous."""
        if self.layout == "compressed":
            return _nibbles(self.parts["weight_packed"].read_raw())
        words = self.parts["qweight"].read_raw()
        return _awq_nibbles(words).t().contiguous() if self.layout == "awq" else _nibbles(words.t())

    def _scales(self) -> torch.Tensor:
        """[rows, groups] float32."""
        if self.layout == "compressed":
            return self.parts["weight_scale"].read_raw().float()
        return self.parts["scales"].read_raw().float().t().contiguous()

    def _zeros(self) -> torch.Tensor:
        """[rows, groups] float32."""
        if self.layout == "compressed":
            stored = self.parts.get("weight_zero_point")
            if stored is None:
                return torch.full(self.parts["weight_scale"].shape, float(_HALF))
            return _nibbles(stored.read_raw().t()).t().float().contiguous()
        words = self.parts["qzeros"].read_raw()
        zeros = _awq_nibbles(words) if self.layout == "awq" else _nibbles(words)
        if self.layout == "gptq":
            zeros = (zeros + 1) & 15  # AutoGPTQ writes them minus 1
        return zeros.t().float().contiguous()

    def _groups_of_columns(self) -> torch.Tensor | None:
        """The group of each column, [columns] int64; None if they lie in order."""
        stored = self.parts.get("g_idx") or self.parts.get("weight_g_idx")
        if stored is None:
            return None
        groups, columns = stored.read_raw().long(), self.shape[1]
        num_groups = columns // self.group_size
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise ModelError(
                f"{stored.path}: tensor {stored.name} must name groups 0..{num_groups - 1}, got {int(groups.min())}..{int(groups.max())}"
            )
        unused = not self.act_order and not bool(groups.any())  # some writers leave it at 0
        return None if unused or torch.equal(groups, torch.arange(columns) // self.group_size) else groups


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """float8 (e4m3) times scales: of the tensor, of its rows, or of blocks of it."""

    name: str
    weight: SafetensorsTensor
    scale: SafetensorsTensor
    block: tuple[int, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def stored_bytes(self) -> int:
        return self.shape[0] * self.shape[1]

    def read_into(self, out: torch.Tensor) -> None:
        numbers, scale = self.weight.read_raw().float(), self.scale.read_raw().float()
        if self.block is not None:
            rows, columns = self.block
            for i in range(scale.shape[0]):
                by_column = scale[i].repeat_interleave(columns)[: self.shape[1]]
                numbers[i * rows : (i + 1) * rows].mul_(by_column)
        else:
            numbers.mul_(scale.view(-1, 1))
        out.copy_(numbers)

    def read_packed(self) -> None:
        return None

    def why_dense(self) -> str | None:
        return "float8 spans more than the 8 bits of the packed kernels"


@dataclass(frozen=True, slots=True)
class CodebookMatrix:
    """bitsandbytes' 4 bits: numbers of a table of 16, times a scale for each run of them. Rounded as bitsandbytes rounds them."""

    name: str
    shape: tuple[int, int]
    block: int  # numbers that share a scale, in the order of memory
    dtype: torch.dtype
    nested: tuple[int, float] | None  # of scales that are quantized themselves: how many share one, and what is added
    parts: Mapping[str, SafetensorsTensor]  # "weight", "absmax", "quant_map", "nested_absmax", "nested_quant_map"

    @property
    def stored_bytes(self) -> int:
        return self.shape[0] * self.shape[1] // 2

    def read_into(self, out: torch.Tensor) -> None:
        pairs = self.parts["weight"].read_raw().view(torch.uint8).flatten()
        codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten().int()
        numbers = self.parts["quant_map"].read_raw().float()[codes]
        scales = self._scales().repeat_interleave(self.block)[: numbers.numel()]
        out.copy_(numbers.mul_(scales).to(self.dtype).view(self.shape))

    def _scales(self) -> torch.Tensor:
        absmax = self.parts["absmax"].read_raw()
        if self.nested is None:
            return absmax.float()
        block, offset = self.nested
        scales = self.parts["nested_absmax"].read_raw().float().repeat_interleave(block)[: absmax.numel()]
        return self.parts["nested_quant_map"].read_raw().float()[absmax.int()].mul_(scales).add_(offset)

    def read_packed(self) -> None:
        return None

    def why_dense(self) -> str | None:
        return "the packed kernels have no table of numbers like that of bitsandbytes"


QuantizedMatrix = FourBitMatrix | Float8Matrix | CodebookMatrix


def _fits_half(numbers: torch.Tensor) -> bool:
    return torch.equal(numbers.half().float(), numbers)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """[n, words] int32 -> [n, 8 * words] uint8, the lowest 4 bits first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).view(words.shape[0], -1)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    return _nibbles(words).view(words.shape[0], -1, 8)[..., list(_AWQ_ORDER)].reshape(words.shape[0], -1)
