"""Everything that a step needs from the host, sent in one copy.

A step's arrays are packed into one pinned buffer and land in one device buffer, of which typed views are handed out. There
are two such pairs, used in turns, so that a step is packed and copied while the device still computes the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.worker.pipeline.transfers import Event, Transfers

ALIGNMENT = 16
"""Bytes: a kernel is compiled anew for a pointer that is not a multiple of 16."""

_MIN_CAPACITY = 1 << 16
_NUM_BUFFERS = 2
_TORCH_DTYPES: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "uint8": torch.uint8,
}


def plan_layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The aligned offset of each of the pieces of `sizes` bytes, and the bytes in all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def staging_capacity(num_bytes: int) -> int:
    """The size of a buffer that holds `num_bytes`: a power of two, so that it grows seldom."""
    return 1 << (max(num_bytes, _MIN_CAPACITY) - 1).bit_length()


class _Buffer:
    """A pinned buffer, its twin on the device, and when each may be written to again."""

    def __init__(self, transfers: Transfers, capacity: int) -> None:
        self.capacity = capacity
        self.host = transfers.allocate_host(capacity)
        self.bytes: npt.NDArray[np.uint8] = self.host.numpy()  # the same memory
        self.device = torch.empty(capacity, dtype=torch.uint8, device=transfers.torch_device)
        # The allocator may hand out memory that enqueued work still uses, and the copy runs beside that work.
        self.read: Event = transfers.mark()  # the device has read the twin for the last time
        self.copied: Event | None = None  # the pinned buffer has been copied
        self.is_held = False


@dataclass(frozen=True, slots=True)
class StagedArrays:
    """A step's arrays on the device, valid for work that is enqueued before `release`."""

    groups: dict[str, dict[str, torch.Tensor]]  # as the arrays: the same names, shapes and dtypes
    _buffer: _Buffer
    _transfers: Transfers

    def release(self) -> None:
        """Everything that reads the tensors has been enqueued."""
        self._buffer.read = self._transfers.mark()
        self._buffer.is_held = False


class Staging:
    """Packs and uploads. Grows when a step needs more room than any before, which takes milliseconds: say what to expect."""

    def __init__(self, transfers: Transfers, *, capacity: int = _MIN_CAPACITY) -> None:
        self._transfers = transfers
        self.capacity = staging_capacity(capacity)
        self._buffers = [_Buffer(transfers, self.capacity) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def stage(self, groups: Mapping[str, Mapping[str, npt.NDArray[Any]]]) -> StagedArrays:
        """Send int32, int64, float32 and uint8 arrays to the device in one copy. They come back by the same names.

        Raises RuntimeError if both buffers are held by steps that have not released theirs.
        """
        arrays = [array for group in groups.values() for array in group.values()]
        offsets, num_bytes = plan_layout([array.nbytes for array in arrays])
        buffer = self._next_buffer(num_bytes)
        if buffer.copied is not None:
            buffer.copied.synchronize()  # long past: this buffer's copy belongs to the step before the last
        for array, offset in zip(arrays, offsets, strict=True):
            if array.nbytes:
                buffer.bytes[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        if num_bytes:
            buffer.copied = self._transfers.upload(buffer.host[:num_bytes], buffer.device[:num_bytes], after=buffer.read)
        places = iter(offsets)
        tensors = {
            group: {name: _view(buffer.device, next(places), array) for name, array in named.items()} for group, named in groups.items()
        }
        buffer.is_held = True
        return StagedArrays(tensors, buffer, self._transfers)

    def _next_buffer(self, num_bytes: int) -> _Buffer:
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
        buffer = self._buffers[turn]
        if buffer.is_held:
            raise RuntimeError(f"{_NUM_BUFFERS} executed steps wait to be sampled; a further one cannot be staged before that")
        if num_bytes > buffer.capacity:
            buffer = self._buffers[turn] = _Buffer(self._transfers, staging_capacity(num_bytes))
        return buffer


def _view(device: torch.Tensor, offset: int, array: npt.NDArray[Any]) -> torch.Tensor:
    """The bytes from `offset` on as what `array` is."""
    return device[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype.name]).view(array.shape)
