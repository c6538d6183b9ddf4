"""The settings of one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace

from aioengine.distributed.group import Group
from aioengine.resolved_config import ResolvedConfig


def config_of_rank(config: ResolvedConfig, group: Group) -> ResolvedConfig:
    """With the heads that a rank has, its share of the memory that the KV caches of all ranks may take on a CPU, and its cores."""
    if group.size == 1:
        return config
    model, cache, worker, size = config.model, config.cache, config.worker, group.size
    if worker.cpu_affinity is not None:
        share = len(worker.cpu_affinity) // size
        worker = replace(worker, cpu_affinity=worker.cpu_affinity[group.rank * share : (group.rank + 1) * share])
    return replace(
        config,
        worker=worker,
        model=replace(model, num_heads=model.num_heads // size, num_kv_heads=model.num_kv_heads // size),
        cache=replace(cache, kv_cache_memory_bytes=max(cache.kv_cache_memory_bytes // size, 1)),
    )
