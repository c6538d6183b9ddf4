"""Native work that takes as long as it takes: a thread for each call, which nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from aioengine.errors import InvalidRequestError

T = TypeVar("T")

STACK_BYTES = 64 << 20
"""Of each of these threads, see `grammar.MAX_RULES`. Only what is used takes memory."""

_NICE = 10  # a tenth of what another busy thread gets; at 19 a busy machine starves a compile of 0.2 s past its limit


class CompileThread(Generic[T]):
    """Runs `function` at once, in a daemon thread: Python does not wait for it at exit, as it would for a pool's threads.

    Created in an event loop; `done` is set there. Cancelling `done` gives the result up and leaves the thread running, as
    nothing can interrupt native code.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = self._loop.create_future()
        # Nobody may be left to ask, and an error that nobody asks for is logged.
        self.done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # The size counts for threads that start meanwhile.
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def give_way(self) -> None:
        """Let the other threads of the process go before this one, where the system can do that to one thread (Linux)."""
        thread_id = self._thread.native_id
        if sys.platform == "linux" and thread_id is not None and self._thread.is_alive():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread_id, _NICE)

    def _run(self) -> None:
        try:
            result = self._function()
        except Exception as exc:
            self._hand_back(partial(self.done.set_exception, exc))
        except BaseException as exc:  # a failed assertion of Rust code arrives so, past `Exception`
            self._hand_back(partial(self.done.set_exception, InvalidRequestError(f"structured outputs: {type(exc).__name__}: {exc}")))
        else:
            self._hand_back(partial(self.done.set_result, result))

    def _hand_back(self, settle: Callable[[], None]) -> None:
        def settle_once() -> None:
            if not self.done.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the event loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle_once)
