"""Which part of a decoder each rank of tensor parallelism holds, by the names of the tensors.

A rank has some of the heads and some of the columns of the MLP: rows of q, k, v, gate and up, and columns of o and down, whose
products are summed over the ranks (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053). Everything else is on every rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aioengine.checkpoint.stored_tensor import PackedRows, StoredTensor, UnreadRows, Zeros
from aioengine.distributed.group import Group
from aioengine.errors import ConfigError, ModelError
from aioengine.models.config import DecoderConfig

_PART = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.([a-z]+_proj)\.(weight|bias)")
_CUT_BY_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_CUT_BY_COLUMNS = frozenset({"o_proj", "down_proj"})


def check_divides(config: DecoderConfig, size: int, *, name: str) -> None:
    """Raise ConfigError, with the sizes that would do, if the model `name` cannot be shared among `size` ranks."""
    numbers = {
        "attention heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "MLP columns (intermediate_size)": config.intermediate_size,
    }
    odd = [f"{number} {what}" for what, number in numbers.items() if number % size]
    if odd:
        fitting = [n for n in range(1, config.num_kv_heads + 1) if not any(number % n for number in numbers.values())]
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the {' and the '.join(odd)} of {name}; "
            f"sizes that do: {', '.join(map(str, fitting))}"
        )


def rank_config(config: DecoderConfig, group: Group) -> DecoderConfig:
    """The shape of one rank's part."""
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // group.size,
        num_kv_heads=config.num_kv_heads // group.size,
        intermediate_size=config.intermediate_size // group.size,
    )


def rank_tensors(tensors: Iterable[StoredTensor], group: Group) -> list[StoredTensor]:
    """The rank's part of each. Raises ModelError for a matrix of a layer for which there is no rule."""
    return [_rank_tensor(stored, group) for stored in tensors]


def _rank_tensor(stored: StoredTensor, group: Group) -> StoredTensor:
    match = _PART.fullmatch(stored.name)
    if match is None:
        if stored.name.startswith("model.layers.") and len(stored.shape) > 1:
            raise ModelError(f"tensor {stored.name} {list(stored.shape)}: nothing says how ranks of tensor parallelism share it")
        return stored
    part, kind = match.groups()
    if part in _CUT_BY_ROWS:
        return SomeRows(stored, *_share(stored.shape[0], group))
    if part not in _CUT_BY_COLUMNS:
        raise ModelError(f"tensor {stored.name}: nothing says how ranks of tensor parallelism share it")
    if kind == "weight":
        return SomeColumns(stored, *_share(stored.shape[1], group))
    return stored if group.rank == 0 else Zeros(stored.name, stored.shape)  # it is added to the sum once


def _share(number: int, group: Group) -> tuple[int, int]:
    """Where the rank's part begins, and how long it is."""
    count = number // group.size
    return group.rank * count, count


@dataclass(frozen=True, slots=True)
class SomeRows:
    """Rows `first` to `first + count` of a stored tensor."""

    whole: StoredTensor
    first: int
    count: int

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.whole.shape[1:])

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(_read(self.whole, out.dtype)[self.first : self.first + self.count])

    def read_packed(self) -> UnreadRows | None:
        packed = self.whole.read_packed()
        return None if packed is None else UnreadRows(packed.kind, lambda: packed.data[self.first : self.first + self.count])


@dataclass(frozen=True, slots=True)
class SomeColumns:
    """Columns `first` to `first + count` of a stored matrix. Blocks run along the columns: packed it is cut after packing."""

    whole: StoredTensor
    first: int
    count: int

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.whole.shape[0], self.count)

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(_read(self.whole, out.dtype)[:, self.first : self.first + self.count])

    def read_packed(self) -> PackedRows | None:
        return None


def _read(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty(stored.shape, dtype=dtype)
    stored.read_into(whole)
    return whole
