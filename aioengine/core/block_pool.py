"""Who holds which KV block: reference counts, the free queue, and the index of cached content.

A free block keeps its content until it is allocated anew, so that a later request with the same prefix can take it back.
Blocks are plain integers and their attributes parallel lists: a step touches thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aioengine.core.block_hash import BlockHash, short_hash
from aioengine.core.scheduler_output import BlockChanges

NULL_BLOCK_ID = 0
"""Never allocated, never written by a request: padding in block tables points at it."""


class FreeBlockQueue:
    """A doubly linked list over block ids, in two integer lists.

    Not a deque: a cache hit takes a block out of the middle, which must not cost a scan.
    """

    __slots__ = ("_end", "_next", "_prev", "num_blocks")

    def __init__(self, num_ids: int) -> None:
        self._end = num_ids  # sentinel: its next is the head, its previous the tail
        self._next = [-1] * (num_ids + 1)  # -1: not in the queue
        self._prev = [-1] * (num_ids + 1)
        self._next[self._end] = self._prev[self._end] = self._end
        self.num_blocks = 0

    def _insert(self, block_id: int, *, before: int) -> None:
        after = self._prev[before]
        self._next[after] = self._prev[before] = block_id
        self._prev[block_id], self._next[block_id] = after, before
        self.num_blocks += 1

    def append(self, block_id: int) -> None:
        self._insert(block_id, before=self._end)

    def prepend(self, block_id: int) -> None:
        self._insert(block_id, before=self._next[self._end])

    def remove(self, block_id: int) -> None:
        self.remove_all((block_id,))

    def popleft(self) -> int:
        (head,) = self.take(1)
        return head

    # The same for many blocks in one pass: a cache hit on a long prompt moves hundreds.
    def extend(self, block_ids: Sequence[int]) -> None:
        """Append them one after the other."""
        following, before, end = self._next, self._prev, self._end
        last = before[end]
        for block_id in block_ids:
            following[last], before[block_id] = block_id, last
            last = block_id
        following[last], before[end] = end, last
        self.num_blocks += len(block_ids)

    def remove_all(self, block_ids: Sequence[int]) -> None:
        """Take them out, wherever they are."""
        following, before = self._next, self._prev
        for block_id in block_ids:
            after = following[block_id]
            assert after >= 0, f"block {block_id} is not in the free queue"
            ahead = before[block_id]
            following[ahead], before[after] = after, ahead
            following[block_id] = -1
        self.num_blocks -= len(block_ids)

    def take(self, num_blocks: int) -> list[int]:
        """The first ones, taken out."""
        following, head = self._next, self._next[self._end]
        block_ids: list[int] = []
        for _ in range(num_blocks):
            assert head != self._end, "the free queue is empty"
            block_ids.append(head)
            following[head], head = -1, following[head]
        following[self._end], self._prev[head] = head, self._end
        self.num_blocks -= num_blocks
        return block_ids

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] >= 0

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._end]
        while block_id != self._end:
            yield block_id
            block_id = self._next[block_id]


class BlockPool:
    """All blocks of the KV cache. `num_blocks` includes the null block, which is never handed out."""

    def __init__(self, num_blocks: int, *, keeps_leaving: bool = False) -> None:
        """keeps_leaving: note which content is lost to new owners, for `take_leaving`."""
        assert num_blocks >= 2, f"a pool needs the null block and one more, got {num_blocks}"
        self.num_blocks = num_blocks
        self.ref_cnt: list[int] = [0] * num_blocks
        self.block_hash: list[BlockHash | None] = [None] * num_blocks
        self.parent_hash: list[BlockHash | None] = [None] * num_blocks  # of what block_hash names; None: a first block, or nothing
        self.free_block_queue = FreeBlockQueue(num_blocks)
        for block_id in range(1, num_blocks):
            self.free_block_queue.append(block_id)
        self._cached: dict[BlockHash, int] = {}
        # Owned blocks whose content another block is found for; each takes its place when that one is allocated anew.
        self._twins: dict[BlockHash, list[int]] = {}
        self._twin_hash: dict[int, BlockHash] = {}
        self._keeps_leaving = keeps_leaving
        self._leaving: list[tuple[int, BlockHash]] = []
        self._allocated: list[int] = []
        self._freed: list[int] = []
        self._freed_after: list[int] = []  # of each of _freed: how many of _allocated came before
        self._freed_to_front: list[bool] = []
        self._evicted: list[int] = []
        self._registered: list[int] = []
        self.num_evicted_blocks = 0  # total

    @property
    def num_total_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.free_block_queue.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the free queue; what they cached is forgotten."""
        assert num_blocks <= self.num_free_blocks, f"{num_blocks} blocks wanted, {self.num_free_blocks} free"
        block_ids = self.free_block_queue.take(num_blocks)
        for block_id in block_ids:
            self.ref_cnt[block_id] = 1
            block_hash = self.block_hash[block_id]
            if block_hash is not None:
                parent_hash = self.parent_hash[block_id]
                self._forget(block_id)
                self._promote_twin(block_hash, parent_hash)
                if self._keeps_leaving and block_hash not in self._cached:
                    self._leaving.append((block_id, block_hash))
        self._allocated += block_ids
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """One more owner for blocks whose content is wanted, no block twice; those that were free leave the free queue."""
        ref_cnt = self.ref_cnt
        free = [block_id for block_id in block_ids if ref_cnt[block_id] == 0]
        self.free_block_queue.remove_all(free)
        self._allocated += free
        for block_id in block_ids:
            ref_cnt[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One owner less for each block of a table, given in the table's order.

        The free queue is in the order of eviction: blocks that cache nothing first, then the least recently used; of one
        table the tail first, since a prefix is worth more than what follows it. A twin that nobody owns is worth nothing.
        """
        ref_cnt, block_hash = self.ref_cnt, self.block_hash
        to_front: list[bool] = []
        to_back: list[int] = []
        for block_id in reversed(block_ids):
            ref_cnt[block_id] = num_owners = ref_cnt[block_id] - 1
            if num_owners == 0:
                self._freed.append(block_id)
                to_front.append(block_hash[block_id] is None)
                if block_hash[block_id] is None:
                    self._drop_twin(block_id)
                    self.free_block_queue.prepend(block_id)
                else:
                    to_back.append(block_id)
        self.free_block_queue.extend(to_back)
        self._freed_after += [len(self._allocated)] * len(to_front)
        self._freed_to_front += to_front

    def register(self, block_id: int, block_hash: BlockHash, *, parent_hash: BlockHash | None = None) -> None:
        """Let later requests find this owned block's content. If another block has the same content, that one stays the one
        for as long as it has it. `parent_hash` names the content of the block before it; None: it is the first.
        """
        if block_hash not in self._cached:
            self._cached[block_hash] = block_id
            self.block_hash[block_id] = block_hash
            self.parent_hash[block_id] = parent_hash
            self._registered.append(block_id)
        elif self._cached[block_hash] != block_id and block_id not in self._twin_hash:
            self._twin_hash[block_id] = block_hash
            self._twins.setdefault(block_hash, []).append(block_id)

    def _promote_twin(self, block_hash: BlockHash, parent_hash: BlockHash | None) -> None:
        """The block that was found for this content is gone: the oldest of its twins is found from now on."""
        twins = self._twins.get(block_hash)
        if twins:
            block_id = twins[0]
            self._drop_twin(block_id)
            self.register(block_id, block_hash, parent_hash=parent_hash)

    def _drop_twin(self, block_id: int) -> None:
        block_hash = self._twin_hash.pop(block_id, None) if self._twin_hash else None
        if block_hash is not None:
            twins = self._twins[block_hash]
            twins.remove(block_id)
            if not twins:
                del self._twins[block_hash]

    def find(self, block_hash: BlockHash) -> int | None:
        return self._cached.get(block_hash)

    def find_prefix(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the first ones of these contents, up to the first that is not found."""
        return list(iter(map(self._cached.get, block_hashes).__next__, None))  # a loop in C: None ends it

    def take_leaving(self) -> list[tuple[int, BlockHash]]:
        """Blocks that were allocated anew since the last call, and the content that they still have until somebody writes to them."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def cached_blocks(self) -> list[tuple[int, BlockHash]]:
        """All blocks whose content is found, in the order in which it became so."""
        return [(block_id, block_hash) for block_hash, block_id in self._cached.items()]

    def cached_block_ids(self) -> list[int]:
        return sorted(self._cached.values())

    def forget(self, block_hashes: Iterable[BlockHash]) -> None:
        """Serve this content to nobody any more, from whichever block. Owners of such blocks, if any, keep them."""
        for block_hash in block_hashes:
            for twin in self._twins.pop(block_hash, ()):
                del self._twin_hash[twin]
            block_id = self._cached.get(block_hash)
            if block_id is not None:
                self._forget(block_id)

    def reset_cache(self) -> None:
        """Forget all cached content. Blocks in use keep their owners."""
        self._twins.clear()
        self._twin_hash.clear()
        for block_id in list(self._cached.values()):
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        block_hash = self.block_hash[block_id]
        assert block_hash is not None
        del self._cached[block_hash]
        self.block_hash[block_id] = self.parent_hash[block_id] = None
        self._evicted.append(block_id)
        self.num_evicted_blocks += 1

    def take_changes(self) -> BlockChanges:
        """What happened to blocks since the last call."""
        cached = [block_id for block_id in dict.fromkeys(self._registered) if self.block_hash[block_id] is not None]
        changes = BlockChanges(
            allocated=self._allocated,
            freed=self._freed,
            evicted=self._evicted,
            cached=cached,
            cached_hashes=[self.short_hash(block_id) for block_id in cached],
            cached_parent_hashes=[self.short_parent_hash(block_id) for block_id in cached],
            freed_after=self._freed_after,
            freed_to_front=self._freed_to_front,
        )
        self.drop_changes()
        return changes

    def drop_changes(self) -> None:
        """Nobody asks what happened since the last call. Costs nothing, where `take_changes` writes out hashes."""
        self._allocated, self._freed, self._evicted, self._registered = [], [], [], []
        self._freed_after, self._freed_to_front = [], []

    def short_hash(self, block_id: int) -> str:
        """The first hex digits of what a block caches, for people to tell contents apart; "" for a block that caches nothing."""
        return short_hash(self.block_hash[block_id])

    def short_parent_hash(self, block_id: int) -> str:
        """The same of the block before it in its prefix; "" for a first block, or one that caches nothing."""
        return short_hash(self.parent_hash[block_id])
