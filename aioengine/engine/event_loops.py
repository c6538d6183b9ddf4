"""Which event loop is which, and what to tell a caller who is in the wrong one."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from aioengine.errors import AioEngineError

T = TypeVar("T")


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def need_running_loop(call: str) -> asyncio.AbstractEventLoop:
    """The event loop that runs in this thread. Raises AioEngineError naming the call that needs one."""
    loop = running_loop()
    if loop is None:
        raise AioEngineError(f"{call} needs a running event loop: await it in a coroutine, for example one that asyncio.run() runs")
    return loop


def check_loop(owner: asyncio.AbstractEventLoop | None, call: str) -> None:
    """Raise AioEngineError, saying what to do, unless the running event loop is the one that the engine was started in."""
    loop = running_loop()
    if loop is not owner:
        raise wrong_loop(owner, loop, call)


def wrong_loop(owner: asyncio.AbstractEventLoop | None, loop: asyncio.AbstractEventLoop | None, call: str) -> AioEngineError:
    if owner is None:
        return AioEngineError(f"{call}: the engine is not started")
    if owner.is_closed():
        return AioEngineError(
            f"{call}: the event loop that the engine was started in was closed, so nothing can run in it: `await engine.shutdown()` "
            "in any event loop frees what the engine holds, then build a new AsyncEngine"
        )
    here = "no event loop runs in this thread" if loop is None else f"this is {loop!r}"
    if owner.is_running():
        advice = "asyncio.run_coroutine_threadsafe(coroutine, loop) and loop.call_soon_threadsafe(function) reach it from here"
    else:
        advice = "it is not running now: call this in a coroutine that it runs"
    return AioEngineError(f"{call}: the engine runs in another event loop: it was started in {owner!r}, and {here}; {advice}")


def start_eagerly(coroutine: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
    """Run a coroutine as far as it comes without waiting; if that is not to its end, a task goes on with it.

    Most requests are prepared without waiting, and a task would cost them a turn of the event loop. What runs before the
    first wait belongs to the caller's task. (Python has eager tasks from 3.12 on.)
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    task = asyncio.get_running_loop().create_task(_go_on(coroutine, awaited))
    task.add_done_callback(lambda _: coroutine.close())  # a task that is cancelled before its first turn has not touched it
    return task


async def _go_on(coroutine: Coroutine[Any, Any, T], awaited: Any) -> T:
    return await _resume(coroutine, awaited)


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Pass on what `coroutine` waits for; the first such thing, `awaited`, it has given already."""
    while True:
        try:
            try:
                value = yield awaited
            except BaseException as exc:  # of whatever kind (a cancellation, the end of the generator): the coroutine's business
                awaited = coroutine.throw(exc)
            else:
                awaited = coroutine.send(value)
        except StopIteration as stop:
            result: T = stop.value
            return result
