"""Block tables by slot: which KV block holds positions i * block_size .. (i + 1) * block_size - 1 of a request.

Each KV-cache group has its own. In that of a group with a window, entries behind the window are stale or the null block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from aioengine.kv_cache_groups import KVCacheGroup

IntArray = npt.NDArray[np.int32]


class BlockTable:
    """[max_num_reqs, max_num_blocks_per_req] int32, seen as a numpy array by the host and as a tensor by torch.

    A row's entries past its `num_blocks` are whatever was there before.
    """

    def __init__(self, *, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_num_blocks_per_req = -(-max_model_len // block_size)
        self.array: IntArray = np.zeros((max_num_reqs, self.max_num_blocks_per_req), dtype=np.int32)
        self.tensor = torch.from_numpy(self.array)  # the same memory
        self.num_blocks: IntArray = np.zeros(max_num_reqs, dtype=np.int32)  # [max_num_reqs]

    def append_row(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks at the end of a slot's row."""
        start = int(self.num_blocks[slot])
        end = start + len(block_ids)
        assert end <= self.max_num_blocks_per_req, f"{end} blocks in a row of {self.max_num_blocks_per_req}"
        self.array[slot, start:end] = block_ids
        self.num_blocks[slot] = end

    def replace_row(self, slot: int, block_ids: Sequence[int]) -> None:
        """Start a slot's row anew: a new request, or one that resumes after a preemption."""
        self.num_blocks[slot] = 0
        self.append_row(slot, block_ids)


class BlockTables:
    """The table of each KV-cache group. Block ids come as a list for each group, in the order of the groups."""

    def __init__(self, groups: Sequence[KVCacheGroup], *, max_num_reqs: int, max_model_len: int, block_size: int) -> None:
        self.windows = tuple(group.sliding_window for group in groups)
        self.block_size = block_size
        self.tables = tuple(BlockTable(max_num_reqs=max_num_reqs, max_model_len=max_model_len, block_size=block_size) for _ in groups)
        self.max_num_blocks_per_req = self.tables[0].max_num_blocks_per_req

    def append_rows(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Add blocks at the ends of a slot's rows."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append_row(slot, ids)

    def replace_rows(self, slot: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Start a slot's rows anew: a new request, or one that resumes after a preemption."""
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.replace_row(slot, ids)

    def num_positions(self, slots: npt.NDArray[np.int64]) -> IntArray:  # [n]
        """How many positions of the requests in `slots` [n] have a block in every group."""
        held = self.tables[0].num_blocks[slots]
        for table in self.tables[1:]:
            held = np.minimum(held, table.num_blocks[slots])
        return held * self.block_size
