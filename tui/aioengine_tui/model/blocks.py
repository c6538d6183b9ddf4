"""The KV blocks: who owns which, which can still be found by content, and what changed a moment ago."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

BlockState = Literal["free", "cached", "used", "shared", "allocated", "released"]
"""free: nothing worth keeping. cached: free, but its content can be found. used: one owner. shared: several.
allocated: used, and taken a moment ago. released: free (cached or not), and given back a moment ago."""

FREE, CACHED, USED, SHARED, ALLOCATED, RELEASED = range(6)
"""The codes in `BlockMap.codes()`."""

BLOCK_STATES: tuple[BlockState, ...] = get_args(BlockState)
"""The name of each code."""

_MAX_RECENT = 8192


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block, for a cursor that stands on it."""

    block_id: int
    state: BlockState
    owners: tuple[str, ...]  # request ids
    ref_cnt: int
    is_cached: bool
    block_hash: str | None  # the first hex digits, where the engine tells them
    last_use_step: int  # 0: never seen in use


class BlockMap:
    """All blocks, ids 1 to `num_blocks` (0 is the null block, which nobody owns)."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._codes = bytearray(num_blocks + 1)  # FREE..SHARED
        self._owners: dict[int, tuple[str, ...]] = {}  # only blocks that have one
        self._cached: dict[int, str | None] = {}  # block id -> hash, None if unknown
        self._last_use = array("q", bytes(8 * (num_blocks + 1)))  # when the last owner let go
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_MAX_RECENT)  # (step id, block id, ALLOCATED | RELEASED)
        self.num_shared = 0

    @property
    def num_used(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        """Allocatable ones, cached or not."""
        return self.num_blocks - len(self._owners)

    @property
    def num_cached(self) -> int:
        """Whose content can be found, owned or not."""
        return len(self._cached)

    @property
    def num_free_cached(self) -> int:
        return self._codes.count(CACHED)

    # ------------------------------------------------------------------ reading
    def codes(self, *, step_id: int, recent_steps: int = 0) -> bytes:
        """One byte a block; index 0 is block 1. Changes of the last `recent_steps` steps are shown as such."""
        codes = self._codes[1:]
        for step, block_id, code in reversed(self._recent):
            if step <= step_id - recent_steps:
                break
            owned = codes[block_id - 1] in (USED, SHARED)
            if owned == (code == ALLOCATED) and codes[block_id - 1] < ALLOCATED:
                codes[block_id - 1] = code
        return bytes(codes)

    def owners(self, block_id: int) -> tuple[str, ...]:
        return self._owners.get(block_id, ())

    def info(self, block_id: int, *, last_use_step: int | None = None, step_id: int = 0, recent_steps: int = 0) -> BlockInfo:
        """`last_use_step`: of its owners, if it has any. Raises IndexError for an id outside 1..num_blocks."""
        if not 1 <= block_id <= self.num_blocks:
            raise IndexError(f"block {block_id} is outside 1..{self.num_blocks}")
        owners = self.owners(block_id)
        code = self._codes[block_id]
        for step, changed_id, recent in reversed(self._recent):
            if step <= step_id - recent_steps:
                break
            if changed_id == block_id and (recent == ALLOCATED) == bool(owners):
                code = recent
                break
        return BlockInfo(
            block_id=block_id,
            state=BLOCK_STATES[code],
            owners=owners,
            ref_cnt=len(owners),
            is_cached=block_id in self._cached,
            block_hash=self._cached.get(block_id),
            last_use_step=self._last_use[block_id] if last_use_step is None else last_use_step,
        )

    # ------------------------------------------------------------------ folding
    def resize(self, num_blocks: int) -> None:
        """Grow to what the engine says it has; more is kept, never less (ids of a lossy stream may run ahead)."""
        if num_blocks > self.num_blocks:
            self._codes.extend(bytes(num_blocks - self.num_blocks))
            self._last_use.extend([0] * (num_blocks - self.num_blocks))
            self.num_blocks = num_blocks

    def add_owner(self, request_id: str, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id > self.num_blocks:
                self.resize(block_id)
            owners = self._owners.get(block_id, ())
            if request_id not in owners:
                self._set_owners(block_id, (*owners, request_id))

    def remove_owner(self, request_id: str, block_ids: Iterable[int], *, step_id: int) -> None:
        for block_id in block_ids:
            owners = self._owners.get(block_id, ())
            if request_id in owners:
                self._set_owners(block_id, tuple(owner for owner in owners if owner != request_id))
                self._last_use[block_id] = max(step_id, self._last_use[block_id])

    def _set_owners(self, block_id: int, owners: tuple[str, ...]) -> None:
        self.num_shared += (len(owners) > 1) - (self._codes[block_id] == SHARED)
        if owners:
            self._owners[block_id] = owners
            self._codes[block_id] = SHARED if len(owners) > 1 else USED
        else:
            self._owners.pop(block_id, None)
            self._codes[block_id] = CACHED if block_id in self._cached else FREE

    def note_changes(self, *, step_id: int, allocated: Iterable[int], released: Iterable[int]) -> None:
        self._recent.extend((step_id, block_id, ALLOCATED) for block_id in allocated if 0 < block_id <= self.num_blocks)
        self._recent.extend((step_id, block_id, RELEASED) for block_id in released if 0 < block_id <= self.num_blocks)

    def evict(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._cached.pop(block_id, 0) != 0 and self._codes[block_id] == CACHED:
                self._codes[block_id] = FREE

    def cache(self, block_ids: Iterable[int], hashes: Iterable[str | None]) -> None:
        for block_id, block_hash in zip(block_ids, hashes, strict=False):
            if block_id > self.num_blocks:
                self.resize(block_id)
            self._cached[block_id] = block_hash
            if self._codes[block_id] == FREE:
                self._codes[block_id] = CACHED

    def replace_all(self, num_blocks: int, *, tables: Iterable[tuple[str, list[int]]], cached: dict[int, str | None]) -> None:
        """Take the state of a snapshot; what changed lately and the last uses stay as far as known."""
        self.resize(max([num_blocks, *cached]))
        self._codes = bytearray(self.num_blocks + 1)
        self._owners.clear()
        self._cached = {block_id: block_hash or self._cached.get(block_id) for block_id, block_hash in cached.items()}
        self.num_shared = 0
        for block_id in self._cached:
            self._codes[block_id] = CACHED
        for request_id, block_ids in tables:
            self.add_owner(request_id, block_ids)

    def copy(self) -> BlockMap:
        other = BlockMap()
        other.num_blocks, other.num_shared = self.num_blocks, self.num_shared
        other._codes, other._last_use = self._codes[:], self._last_use[:]
        other._owners, other._cached, other._recent = self._owners.copy(), self._cached.copy(), self._recent.copy()
        return other
