"""The ranks of tensor parallelism, as the one among them that a process is sees them."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from aioengine.errors import RankLostError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_TIMEOUT = timedelta(days=1)  # of one sum: who is dead breaks the connection, and who hangs is the executor's to find


class Group(Protocol):
    """Handed to whatever works together with the other ranks; there is no global one."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place, and return it; every rank gets the same bits. Raises RankLostError."""


class SingleRank:
    """A model in one piece."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


SINGLE_RANK = SingleRank()


class TorchGroup:
    """A group of torch.distributed, which sums by gloo on the CPU and by NCCL on GPUs.

    Gloo's and NCCL's sums have the same bits on every rank (a part of the tensor is added up by one rank and passed round), so all
    ranks sample the same tokens from them.
    """

    def __init__(self, group: ProcessGroup, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as exc:
            raise RankLostError(f"rank {self.rank} could not sum with the other {self.size - 1}: {exc}") from exc
        return x


def open_store(host: str) -> tuple[object, int]:
    """Where the ranks meet: the store, to be kept, and its port, which the system chose. It listens on `host` alone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port: int = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def join_group(host: str, port: int, *, rank: int, size: int, on_cuda: bool) -> TorchGroup:
    """Meet the others at the store that rank 0 has opened, and wait until all are there."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None  # it was just made
    return TorchGroup(group, rank=rank, size=size)
