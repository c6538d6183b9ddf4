"""safetensors checkpoints: one file or several with an index, memory-mapped by the `safetensors` package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aioengine.errors import ModelError
from aioengine.layers.weight_format import PackedRows
from aioengine.models.json_file import read_json

INDEX_NAME = "model.safetensors.index.json"


def find_safetensors(folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder: those the index lists, else model.safetensors, else the only one there.

    Empty if there is none. Raises ModelError if the index names a file that is missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        files = tuple(folder / name for name in sorted({_file_name(index, value) for value in weight_map.values()}))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} lists")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise ModelError(f"{folder} has {len(found)} .safetensors files and no {INDEX_NAME} that says which belong together")
    return tuple(found)


def _file_name(index: Path, value: Any) -> str:
    """A file beside the index, not a path that leads elsewhere."""
    if not isinstance(value, str) or Path(value).name != value or "\0" in value:
        raise ModelError(f"{index}: weight_map must name files of the same folder, got {value!r:.200}")
    return value


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A `StoredTensor` of a safetensors file."""

    handle: Any
    name: str
    shape: tuple[int, ...]
    path: Path

    def read_into(self, out: torch.Tensor) -> None:
        try:
            stored: torch.Tensor = self.handle.get_tensor(self.name)
        except Exception as error:  # what a dtype that torch lacks raises differs between releases of safetensors
            raise ModelError(f"{self.path}: cannot read tensor {self.name}: {error}") from error
        if not stored.is_floating_point():
            raise ModelError(f"{self.path}: tensor {self.name} is stored as {stored.dtype}; quantized safetensors are not supported")
        out.copy_(stored)

    def read_packed(self) -> PackedRows | None:
        return None


def open_safetensors(path: Path) -> Iterator[SafetensorsTensor]:
    """Every tensor of one file, not read yet. Raises ModelError for a damaged or truncated file."""
    try:
        handle: Any = safe_open(path, framework="pt", device="cpu")
        names = list(handle.keys())
        shapes = [tuple(handle.get_slice(name).get_shape()) for name in names]
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    for name, shape in zip(names, shapes, strict=True):
        yield SafetensorsTensor(handle, name, shape, path)
