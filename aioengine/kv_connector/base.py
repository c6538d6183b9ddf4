"""What an engine asks of a place that keeps KV blocks: find, load, save. Nothing here waits for a disk."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

BlockHash = bytes


@dataclass(frozen=True, slots=True)
class StoreKey:
    """What the bytes of a block depend on beside its tokens: blocks of another key are never looked at."""

    model_sha256: str  # of the weight files
    weights: str  # dense, exact or fast
    isa: str  # of the native kernels, "" where PyTorch computes: other instructions, other bits
    kv_cache_dtype: str
    layout: str  # of the attention backend's cache
    block_size: int  # tokens a block
    block_bytes: int  # of all layers
    root: str  # names the root of the block hashes without giving it away
    model: str = ""  # the model's name, for people; not compared


@dataclass(frozen=True, slots=True)
class KVConnectorStats:
    """Totals since the connector was made, but for the first two: what the store holds now, of this key."""

    num_stored_blocks: int = 0
    stored_bytes: int = 0
    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    num_dropped_blocks: int = 0  # not saved: too many were waiting for the disk, or it refused them
    num_damaged_blocks: int = 0  # found, but not what was written: left out, and computed again
    num_evicted_blocks: int = 0  # removed from the store, the longest unused first, to keep it within its limit


class KVConnector(Protocol):
    """One engine's view of a store. Every method is called in the event loop and returns within microseconds a block."""

    def num_found(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first `hashes` are there, without a gap."""

    def select_missing(self, hashes: Sequence[BlockHash]) -> list[bool]:
        """For each of `hashes`: it is not there, nor on its way."""

    def load(self, hashes: Sequence[BlockHash]) -> Future[list[bytes]]:
        """The content of the first `hashes`, as many as are there undamaged. Never raises for what the store lacks."""

    def save(self, hashes: Sequence[BlockHash], data: memoryview) -> None:
        """Keep the blocks that lie one behind the other in `data`. May drop them: when too much is waiting, or the disk is full."""

    def flush(self) -> Future[None]:
        """Done when what was handed to `save` before is kept or dropped."""

    def stats(self) -> KVConnectorStats:
        """The totals up to now."""

    def close(self) -> None:
        """Keep what is waiting, and let go of files and threads. Idempotent. May take as long as the disk does."""
