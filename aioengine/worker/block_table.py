"""Block tables by slot: which KV block holds positions i * block_size .. (i + 1) * block_size - 1 of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

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
