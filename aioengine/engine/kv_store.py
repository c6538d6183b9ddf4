"""Opens the folder that keeps an engine's KV blocks, for blocks as this engine computes them."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from aioengine.engine.run_facts import RunFacts
from aioengine.engine.startup import EngineSetup
from aioengine.errors import ConfigError
from aioengine.kv_connector.base import StoreKey
from aioengine.kv_connector.file_store import FileConnector


async def open_kv_connector(setup: EngineSetup, facts: RunFacts) -> FileConnector | None:
    """The store that `kv_cache_dir` names, for blocks as this engine computes them; None: there is none.

    facts: with the model's digest. The worker must have its KV cache. Raises ConfigError.
    """
    cache = setup.config.cache
    if cache.kv_cache_dir is None:
        return None
    if setup.files is None:
        raise ConfigError(f"kv_cache_dir ({cache.kv_cache_dir}) is for the engine's own executor, which knows the bytes of its blocks")
    ((layout, num_bytes),) = await asyncio.wrap_future(setup.executor.collective_rpc("kv_block_layout"))
    assert facts.model_sha256 is not None
    assert cache.prefix_caching_seed is not None
    key = StoreKey(
        model_sha256=facts.model_sha256,
        weights=facts.weights or "dense",
        isa=facts.isa or "",
        kv_cache_dtype=setup.config.worker.kv_cache_dtype,
        layout=layout,
        block_size=cache.block_size,
        block_bytes=num_bytes,
        root=sha256(b"aioengine-kv:" + cache.prefix_caching_seed.encode()).hexdigest()[:32],
        model=setup.model_info.name,
    )
    return await asyncio.to_thread(FileConnector, cache.kv_cache_dir, key, max_bytes=cache.kv_cache_dir_bytes)
