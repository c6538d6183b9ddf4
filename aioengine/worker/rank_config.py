"""The settings of one rank's part of a model."""

from __future__ import annotations

from dataclasses import replace

from aioengine.config import ResolvedConfig
from aioengine.distributed.group import Group


def config_of_rank(config: ResolvedConfig, group: Group) -> ResolvedConfig:
    """With the heads that a rank has, and its share of the memory that the KV caches of all ranks may take on a CPU."""
    if group.size == 1:
        return config
    model, cache, size = config.model, config.cache, group.size
    return replace(
        config,
        model=replace(model, num_heads=model.num_heads // size, num_kv_heads=model.num_kv_heads // size),
        cache=replace(cache, kv_cache_memory_bytes=max(cache.kv_cache_memory_bytes // size, 1)),
    )
