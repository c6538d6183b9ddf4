"""safetensors checkpoints: one file or several with an index, memory-mapped by the `safetensors` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from aioengine.checkpoint.json_file import read_json
from aioengine.checkpoint.stored_tensor import PackedRows
from aioengine.errors import ModelError
from aioengine.printable import get_logger

logger = get_logger(__name__)

# As the headers name them -> as PyTorch does.
DTYPES: Mapping[str, str] = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})
INDEX_NAME = "model.safetensors.index.json"


def find_safetensors(folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder: model.safetensors, else those that the index lists, else the only one there.

    Empty if there is none. Raises ModelError if the index names a file that is missing.
    """
    single = folder / "model.safetensors"
    if single.is_file():  # before the index, as in transformers
        return (single,)
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
    dtype: str  # as the header names it

    def read_into(self, out: torch.Tensor) -> None:
        self.check()
        out.copy_(self.read_raw())

    def read_raw(self) -> torch.Tensor:
        """As stored, integers and float8 too: for who knows what they mean."""
        try:
            stored: torch.Tensor = self.handle.get_tensor(self.name)
        except Exception as error:  # what a broken header raises differs between releases of safetensors
            raise ModelError(f"{self.path}: cannot read tensor {self.name}: {error}") from error
        return stored

    def read_packed(self) -> PackedRows | None:
        return None

    def check(self) -> None:
        """Raise ModelError for numbers that mean nothing by themselves: integers, and float8 without its scales."""
        if self.dtype not in DTYPES:
            raise ModelError(
                f"{self.path}: tensor {self.name} is stored as {self.dtype}; supported: {', '.join(DTYPES)} "
                "(of a quantized model, use the one that was quantized, or a GGUF file of it)"
            )


def open_safetensors(path: Path) -> Iterator[SafetensorsTensor]:
    """Every tensor of one file, not read yet. Raises ModelError for a damaged or truncated file."""
    try:
        handle: Any = safe_open(path, framework="pt", device="cpu")
        names = list(handle.keys())
        slices = [handle.get_slice(name) for name in names]
        headers = [(tuple(piece.get_shape()), str(piece.get_dtype())) for piece in slices]
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    for name, (shape, dtype) in zip(names, headers, strict=True):
        yield SafetensorsTensor(handle, name, shape, path, dtype)


def open_all_safetensors(paths: Sequence[Path]) -> list[SafetensorsTensor]:
    """Every tensor of a model, not read yet. One that lies in two files is taken from the last of them, as in transformers."""
    found: dict[str, SafetensorsTensor] = {}
    repeated = []
    for path in paths:
        for stored in open_safetensors(path):
            if stored.name in found:
                repeated.append(stored.name)
            found[stored.name] = stored
    if repeated:
        logger.warning(
            "%d tensors lie in two files, %s for one: it is taken from %s", len(repeated), repeated[0], found[repeated[0]].path.name
        )
    return list(found.values())


def stored_dtype(paths: Sequence[Path]) -> str | None:
    """PyTorch's name for the dtype of the first tensor of floating-point numbers; None if there is none."""
    return next((DTYPES[stored.dtype] for path in paths for stored in open_safetensors(path) if stored.dtype in DTYPES), None)
