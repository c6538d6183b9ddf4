"""Memory for one large result a step, such as the logits.

The C library gives an allocation of more than 32 MiB a mapping of its own: every step would map, clear and unmap it.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import torch

_HOLDERS_OF_THE_UNUSED = 2  # `self` and the argument of getrefcount


class ReusedMemory:
    """Hands out the same memory again as soon as no tensor or array looks at it any more. For one thread."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] float32 with whatever stands there. Memory that somebody still holds is left to them."""
        size = rows * columns
        if self._memory.size < size or sys.getrefcount(self._memory) > _HOLDERS_OF_THE_UNUSED:
            self._memory = np.empty(size, dtype=np.float32)
        return torch.from_numpy(self._memory)[:size].view(rows, columns)
