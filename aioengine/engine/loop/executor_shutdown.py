"""Shutting an executor down: it waits for the call that runs, for as long as that takes, so the engine must not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from aioengine.executor.base import Executor
from aioengine.printable import get_logger

logger = get_logger(__name__)


async def shut_down_executor(executor: Executor | None, *, limit_s: float) -> None:
    """Shut it down in a thread of its own; after `limit_s` seconds leave that thread behind and say so in the log."""
    if executor is None:
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def report() -> None:
        try:
            loop.call_soon_threadsafe(done.set_result, None)
        except RuntimeError:
            logger.warning("the executor did shut down in the end; its event loop was closed before")

    shut_down_in_background(executor, then=report)
    _, late = await asyncio.wait([done], timeout=limit_s)
    if late:
        logger.error("the executor has not shut down within %g s, because a call in it does not return: it is left behind", limit_s)


def shut_down_in_background(executor: Executor | None, *, then: Callable[[], None]) -> None:
    """Begin to shut it down, and call `then` in that thread when it is done."""

    def shut_down() -> None:
        try:
            if executor is not None:
                executor.shutdown()
        except Exception:
            logger.exception("the executor did not shut down cleanly")
        then()

    # Not a pool's thread: Python would wait for that one at exit, and for a step that never returns without end.
    thread = threading.Thread(target=shut_down, name="aioengine-stop-executor", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and takes no new threads
        thread.start()
