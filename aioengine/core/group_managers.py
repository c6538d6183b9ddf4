"""What the groups of one kind of layer find in the prefix cache: one manager for those that see everything, one for each window.

`KVCacheManager` asks them all and keeps to what they agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aioengine.core.block_hash import BlockHash, in_group, names_in_group
from aioengine.core.block_pool import NULL_BLOCK_ID, BlockPool
from aioengine.kv_cache_groups import KVCacheGroup


class GroupManager(Protocol):
    """Of groups that need the same blocks of a request."""

    def find_hits(self, block_hashes: Sequence[BlockHash], limit: int) -> list[list[int]]:
        """The tables, one for each group and all of one length, of the longest prefix of at most `limit` blocks that they can
        serve: what is computed behind it finds in these blocks all that it sees.
        """


class FullAttentionManager:
    """The layers see everything, so a prefix is served if every group has every block of it."""

    def __init__(self, group_ids: Sequence[int], *, block_pool: BlockPool) -> None:
        self._group_ids = group_ids
        self._find_prefix = block_pool.find_prefix

    def find_hits(self, block_hashes: Sequence[BlockHash], limit: int) -> list[list[int]]:
        tables: list[list[int]] = []
        for group_id in self._group_ids:
            table = self._find_prefix(names_in_group(block_hashes[:limit], group_id))
            limit = len(table)
            tables.append(table)
        return [table[:limit] for table in tables] if len(tables) > 1 else tables


class SlidingWindowManager:
    """The layers see a window, so a prefix is served if every group has the last blocks of it, as far as the window reaches.

    Those before them are not looked for: the null block stands in their place.
    """

    def __init__(self, group_ids: Sequence[int], *, block_pool: BlockPool, sliding_window: int, block_size: int) -> None:
        self._group_ids = group_ids
        self._find = block_pool.find
        self._num_needed = -(-(sliding_window - 1) // block_size)  # blocks that the first token after a prefix sees

    def find_hits(self, block_hashes: Sequence[BlockHash], limit: int) -> list[list[int]]:
        end, num_found = limit, 0  # the last blocks of the prefix that ends at `end`
        for index in range(limit - 1, -1, -1):
            if num_found == self._num_needed:
                break
            if all(self._find(in_group(block_hashes[index], group_id)) is not None for group_id in self._group_ids):
                num_found += 1
            else:
                end, num_found = index, 0
        start = end - num_found
        tables = []
        for group_id in self._group_ids:
            found = map(self._find, names_in_group(block_hashes[start:end], group_id))
            tables.append([NULL_BLOCK_ID] * start + [block_id for block_id in found if block_id is not None])
        return tables


def make_group_managers(groups: Sequence[KVCacheGroup], *, block_pool: BlockPool, block_size: int) -> list[GroupManager]:
    """One for each kind, in the order of the groups. Groups of a kind come one after the other, as `group_layers` makes them."""
    managers: list[GroupManager] = []
    for window in dict.fromkeys(group.sliding_window for group in groups):
        group_ids = [group_id for group_id, group in enumerate(groups) if group.sliding_window == window]
        if window is None:
            managers.append(FullAttentionManager(group_ids, block_pool=block_pool))
        else:
            managers.append(SlidingWindowManager(group_ids, block_pool=block_pool, sliding_window=window, block_size=block_size))
    return managers
