"""An engine process to watch: `python -m tests.tui.traffic SOCKET` serves made-up requests until its standard input closes."""

from __future__ import annotations

import asyncio
import itertools
import sys

from aioengine.engine.async_engine import AsyncEngine
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer


async def serve(address: str) -> None:
    executor = FakeExecutor(num_blocks=65, forward_s=0.02)
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), events=address, allow_events_control=True) as engine:
        print("ready", flush=True)

        async def client() -> None:
            for number in itertools.count():
                params = SamplingParams(max_tokens=30 + number % 20, ignore_eos=True)
                async for _ in engine.generate(f"question {number}", params):
                    pass

        clients = [asyncio.create_task(client()) for _ in range(3)]
        await asyncio.to_thread(sys.stdin.buffer.read)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
