"""A store of KV blocks in files, which outlives the process and which several processes may share.

Two threads: one reads, one writes; the event loop only asks a dictionary. Each process appends to segments of its own and
reads everybody's. See `segment` for what the files hold, `folder` for where they are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from aioengine.errors import ConfigError
from aioengine.kv_connector.base import BlockHash, KVConnectorStats, StoreKey
from aioengine.kv_connector.folder import key_digest, list_segments, open_folder, open_subfolder, prune, touch
from aioengine.kv_connector.segment import DATA_SUFFIX, INDEX_SUFFIX, BlockPlace, SegmentWriter, read_block, read_index
from aioengine.printable import get_logger, printable

logger = get_logger(__name__)

_SEGMENT_BYTES = 32 << 20  # a segment is removed as a whole
_MAX_WAITING_BYTES = 512 << 20  # handed to `save` and not yet written
_MAX_OPEN_SEGMENTS = 64
_REFRESH_S = 1.0


class FileConnector:
    """See `KVConnector`. Keeps the whole folder, all keys together, within `max_bytes`."""

    def __init__(self, path: str | Path, key: StoreKey, *, max_bytes: int, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self.folder = open_folder(path)
        self.key = key
        self.max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(max_bytes // 4, 1))
        self._digest = key_digest(key)
        self._subfolder = open_subfolder(self.folder, key)
        self._places: dict[BlockHash, BlockPlace] = {}
        self._read_to: dict[str, int] = {}  # segment -> bytes of its index that have been read
        self._open: OrderedDict[str, int] = OrderedDict()  # segment -> descriptor of its data; the reader's thread alone uses it
        self._writer: SegmentWriter | None = None  # the writer's thread alone uses it
        self._lock = threading.Lock()  # of the totals, and of _places while it is changed
        self._saving: set[BlockHash] = set()
        self._waiting_bytes = 0
        self._num_saved = self._num_loaded = self._num_dropped = self._num_damaged = self._num_evicted = 0
        self._refreshed = 0.0
        self._warned = False
        self._is_closed = False
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="aioengine-kv-load")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="aioengine-kv-save")
        self._refresh()

    # ------------------------------------------------------------------ in the event loop
    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        places = self._places
        num = next((i for i, block_hash in enumerate(hashes) if block_hash not in places), len(hashes))
        if num < len(hashes) and time.monotonic() - self._refreshed > _REFRESH_S and not self._is_closed:
            self._refreshed = time.monotonic()
            self._reads.submit(self._refresh)  # for the next one who asks: another process may have saved them
        return num

    def select_missing(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [block_hash not in self._places and block_hash not in self._saving for block_hash in hashes]

    def load(self, hashes: Sequence[BlockHash]) -> Future[list[bytes]]:
        return self._reads.submit(self._load, list(hashes))

    def save(self, hashes: Sequence[BlockHash], data: memoryview) -> None:
        if self._is_closed or self._waiting_bytes + len(data) > _MAX_WAITING_BYTES:
            with self._lock:
                self._num_dropped += len(hashes)
            return
        with self._lock:
            self._waiting_bytes += len(data)
            self._saving.update(hashes)
        self._writes.submit(self._save, list(hashes), data)

    def flush(self) -> Future[None]:
        return self._writes.submit(lambda: None)

    def stats(self) -> KVConnectorStats:
        with self._lock:
            return KVConnectorStats(
                num_stored_blocks=len(self._places),
                stored_bytes=len(self._places) * self.key.block_bytes,
                num_saved_blocks=self._num_saved,
                num_loaded_blocks=self._num_loaded,
                num_dropped_blocks=self._num_dropped,
                num_damaged_blocks=self._num_damaged,
                num_evicted_blocks=self._num_evicted,
            )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._writes.submit(self._roll)
        self._writes.shutdown()
        self._reads.shutdown(cancel_futures=True)
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    # ------------------------------------------------------------------ in the reader's thread
    def _refresh(self) -> None:
        """Learn what other processes saved, and which segments are gone."""
        segments = {segment.name: segment for segment in list_segments(self._subfolder)}
        for name in segments:
            with contextlib.suppress(OSError):  # removed meanwhile
                lines, self._read_to[name] = read_index(
                    self._subfolder / (name + INDEX_SUFFIX),
                    digest=self._digest,
                    start=self._read_to.get(name, 0),
                    block_bytes=self.key.block_bytes,
                )
                with self._lock:
                    self._places.update(lines)
        for name in [name for name in self._read_to if name not in segments]:
            del self._read_to[name]
            self._forget(name)
        self._refreshed = time.monotonic()

    def _forget(self, segment: str) -> None:
        with self._lock:
            gone = [block_hash for block_hash, place in self._places.items() if place.segment == segment]
            for block_hash in gone:
                del self._places[block_hash]

    def _load(self, hashes: list[BlockHash]) -> list[bytes]:
        contents: list[bytes] = []
        used: dict[str, None] = {}
        for block_hash in hashes:
            place = self._places.get(block_hash)
            content = None if place is None else self._read(block_hash, place)
            if place is None or content is None:
                break
            contents.append(content)
            used[place.segment] = None
        for segment in used:
            touch(self._subfolder, segment)
        with self._lock:
            self._num_loaded += len(contents)
        return contents

    def _read(self, block_hash: BlockHash, place: BlockPlace) -> bytes | None:
        """A damaged or vanished block is forgotten: it will be computed, and saved anew."""
        try:
            content = read_block(self._descriptor(place.segment), block_hash, place, block_bytes=self.key.block_bytes)
        except OSError as exc:
            logger.warning("cannot read KV blocks of %s: %s", printable(place.segment), exc)
            content = None
        if content is None:
            with self._lock:
                self._num_damaged += 1
                if self._places.get(block_hash) is place:
                    del self._places[block_hash]
        return content

    def _descriptor(self, segment: str) -> int:
        fd = self._open.get(segment)
        if fd is None:
            fd = self._open[segment] = os.open(self._subfolder / (segment + DATA_SUFFIX), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            if len(self._open) > _MAX_OPEN_SEGMENTS:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(segment)
        return fd

    # ------------------------------------------------------------------ in the writer's thread
    def _save(self, hashes: list[BlockHash], data: memoryview) -> None:
        size = self.key.block_bytes
        num_written = 0
        try:
            for i, block_hash in enumerate(hashes):
                if block_hash not in self._places:
                    self._append(block_hash, data[i * size : (i + 1) * size])
                    num_written += 1
        except OSError as exc:
            if not self._warned:
                self._warned = True
                logger.warning("KV blocks are not saved in %s: %s", printable(str(self._subfolder)), exc)
            self._roll()  # what is behind a half-written block would not be found
            with self._lock:
                self._num_dropped += len(hashes) - num_written
        except ConfigError as exc:  # of `prune`
            logger.warning("%s", exc)
        finally:
            with self._lock:
                self._num_saved += num_written
                self._waiting_bytes -= len(data)
                self._saving.difference_update(hashes)

    def _append(self, block_hash: BlockHash, content: memoryview) -> None:
        if self._writer is not None and (self._writer.num_bytes >= self._segment_bytes or not self._is_there(self._writer)):
            self._roll()
        if self._writer is None:
            self._make_room()
            name = f"{time.time_ns():016x}-{os.getpid()}-{secrets.token_hex(3)}"
            self._writer = SegmentWriter(self._subfolder, name, digest=self._digest)
        place = self._writer.append(block_hash, content)
        with self._lock:
            self._places[block_hash] = place

    def _is_there(self, writer: SegmentWriter) -> bool:
        """Somebody may have pruned it while it was written."""
        return (self._subfolder / (writer.name + INDEX_SUFFIX)).exists()

    def _roll(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def _make_room(self) -> None:
        """Before a segment is begun, so that the folder does not exceed its limit when the segment is full."""
        for segment in prune(self.folder, max_bytes=self.max_bytes - self._segment_bytes):
            if segment.folder == self._subfolder:
                before = len(self._places)
                self._forget(segment.name)
                with self._lock:
                    self._num_evicted += before - len(self._places)
