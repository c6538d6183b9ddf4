"""What takes an answer from the one who waits for it: its task is cancelled, and the reason becomes an error of its own."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Interruption:
    """A context that `interrupt()` cancels: it raises `error` then. As with `asyncio.timeout()`, a cancellation from elsewhere
    stays one.
    """

    __slots__ = ("_error", "_is_interrupted", "_num_cancelling", "_task")

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self._is_interrupted = False
        self._num_cancelling = 0
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "an app runs in a task"
        self._num_cancelling = self._task.cancelling()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._is_interrupted and task.uncancel() <= self._num_cancelling and kind is asyncio.CancelledError:
            raise self._error from exc

    def interrupt(self) -> None:
        """Within the context; elsewhere, and a second time, it does nothing."""
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()
