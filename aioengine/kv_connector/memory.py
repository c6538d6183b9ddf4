"""A store in the memory of this process: for tests, and for several engines one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from aioengine.kv_connector.base import BlockHash, KVConnectorStats


class MemoryConnector:
    """Keeps up to `max_blocks` blocks, the longest unused leave first. All of one key."""

    def __init__(self, *, max_blocks: int = 1 << 16) -> None:
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[BlockHash, bytes] = OrderedDict()
        self._num_saved = self._num_loaded = self._num_evicted = 0

    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        return next((i for i, block_hash in enumerate(hashes) if block_hash not in self._blocks), len(hashes))

    def select_missing(self, hashes: Sequence[BlockHash]) -> list[bool]:
        return [block_hash not in self._blocks for block_hash in hashes]

    def load(self, hashes: Sequence[BlockHash]) -> Future[list[bytes]]:
        found = hashes[: self.num_found(hashes)]
        for block_hash in found:
            self._blocks.move_to_end(block_hash)
        self._num_loaded += len(found)
        future: Future[list[bytes]] = Future()
        future.set_result([self._blocks[block_hash] for block_hash in found])
        return future

    def save(self, hashes: Sequence[BlockHash], data: memoryview) -> None:
        size = len(data) // max(len(hashes), 1)
        for i, block_hash in enumerate(hashes):
            self._blocks[block_hash] = bytes(data[i * size : (i + 1) * size])
            self._blocks.move_to_end(block_hash)
        self._num_saved += len(hashes)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)
            self._num_evicted += 1

    def flush(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def stats(self) -> KVConnectorStats:
        return KVConnectorStats(
            num_stored_blocks=len(self._blocks),
            stored_bytes=sum(map(len, self._blocks.values())),
            num_saved_blocks=self._num_saved,
            num_loaded_blocks=self._num_loaded,
            num_evicted_blocks=self._num_evicted,
        )

    def close(self) -> None:
        """Nothing to let go of: the blocks stay for the next engine."""
