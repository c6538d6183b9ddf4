"""The server over an engine without a model, for clients that send nonsense fast: python fake_server.py PORT."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aioengine.engine.async_engine import AsyncEngine
from aioengine.server import ServerSettings, create_app
from aioengine.server.run import serve_app
from aioengine.testing import FakeExecutor, FakeTokenizer


async def main(port: int) -> None:
    executor = FakeExecutor(num_blocks=4097, block_size=16, max_num_seqs=64)
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 256, "block_size": 16}
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), **options) as engine:
        await serve_app(create_app(engine, ServerSettings(served_model_names=["fake"])), host="127.0.0.1", port=port)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
