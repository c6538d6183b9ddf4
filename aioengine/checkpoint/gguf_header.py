"""The header of a GGUF file: metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's `GGUFReader` is not used, because it builds an array
object for every token of the vocabulary, which takes seconds.

A file may come from anybody. Every read is checked against the file's size before it happens, no memory is taken for a count
that the file merely states, and what is left after parsing is a header whose tensors lie in the file, apart from each other.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aioengine.errors import ModelError

Scalar = int | float | bool | str

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# More than any real file has: the header is garbage.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_ARRAY_ITEMS = 1 << 22  # the largest vocabularies have 2^18 tokens and twice as many merges
_MAX_STRING_BYTES = 1 << 24  # the longest are chat templates
_MAX_NAME_BYTES = 1 << 12  # of keys and tensors
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 13, 32  # length, type and value; length, dimensions, size, type and offset
_DEFAULT_ALIGNMENT = 32
_ALIGNMENT_STEP = 8  # the format's rule; it also keeps every number at an address of its size


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as in torch
    kind: GGMLQuantizationType
    start: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """A metadata array, which is not kept: only the conversion needs its items (`GGUFFile.strings`, `GGUFFile.numbers`)."""

    num_items: int
    code: str  # the items' letter in `struct`; "" for strings
    start: int  # of the first item, in bytes from the start of the file

    @property
    def of_strings(self) -> bool:
        return self.code == ""


Value = Scalar | ArrayInfo


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])


def read_header(path: Path) -> GGUFHeader:
    """Parse a file's header. Raises ModelError if it is no GGUF file, truncated anywhere, or inconsistent."""
    return parse_header(path, map_file(path))


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Copy on write: torch warns about tensors over read-only memory. Nothing writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"cannot read {path}: {error}") from error


class Cursor:
    """Reads little-endian values in order; running off the end is a ModelError that says where."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.at = 0

    def advance(self, count: int) -> int:
        start = self.at
        self.at = start + count
        if self.at > self.size:
            raise ModelError(f"{self.path} is truncated: the header needs byte {self.at}, the file has {self.size}")
        return start

    def scalar(self, code: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.data, self.advance(layout.size))
        assert isinstance(value, int | float | bool)
        return value

    def count(self, what: str, *, limit: int, item_bytes: int) -> int:
        """How many items follow, each of at least `item_bytes`: checked before anybody loops or takes memory."""
        value = int(self.scalar("Q"))
        if value > limit:
            raise ModelError(f"{self.path} is damaged: {value} {what} before byte {self.at}, the limit is {limit}")
        if value * item_bytes > self.size - self.at:
            raise ModelError(
                f"{self.path} is truncated: {value} {what} take at least {value * item_bytes} bytes from byte {self.at} on, "
                f"the file has {self.size}"
            )
        return value

    def string(self, what: str, *, limit: int = _MAX_STRING_BYTES) -> str:
        length = self.count(f"bytes of {what}", limit=limit, item_bytes=1)
        start = self.advance(length)
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path} is damaged: {what} at byte {start} is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        """A vocabulary: 50,000 to 250,000 strings that only the tokenizer's conversion needs."""
        unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, self.size - 8
        for _ in range(count):
            if at > end:
                self.at = at
                self.advance(8)
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.advance(0)

    def value(self) -> Value:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string("a value")
        if kind != _ARRAY:
            return self.scalar(self._code(kind))
        item = self.scalar("I")
        if item == _ARRAY:
            raise ModelError(f"{self.path} is damaged: an array of arrays at byte {self.at}")
        item_bytes = 8 if item == _STRING else struct.calcsize("<" + self._code(item))
        count = self.count("array items", limit=_MAX_ARRAY_ITEMS, item_bytes=item_bytes)
        start = self.at
        if item == _STRING:
            self.skip_strings(count)
            return ArrayInfo(count, code="", start=start)
        self.advance(count * item_bytes)
        return ArrayInfo(count, code=self._code(item), start=start)

    def _code(self, kind: float) -> str:
        code = _SCALARS.get(int(kind))
        if code is None:
            raise ModelError(f"{self.path} is damaged: unknown value type {kind} at byte {self.at}")
        return code


def parse_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = Cursor(data, path)
    magic = data[:4]
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'")
    cursor.advance(4)
    version = int(cursor.scalar("I"))
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
    num_tensors = cursor.count("tensors", limit=_MAX_TENSORS, item_bytes=_MIN_TENSOR_BYTES)
    num_keys = cursor.count("metadata keys", limit=_MAX_KEYS, item_bytes=_MIN_KEY_BYTES)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string("a metadata key", limit=_MAX_NAME_BYTES)
        if key in metadata:
            raise ModelError(f"{path} is damaged: the metadata key {key!r} appears twice")
        metadata[key] = cursor.value()
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"{path} does not name its architecture (general.architecture)")
    relative = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1 or alignment % _ALIGNMENT_STEP:
        raise ModelError(f"{path} is damaged: general.alignment must be a multiple of {_ALIGNMENT_STEP}, got {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(path, info, start, len(data), alignment) for info in relative)
    _check_apart(path, tensors)
    return GGUFHeader(path, MappingProxyType(metadata), tensors)


def _check_apart(path: Path, tensors: tuple[TensorInfo, ...]) -> None:
    """No name twice and no byte in two tensors: else a small file could pass for a large model."""
    names: set[str] = set()
    for info in tensors:
        if info.name in names:
            raise ModelError(f"{path} is damaged: tensor {info.name!r} appears twice")
        names.add(info.name)
    before: TensorInfo | None = None
    for info in sorted(tensors, key=lambda info: info.start):
        if before is not None and info.start < before.start + before.num_bytes:
            raise ModelError(
                f"{path} is damaged: tensor {info.name!r} starts at byte {info.start}, within {before.name!r}, "
                f"which ends at byte {before.start + before.num_bytes}"
            )
        before = info


def _read_info(cursor: Cursor) -> TensorInfo:
    name = cursor.string("a tensor's name", limit=_MAX_NAME_BYTES)
    dimensions = int(cursor.scalar("I"))
    if not 1 <= dimensions <= 4:
        raise ModelError(f"{cursor.path} is damaged: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(int(cursor.scalar("Q")) for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise ModelError(f"{cursor.path} is damaged: tensor {name!r} has the empty shape {list(shape)}")
    number = int(cursor.scalar("I"))
    offset = int(cursor.scalar("Q"))
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(f"{cursor.path}: tensor {name!r} has the unknown type {number}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise ModelError(f"{cursor.path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of the {kind.name} block of {block_size}")
    count = 1
    for size in shape:
        count *= size
    return TensorInfo(name, shape, kind, offset, count // block_size * block_bytes)


def _place(path: Path, info: TensorInfo, data_start: int, file_size: int, alignment: int) -> TensorInfo:
    """Turn the offset from the data section's start into one from the file's, within the file."""
    if info.start % alignment:
        raise ModelError(f"{path} is damaged: tensor {info.name!r} has the offset {info.start}, not a multiple of {alignment}")
    start = data_start + info.start
    if start + info.num_bytes > file_size:
        raise ModelError(f"{path} is truncated: tensor {info.name!r} ends at byte {start + info.num_bytes}, the file has {file_size}")
    return TensorInfo(info.name, info.shape, info.kind, start, info.num_bytes)
