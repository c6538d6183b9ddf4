"""The folder that several engines share: one subfolder a key, segments in each, and what it all takes on disk.

A segment's time of change is when one of its blocks was last saved or loaded: that is what "longest unused" goes by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aioengine.errors import ConfigError
from aioengine.kv_connector.base import StoreKey
from aioengine.kv_connector.segment import DATA_SUFFIX, INDEX_SUFFIX, read_index
from aioengine.printable import printable

_KEY_FILE, _SEED_FILE = "key.json", "seed"
_VERSION = "1"  # of the files' form: another one is another key


@dataclass(frozen=True, slots=True)
class Segment:
    folder: Path
    name: str
    num_bytes: int  # of both files
    used: float  # seconds since 1970

    def remove(self) -> None:
        """The index first: what is left of an interrupted removal is no block. Raises OSError but for what is gone."""
        for suffix in (INDEX_SUFFIX, DATA_SUFFIX):
            (self.folder / (self.name + suffix)).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What is kept of one key."""

    name: str  # of the subfolder
    key: StoreKey
    num_blocks: int
    num_bytes: int
    num_segments: int
    used: float  # seconds since 1970, the last time


def open_folder(path: str | Path) -> Path:
    """The folder, made if it is not there, for its owner alone: what is in it tells what was asked. Raises ConfigError."""
    try:
        folder = Path(path).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"kv_cache_dir {printable(str(path))}: no permission to read and write there")
    except (OSError, ValueError) as exc:
        raise ConfigError(f"kv_cache_dir {printable(str(path))}: {getattr(exc, 'strerror', None) or exc}") from exc
    return folder


def read_seed(folder: Path) -> str:
    """The folder's own seed of the block hashes, drawn when it is first used. Who cannot read it cannot guess a hash.

    Raises ConfigError.
    """
    path = folder / _SEED_FILE
    draft = folder / f".{_SEED_FILE}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if not path.exists():
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):  # another engine was first, or will be: all read the same one
                os.link(draft, path)
            draft.unlink()
        seed = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"kv_cache_dir: cannot use {printable(str(path))}: {exc}") from exc
    if len(seed) != 64:
        raise ConfigError(f"kv_cache_dir: {printable(str(path))} holds {len(seed)} characters instead of 64; remove the folder")
    return seed


def key_digest(key: StoreKey) -> bytes:
    """sha256 over the key, its model's name left out."""
    fields = dataclasses.asdict(dataclasses.replace(key, model="")) | {"version": _VERSION}
    return sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def open_subfolder(folder: Path, key: StoreKey) -> Path:
    """Where the blocks of this key are; made if it is not there. Raises ConfigError."""
    subfolder = folder / key_digest(key).hex()[:24]
    try:
        subfolder.mkdir(mode=0o700, exist_ok=True)
        draft = subfolder / f".{_KEY_FILE}-{os.getpid()}"
        draft.write_text(json.dumps(dataclasses.asdict(key), indent=1) + "\n")
        draft.replace(subfolder / _KEY_FILE)
    except OSError as exc:
        raise ConfigError(f"kv_cache_dir: cannot use {printable(str(subfolder))}: {exc.strerror or exc}") from exc
    return subfolder


def list_segments(subfolder: Path) -> list[Segment]:
    """All of them, the longest unused first. What has no index file is none."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in subfolder.glob("*" + INDEX_SUFFIX):
            with contextlib.suppress(OSError):  # removed meanwhile
                index = path.stat()
                data = path.with_suffix(DATA_SUFFIX).stat()
                found.append(Segment(subfolder, path.stem, index.st_size + data.st_size, max(index.st_mtime, data.st_mtime)))
    return sorted(found, key=lambda segment: (segment.used, segment.name))


def read_key(subfolder: Path) -> StoreKey | None:
    """None: the subfolder is none of a store."""
    try:
        return StoreKey(**json.loads((subfolder / _KEY_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _stores(folder: Path) -> Iterator[tuple[Path, StoreKey]]:
    for subfolder in sorted(folder.iterdir()):
        if (key := read_key(subfolder)) is not None:
            yield subfolder, key


def list_stores(folder: Path) -> list[StoreInfo]:
    """What the folder holds, by key. Raises ConfigError if it cannot be read."""
    try:
        return [_store_info(subfolder, key) for subfolder, key in _stores(folder)]
    except OSError as exc:
        raise ConfigError(f"{printable(str(folder))}: {exc.strerror or exc}") from exc


def _store_info(subfolder: Path, key: StoreKey) -> StoreInfo:
    segments = list_segments(subfolder)
    hashes: set[bytes] = set()
    for segment in segments:
        with contextlib.suppress(OSError):
            lines, _ = read_index(subfolder / (segment.name + INDEX_SUFFIX), digest=key_digest(key), block_bytes=key.block_bytes)
            hashes.update(block_hash for block_hash, _ in lines)
    used = max((segment.used for segment in segments), default=0.0)
    return StoreInfo(subfolder.name, key, len(hashes), sum(s.num_bytes for s in segments), len(segments), used)


def prune(folder: Path, *, max_bytes: int, unused_since: float = 0.0, keep: frozenset[str] = frozenset()) -> list[Segment]:
    """Remove segments until the folder takes `max_bytes`, the longest unused first, and all that were last used before
    `unused_since` (seconds since 1970). Returns what was removed.

    keep: names of segments that are being written to; an engine that runs elsewhere notices that one of its own is gone and
    starts another. Raises ConfigError if the folder cannot be read or a segment cannot be removed.
    """
    removed = []
    try:
        segments = [segment for subfolder, _ in _stores(folder) for segment in list_segments(subfolder)]
        total = sum(segment.num_bytes for segment in segments)
        for segment in sorted(segments, key=lambda segment: (segment.used, segment.name)):
            if segment.name in keep or (total <= max_bytes and segment.used >= unused_since):
                continue
            segment.remove()
            removed.append(segment)
            total -= segment.num_bytes
    except OSError as exc:
        raise ConfigError(f"{printable(str(folder))}: {exc.strerror or exc}") from exc
    return removed


def touch(subfolder: Path, name: str) -> None:
    """A block of this segment was used just now."""
    with contextlib.suppress(OSError):  # removed meanwhile, or a read-only file system: then it ages
        os.utime(subfolder / (name + INDEX_SUFFIX))
