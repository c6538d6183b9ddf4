"""One thread that runs calls in the order of submission and cannot keep the process from ending."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_EXIT_WAIT_S = 5.0


class WorkerThread:
    """Starts with the first call, sleeps while there is none, ends with `shutdown()` or when it is no longer referenced.

    Unlike the thread of a ThreadPoolExecutor it is a daemon: at exit Python waits for the threads of every pool, and a
    call that never returns (a device that hangs) would keep the process alive for ever. A process that ends without
    `shutdown()` waits `_EXIT_WAIT_S` seconds for the call that runs: native code should not lose its process under it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()  # None: the end
        self._thread: threading.Thread | None = None
        self._is_shut_down = False
        self._at_exit = partial(_end_at_exit, weakref.ref(self))

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown()`. Cancelling the future before its call has begun prevents the call."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"the thread {self._name!r} was shut down")
            if self._thread is None:
                # The thread knows the queue and not this object, which may then be collected; that ends the thread.
                self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, self._calls.put, None).atexit = False
                atexit.register(self._at_exit)
            self._calls.put(_Call(future, function, args))
        return future

    def shutdown(self) -> None:
        """Cancel what has not begun and wait for the call that runs, however long that takes. Idempotent."""
        self._end()
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join()

    def _end(self) -> None:
        with self._lock:
            self._is_shut_down = True
            try:
                while True:
                    call = self._calls.get_nowait()
                    if call is not None:
                        call.future.cancel()
                        call.future.set_running_or_notify_cancel()
            except Empty:
                self._calls.put(None)

    def _wait_at_exit(self) -> None:
        self._end()
        if self._thread is not None:
            self._thread.join(_EXIT_WAIT_S)


@dataclass(frozen=True, slots=True)
class _Call:
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]


def _run_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        _run(call)
        del call  # what it holds must not live until the next one comes


def _run(call: _Call) -> None:
    future = call.future
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call.function(*call.args)
    except BaseException as exc:  # of any kind: whoever waits for the future is told
        future.set_exception(exc)
        del future, call  # the exception's traceback holds this frame, and the future the exception
    else:
        future.set_result(result)


def _end_at_exit(reference: weakref.ref[WorkerThread]) -> None:
    thread = reference()
    if thread is not None:
        thread._wait_at_exit()
