"""A worker and a clock that live in the event loop: what would take seconds takes none, and comes out the same every time."""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_THREAD_GRACE_S = 0.05


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer whenever there is nothing else to do.

    `loop.time()`, `asyncio.sleep()` and time-outs keep to that clock; `time.perf_counter()` does not. Threads take real time: while
    there are any, the loop waits a moment for them before it jumps. With no timer it waits for them, or a socket, as any loop does.
    """

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def _jump(self, seconds: float) -> None:
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    """Does not sleep: it tells how long it would have."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(min(timeout, _THREAD_GRACE_S) if threading.active_count() > 1 else 0)
        if not ready:
            self._jump(timeout)
        return ready


def in_virtual_time(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a plain function of a coroutine function: it runs in a `VirtualTimeLoop` of its own."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(function(*args, **kwargs))

    return run


class LoopWorker:
    """As a `WorkerThread`, without the thread: calls run in the event loop, one after the other, in the order of submission."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Future[Any], Callable[[], Any], float]] = deque()  # the first one is being run
        self._is_shut_down = False

    def submit(self, function: Callable[..., T], *args: Any, after_s: float = 0.0) -> Future[T]:
        """after_s: how long the call takes, by the loop's clock; it runs at the end of that. Raises RuntimeError after `shutdown()`."""
        if self._is_shut_down:
            raise RuntimeError("the worker was shut down")
        future: Future[T] = Future()
        self._calls.append((future, functools.partial(function, *args), after_s))
        if len(self._calls) == 1:
            self._start_first()
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun. Idempotent."""
        self._is_shut_down = True
        while self._calls:
            future = self._calls.popleft()[0]
            future.cancel()
            future.set_running_or_notify_cancel()

    def _start_first(self) -> None:
        asyncio.get_running_loop().call_later(self._calls[0][2], self._run_first)

    def _run_first(self) -> None:
        if self._is_shut_down:
            return
        future, call, _ = self._calls[0]
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as exc:  # of any kind: whoever waits for the future is told
                future.set_exception(exc)
            else:
                future.set_result(result)
        self._calls.popleft()
        if self._calls:
            self._start_first()
