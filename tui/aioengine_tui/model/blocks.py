"""The KV blocks: who owns which, which can still be found by content, and what changed a moment ago."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, get_args

from aioengine.core.scheduler_output import BlockChanges
from aioengine.events.step_event import EngineSnapshot

BlockState = Literal["empty", "free_cached", "used", "shared", "allocated", "released"]
"""A block is free if it can be allocated, and cached if its content can be found, owned or not. empty: free, and caches nothing.
free_cached: free, but its content can be found. used: one owner. shared: several. allocated: used, and taken a moment ago.
released: free (cached or not), and given back a moment ago."""

EMPTY, FREE_CACHED, USED, SHARED, ALLOCATED, RELEASED = range(6)
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
    group_id: int = 0  # the KV-cache group that it was last given to
    parent_hash: str | None = None  # of the block before it in its prefix; "": it is a first block; None: caches nothing, or not told


class PrefixNode(NamedTuple):
    """A cached block as a node of the prefix tree: its children are the nodes whose parent_hash is its block_hash."""

    block_id: int
    block_hash: str
    parent_hash: str  # "": the first block of a prefix
    num_hits: int  # how often a request was admitted with it, since this viewer attached
    ref_cnt: int


class _Cached(NamedTuple):
    block_hash: str | None  # None: not told
    parent_hash: str | None


class BlockMap:
    """All blocks, ids 1 to `num_blocks` (0 is the null block, which nobody owns)."""

    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self._codes = bytearray(num_blocks + 1)  # FREE..SHARED
        self._owners: dict[int, tuple[str, ...]] = {}  # only blocks that have one
        self._last_owner: dict[int, str] = {}  # of its latest owners the one that had it first
        self._cached: dict[int, _Cached] = {}  # by block id
        self._groups: dict[int, int] = {}  # the KV-cache group that a block was last given to, where it is not the first
        self._hits: dict[str, int] = {}  # by block hash, of cached blocks
        # The free queue: block id -> a number that is lower the sooner the block is taken; None: not known.
        self._free_order: dict[int, int] | None = None
        self._front, self._back = -1, 0  # the numbers of the next blocks that come to its front, and to its back
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
        return self._codes.count(FREE_CACHED)

    @property
    def num_empty(self) -> int:
        """Free, and caching nothing."""
        return self.num_free - self.num_free_cached

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

    def group_of(self, block_id: int) -> int:
        """The KV-cache group that it was last given to."""
        return self._groups.get(block_id, 0)

    def owned_by_group(self, group_id: int) -> list[int]:
        """The blocks of that group which somebody holds."""
        return [block_id for block_id in self._owners if self._groups.get(block_id, 0) == group_id]

    def last_owner(self, block_id: int) -> str | None:
        """A request that holds the block, or was the last to hold it; None: nobody was seen to."""
        return self._last_owner.get(block_id)

    def info(self, block_id: int, *, last_use_step: int | None = None, step_id: int = 0, recent_steps: int = 0) -> BlockInfo:
        """`last_use_step`: of its owners, if it has any. Raises IndexError for an id outside 1..num_blocks."""
        if not 1 <= block_id <= self.num_blocks:
            raise IndexError(f"block {block_id} is outside 1..{self.num_blocks}")
        owners = self.owners(block_id)
        code = self._codes[block_id]
        for step, changed_id, recent in reversed(self._recent) if recent_steps else ():
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
            block_hash=self._cached[block_id].block_hash if block_id in self._cached else None,
            parent_hash=self._cached[block_id].parent_hash if block_id in self._cached else None,
            last_use_step=self._last_use[block_id] if last_use_step is None else last_use_step,
            group_id=self.group_of(block_id),
        )

    def eviction_order(self) -> list[int] | None:
        """The free blocks, the one first that is allocated next; None: an old recording does not tell, or events are missing."""
        order = self._free_order
        return None if order is None else sorted(order, key=order.__getitem__)

    def prefix_nodes(self) -> list[PrefixNode]:
        """The cached blocks whose hash and parent are known, by id. A parent may be gone: it was evicted before its child.

        Of the first KV-cache group: in the others the same contents come again.
        """
        return [
            PrefixNode(block_id, known.block_hash, known.parent_hash, self._hits.get(known.block_hash, 0), len(self.owners(block_id)))
            for block_id, known in sorted(self._cached.items())
            if known.block_hash is not None and known.parent_hash is not None and not self.group_of(block_id)
        ]

    # ------------------------------------------------------------------ folding
    def start_free_queue(self, num_blocks: int) -> None:
        """A new engine begins: all its blocks are free, in the order of their ids."""
        self._set_free_order(range(1, num_blocks + 1))

    def lose_free_queue(self) -> None:
        """Events are missing: the order of the free blocks is not known any more."""
        self._free_order = None

    def _set_free_order(self, block_ids: Iterable[int]) -> None:
        self._free_order = {block_id: number for number, block_id in enumerate(block_ids)}
        self._front, self._back = -1, len(self._free_order)

    def note_hits(self, block_ids: Iterable[int]) -> None:
        """A request was admitted with these blocks, found by their content."""
        for block_id in block_ids:
            known = self._cached.get(block_id)
            if known is not None and known.block_hash is not None:
                self._hits[known.block_hash] = self._hits.get(known.block_hash, 0) + 1

    def resize(self, num_blocks: int) -> None:
        """Grow to what the engine says it has; more is kept, never less (ids of a lossy stream may run ahead)."""
        if num_blocks > self.num_blocks:
            self._codes.extend(bytes(num_blocks - self.num_blocks))
            self._last_use.extend([0] * (num_blocks - self.num_blocks))
            self.num_blocks = num_blocks

    def add_owner(self, request_id: str, block_ids: Iterable[int], *, group_id: int = 0) -> None:
        for block_id in block_ids:
            if not block_id:
                continue  # a window has left it behind
            if block_id > self.num_blocks:
                self.resize(block_id)
            if group_id or self._groups:
                self._set_group(block_id, group_id)
            owners = self._owners.get(block_id, ())
            if not owners:  # nearly always
                self._owners[block_id], self._last_owner[block_id], self._codes[block_id] = (request_id,), request_id, USED
            elif request_id not in owners:
                self._set_owners(block_id, (*owners, request_id))

    def _set_group(self, block_id: int, group_id: int) -> None:
        if group_id:
            self._groups[block_id] = group_id
        else:
            self._groups.pop(block_id, None)

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
            self._last_owner[block_id] = owners[0]
            self._codes[block_id] = SHARED if len(owners) > 1 else USED
        else:
            self._owners.pop(block_id, None)
            self._codes[block_id] = FREE_CACHED if block_id in self._cached else EMPTY

    def note_changes(self, changes: BlockChanges, *, step_id: int) -> None:
        """Apply what an event tells, but for the owners: they follow from the requests' tables."""
        for block_id in changes.evicted:
            known = self._cached.pop(block_id, None)
            if known is not None:
                is_told = known.block_hash in changes.cached_hashes  # then another block has it now
                if known.block_hash is not None and not is_told and not self.group_of(block_id):
                    self._hits.pop(known.block_hash, None)
                if self._codes[block_id] == FREE_CACHED:
                    self._codes[block_id] = EMPTY
        self._cache(changes.cached, hashes=changes.cached_hashes, parent_hashes=changes.cached_parent_hashes)
        if changes.allocated or changes.freed:
            self._recent.extend((step_id, block_id, ALLOCATED) for block_id in changes.allocated if 0 < block_id <= self.num_blocks)
            self._recent.extend((step_id, block_id, RELEASED) for block_id in changes.freed if 0 < block_id <= self.num_blocks)
            self._move_free(changes)

    def _move_free(self, changes: BlockChanges) -> None:
        """What the free queue lost and got, in the order in which it happened."""
        if not len(changes.freed) == len(changes.freed_after) == len(changes.freed_to_front):
            self.lose_free_queue()  # an old recording
        order = self._free_order
        if order is None:
            return
        taken = 0
        for block_id, num_before, to_front in zip(changes.freed, changes.freed_after, changes.freed_to_front, strict=True):
            for allocated_id in changes.allocated[taken:num_before]:
                order.pop(allocated_id, None)
            taken = max(taken, num_before)
            if to_front:
                order[block_id], self._front = self._front, self._front - 1
            else:
                order[block_id], self._back = self._back, self._back + 1
        for allocated_id in changes.allocated[taken:]:
            order.pop(allocated_id, None)

    def _cache(self, block_ids: Sequence[int], *, hashes: Sequence[str], parent_hashes: Sequence[str]) -> None:
        for block_id, block_hash, parent_hash in zip_longest(block_ids, hashes[: len(block_ids)], parent_hashes[: len(block_ids)]):
            if block_id > self.num_blocks:
                self.resize(block_id)
            self._cached[block_id] = _Cached(block_hash, parent_hash)
            if self._codes[block_id] == EMPTY:
                self._codes[block_id] = FREE_CACHED

    def replace_all(self, snapshot: EngineSnapshot) -> None:
        """Take the state of a snapshot; what changed lately, the hits and the last uses stay as far as known."""
        before, hits = self._cached, self._hits
        self.resize(max([snapshot.stats.num_total_blocks, *snapshot.cached_block_ids]))
        self._codes = bytearray(self.num_blocks + 1)
        self._owners.clear()
        self._cached = {}
        self.num_shared = 0
        self._cache(snapshot.cached_block_ids, hashes=snapshot.cached_block_hashes, parent_hashes=snapshot.cached_parent_hashes)
        for block_id, known in self._cached.items():
            if known.block_hash is None and block_id in before:
                self._cached[block_id] = before[block_id]
        self._hits = {known.block_hash: hits[known.block_hash] for known in self._cached.values() if known.block_hash in hits}
        self._groups = dict(zip(snapshot.cached_block_ids, snapshot.cached_block_groups, strict=False))
        for request in snapshot.requests:
            for group_id, table in enumerate([request.block_ids, *request.other_block_ids]):
                self.add_owner(request.request_id, table, group_id=group_id)
        if len(snapshot.free_block_ids) == snapshot.stats.num_free_blocks:
            self._set_free_order(snapshot.free_block_ids)
        else:
            self.lose_free_queue()  # an old recording

    def copy(self) -> BlockMap:
        other = BlockMap()
        other.num_blocks, other.num_shared = self.num_blocks, self.num_shared
        other._codes, other._last_use = self._codes[:], self._last_use[:]
        other._owners, other._cached, other._recent = self._owners.copy(), self._cached.copy(), self._recent.copy()
        other._last_owner, other._groups = self._last_owner.copy(), self._groups.copy()
        other._hits, other._front, other._back = self._hits.copy(), self._front, self._back
        other._free_order = None if self._free_order is None else self._free_order.copy()
        return other
