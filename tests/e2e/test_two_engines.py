"""Two engines in one process, on the same cores: each gives its own tokens, and neither waits for the other to end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, SamplingParams
from aioengine.outputs import RequestOutput

PROMPTS = [[1 + (7 * i + j) % 200 for j in range(3 + 9 * i)] for i in range(6)]


async def run(engine: AsyncEngine) -> list[tuple[int, ...]]:
    async def tokens(prompt: list[int]) -> tuple[int, ...]:
        last: RequestOutput | None = None
        async for output in engine.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)):
            last = output
        assert last is not None
        return tuple(last.outputs[0].token_ids)

    return await asyncio.gather(*map(tokens, PROMPTS))


async def test_each_gives_its_own_tokens_while_the_other_runs(tiny_model: Path) -> None:
    """More threads than cores, and one of the two kept on a single core where that can be."""
    options: dict[str, Any] = {"device": "cpu", "num_kv_cache_blocks": 200, "max_model_len": 128}
    pinned = {"cpu_affinity": [min(os.sched_getaffinity(0))]} if hasattr(os, "sched_getaffinity") else {"num_threads": 1}
    async with AsyncEngine(str(tiny_model), num_threads=1, **options) as engine:
        alone = await run(engine)
    async with AsyncEngine(str(tiny_model), num_threads=8, **options) as one, AsyncEngine(str(tiny_model), **pinned, **options) as other:
        async with asyncio.timeout(60):
            for result in await asyncio.gather(run(one), run(other), run(one), run(other)):
                assert result == alone
