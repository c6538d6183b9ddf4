"""A viewer without a screen: reads an engine's events in a process of its own, as the dashboard does, and drops them.

Run as `python -m aioengine_bench.viewer ADDRESS`; says "ready" when it is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from aioengine.events.sources.socket import SocketSource


@contextlib.asynccontextmanager
async def watching_process(address: str) -> AsyncIterator[None]:
    """A connected viewer for the time of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aioengine_bench.viewer", address, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError("the viewer process did not connect")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _watch(address: str) -> None:
    async with SocketSource(address, reconnect=False) as source:
        print("ready", flush=True)
        async for _ in source:
            pass


if __name__ == "__main__":
    asyncio.run(_watch(sys.argv[1]))
