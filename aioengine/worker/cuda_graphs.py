"""Decode steps captured as CUDA graphs, so that a step of a few tokens is one launch instead of some hundred.

A graph holds a forward of a fixed number of requests with one token each, in buffers that stay where they are. A smaller
step runs in the next larger graph: the rest is padding, which attends to nothing and writes no key.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_LARGEST = 512  # beyond this a step takes longer on the device than its launches do on the host


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """The sizes to capture, ascending: 1, 2, 4, then every 8 up to 256, then every 16; the largest is `max_num_seqs`, or 512.

    Padding so costs at most 7 requests up to 256. A graph takes some megabytes and a fraction of a second at the start.
    """
    largest = min(max_num_seqs, _LARGEST)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, _LARGEST + 1, 16), largest}
    return sorted(size for size in sizes if size <= largest)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A forward that can be run again on whatever its input buffers hold then."""

    replay: Callable[[], None]
    output: torch.Tensor  # [size, hidden_size], overwritten by each replay


class DecodeGraphs:
    """The captured sizes. Empty until `capture`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, CapturedGraph] = {}

    def capture(
        self,
        forward: Callable[[int], torch.Tensor],  # runs a padded step of that size
        *,
        capture_graph: Callable[[Callable[[], torch.Tensor]], CapturedGraph],
    ) -> float:
        """Capture every size; returns the seconds it took."""
        from tqdm import tqdm  # only here: a CPU has no use for it

        start = time.perf_counter()
        # The largest first: the smaller ones then fit into the memory that it has left in the graphs' common pool.
        for size in tqdm(self._sizes[::-1], desc="capturing CUDA graphs", unit="size", leave=False, disable=None):
            self._graphs[size] = capture_graph(lambda size=size: forward(size))  # type: ignore[misc]
        return time.perf_counter() - start

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def size_for(self, *, num_reqs: int, max_query_len: int) -> int | None:
        """The smallest captured size that holds the step; None if it must run eagerly."""
        if max_query_len != 1 or not self._graphs:
            return None
        place = bisect.bisect_left(self._sizes, num_reqs)
        return self._sizes[place] if place < len(self._sizes) else None

    def run(self, size: int) -> torch.Tensor:
        """Replay; returns [size, hidden_size], valid until a graph is replayed again."""
        graph = self._graphs[size]
        graph.replay()
        return graph.output
