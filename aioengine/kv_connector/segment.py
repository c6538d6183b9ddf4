"""Two files that hold some blocks: `NAME.data`, the blocks one behind the other, and `NAME.index`, which says what they are.

Both only grow. A block's line in the index is written after the block, with checksums of both. So whatever a crash, a full
disk or a stranger leaves behind, a reader finds either what was written or that it is not: a line that is cut off or whose
checksum is wrong is no line, and a block that does not fit its checksum is not handed out.

Blocks are read with `pread`, not through a mapping: a file that somebody else cuts off then gives fewer bytes instead of
killing the process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from aioengine.kv_connector.base import BlockHash

DATA_SUFFIX, INDEX_SUFFIX = ".data", ".index"
_DATA_MAGIC, _INDEX_MAGIC = b"aioekvd1", b"aioekvi1"
_LINE = struct.Struct("<32sQII")  # block hash, offset, crc of the block; and the crc of these three
_HEADER_SIZE = 8 + 32  # magic, digest of the store's key


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block lies."""

    segment: str  # its name
    offset: int  # bytes into the data file
    crc: int  # of the block's hash and content


def block_crc(block_hash: BlockHash, content: bytes | memoryview) -> int:
    """Of content under its name: a block under another's name does not fit."""
    return crc32(content, crc32(block_hash))


class SegmentWriter:
    """Appends blocks to a new segment. Raises OSError like the disk does; after one no further block may be written."""

    def __init__(self, folder: Path, name: str, *, digest: bytes) -> None:
        self.name = name
        self._paths = (folder / (name + DATA_SUFFIX), folder / (name + INDEX_SUFFIX))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._data = os.open(self._paths[0], flags, 0o600)
        try:
            self._index = os.open(self._paths[1], flags, 0o600)
        except OSError:
            os.close(self._data)
            raise
        self.num_bytes = 0  # of the data file
        self.num_blocks = 0
        self._append(_DATA_MAGIC + digest, _INDEX_MAGIC + digest)

    def append(self, block_hash: BlockHash, content: memoryview) -> BlockPlace:
        place = BlockPlace(self.name, self.num_bytes, block_crc(block_hash, content))
        head = _LINE.pack(block_hash, place.offset, place.crc, 0)[:-4]
        self._append(content, head + struct.pack("<I", crc32(head)))
        self.num_blocks += 1
        return place

    def _append(self, data: bytes | memoryview, line: bytes) -> None:
        write_all(self._data, data)
        self.num_bytes += len(data)
        write_all(self._index, line)

    def close(self) -> None:
        """Idempotent. A segment without a block is removed."""
        if self._data < 0:
            return
        os.close(self._data)
        os.close(self._index)
        self._data = self._index = -1
        if not self.num_blocks:
            for path in self._paths:
                path.unlink(missing_ok=True)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Raises OSError if the disk does not take all of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_index(path: Path, *, digest: bytes, start: int = 0, block_bytes: int) -> tuple[list[tuple[BlockHash, BlockPlace]], int]:
    """The lines of an index file from byte `start` on that are whole and right, and where to go on when it has grown.

    A file that is none of ours, or of another key, has no lines. A wrong line is left out; the ones behind it still count, as
    all have the same length. Raises OSError.
    """
    with path.open("rb") as file:
        if file.read(_HEADER_SIZE) != _INDEX_MAGIC + digest:
            return [], 0
        start = max(start, _HEADER_SIZE)
        file.seek(start)
        lines = file.read()
    num_lines = len(lines) // _LINE.size
    found = list(_read_lines(lines[: num_lines * _LINE.size], path.name.removesuffix(INDEX_SUFFIX), block_bytes=block_bytes))
    return found, start + num_lines * _LINE.size


def _read_lines(lines: bytes, name: str, *, block_bytes: int) -> Iterator[tuple[BlockHash, BlockPlace]]:
    for i, (block_hash, offset, crc, line_crc) in enumerate(_LINE.iter_unpack(lines)):
        head = lines[i * _LINE.size : (i + 1) * _LINE.size - 4]
        if crc32(head) == line_crc and offset >= _HEADER_SIZE and (offset - _HEADER_SIZE) % block_bytes == 0:
            yield block_hash, BlockPlace(name, offset, crc)


def read_block(fd: int, block_hash: BlockHash, place: BlockPlace, *, block_bytes: int) -> bytes | None:
    """The block's content, or None if it is not what was written. Raises OSError."""
    parts, offset, missing = [], place.offset, block_bytes
    while missing:
        part = os.pread(fd, missing, offset)
        if not part:
            return None
        parts.append(part)
        offset += len(part)
        missing -= len(part)
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    return content if block_crc(block_hash, content) == place.crc else None
