"""Waiting for what happens elsewhere: in a task, a thread or another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """By the event loop's clock, which is a virtual one in some tests. Raises AssertionError when the time is over."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"it did not happen within {within_s:g} s"
        await asyncio.sleep(0.002)
