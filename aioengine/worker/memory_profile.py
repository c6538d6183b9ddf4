"""How much of a GPU's memory the KV cache may take: what is left of the allowed share at the peak of the largest step."""

from __future__ import annotations

from dataclasses import dataclass

from aioengine.resolved_config import SchedulerConfig
from aioengine.worker.cuda_graphs import graph_batch_sizes

_BYTES_PER_GRAPH = 12 << 20
"""What the driver keeps for a captured graph of some hundred launches, beside the memory that these write to."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Readings in bytes, taken around a run of the largest step."""

    total: int  # of the device
    free: int  # after the run, as the driver says
    allocator_before: int  # what torch's allocator had handed out before the run: the weights
    allocator_peak: int  # the most that it had handed out during the run: weights and activations
    allocator_reserved: int  # what it holds after the run, in use or not


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is allocated behind the KV cache, in bytes."""

    tables: int = 0  # of requests, of a step's inputs, and what is staged
    graphs: int = 0  # that the driver keeps for captured graphs
    activation_share: float = 0.0  # of the largest step's activations, that graphs keep in a pool of their own


def reserve(scheduler: SchedulerConfig, *, tables: int, has_graphs: bool) -> Reservation:
    """For the graphs of all sizes, if they will be captured: they share one pool, as large as the largest of them needs."""
    if not has_graphs:
        return Reservation(tables)
    sizes = graph_batch_sizes(scheduler.max_num_seqs)
    return Reservation(tables, len(sizes) * _BYTES_PER_GRAPH, min(sizes[-1] / scheduler.max_num_batched_tokens, 1.0))


def kv_cache_bytes(profile: MemoryProfile, *, utilization: float, reserved: Reservation) -> int:
    """utilization x total - peak - reserved, not below 0.

    The peak is the allocator's, and what lies outside of it: the CUDA context, libraries' workspaces, other processes.
    """
    outside = max(profile.total - profile.free - profile.allocator_reserved, 0)
    pool = int((profile.allocator_peak - profile.allocator_before) * reserved.activation_share)
    left = int(utilization * profile.total) - profile.allocator_peak - outside - pool - reserved.tables - reserved.graphs
    return max(left, 0)
