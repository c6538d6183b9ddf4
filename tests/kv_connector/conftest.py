"""A store of small blocks, and names for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from aioengine.kv_connector.base import StoreKey
from aioengine.kv_connector.file_store import FileConnector

BLOCK_BYTES = 96
KEY = StoreKey(
    model_sha256="ab" * 32,
    weights="fast",
    isa="avx2",
    kv_cache_dtype="float16",
    layout="cpu",
    block_size=16,
    block_bytes=BLOCK_BYTES,
    root="cd" * 8,
    model="tiny",
)

OpenStore = Callable[..., FileConnector]


def block_hash(i: int) -> bytes:
    return sha256(b"block %d" % i).digest()


def content(i: int) -> bytes:
    return sha256(b"content %d" % i).digest() * (BLOCK_BYTES // 32)


def save(store: FileConnector, first: int, end: int) -> list[bytes]:
    """Blocks first .. end - 1, on disk when this returns. Gives their hashes."""
    hashes = [block_hash(i) for i in range(first, end)]
    store.save(hashes, memoryview(b"".join(content(i) for i in range(first, end))))
    store.flush().result(10)
    return hashes


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[FileConnector] = []

    def open_one(*, max_bytes: int = 1 << 20, segment_bytes: int = 1 << 16, key: StoreKey = KEY) -> FileConnector:
        opened.append(FileConnector(tmp_path / "kv", key, max_bytes=max_bytes, segment_bytes=segment_bytes))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
