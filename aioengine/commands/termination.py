"""SIGTERM: the requests that run come to their end, and then the command does; a second one does not wait for them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from aioengine.engine.async_engine import AsyncEngine

T = TypeVar("T")

EXIT_TERMINATED = 128 + signal.SIGTERM

_current: ContextVar[Termination | None] = ContextVar("aioengine_termination", default=None)


class Termination:
    """Takes SIGTERM for one run of one coroutine.

    First signal: `AsyncEngine.shutdown(drain=True)`. The coroutine goes on and may end by itself; if it still runs when the
    engine has stopped, it is cancelled. Second signal: it is cancelled at once, which aborts its requests and shuts the
    engine down. Third signal, and the first one while there is no engine and so nothing to save: the process ends.
    """

    def __init__(self) -> None:
        self._num_signals = 0
        self._was_cancelled = False
        self._engine: AsyncEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._drained_status = EXIT_TERMINATED

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Await `main`. Raises SystemExit(143) if it was cancelled from here, or wants to start an engine after a signal;
        another status if it was cancelled because it had ended all it had to do (see `drained_is_success`).
        """
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        _current.set(self)
        with signals_handled_by(signal.SIGTERM, self._on_signal):
            try:
                result = await main
            except asyncio.CancelledError:
                if self._was_cancelled:
                    raise SystemExit(self._status()) from None
                raise
        if self._was_cancelled:  # and it made the best of it, as a benchmark does that reports what it has
            raise SystemExit(self._status())
        return result

    def _status(self) -> int:
        return self._drained_status if self._num_signals == 1 else EXIT_TERMINATED

    @contextmanager
    def _draining(self, engine: AsyncEngine) -> Iterator[None]:
        if self._num_signals:
            raise SystemExit(EXIT_TERMINATED)
        self._engine = engine
        try:
            yield
        finally:
            self._engine = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two of its instructions."""
        self._num_signals += 1
        if self._engine is None or self._num_signals > 2:
            leave(EXIT_TERMINATED)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_drain if self._num_signals == 1 else self._cancel_main)

    def _begin_drain(self) -> None:
        if self._engine is not None:
            num_reqs = self._engine.num_unfinished_reqs
            print(f"SIGTERM: {num_reqs} requests end first; a second signal does not wait for them", file=sys.stderr, flush=True)
            self._drain = asyncio.create_task(self._drain_and_end(self._engine))

    async def _drain_and_end(self, engine: AsyncEngine) -> None:
        await engine.shutdown(drain=True)
        if self._engine is engine:  # else the command is past it, and about to end by itself
            self._cancel_main()

    def _cancel_main(self) -> None:
        assert self._main is not None
        self._was_cancelled = True
        self._main.cancel()


@contextmanager
def drained_on_sigterm(engine: AsyncEngine) -> Iterator[None]:
    """SIGTERM drains this engine while the block runs, if the command was started by `runtime.run`."""
    termination = _current.get()
    if termination is None:
        yield
        return
    with termination._draining(engine):
        yield


def drained_is_success() -> None:
    """For a command that serves until it is told to stop: SIGTERM ends it with status 0 once its requests have ended."""
    termination = _current.get()
    if termination is not None:
        termination._drained_status = 0


@contextmanager
def signals_handled_by(signum: int, handler: Any) -> Iterator[None]:
    """Set a handler while the block runs; nothing outside the main thread, whose business signals are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, previous)


def leave(status: int) -> None:
    """End the process without ceremony."""
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    sys.stderr.flush()
    os._exit(status)
