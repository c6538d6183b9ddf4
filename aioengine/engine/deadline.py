"""The time limit of one request, in the queue and running, whether or not anybody reads its output."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aioengine.errors import InvalidRequestError, RequestTimeoutError
from aioengine.values import number, shorten


def read_timeout(timeout: object) -> float | None:
    """A positive, finite number of seconds, or None. Raises InvalidRequestError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise InvalidRequestError(f"timeout must be a number of seconds or None, got {shorten(timeout)}")
    seconds = number(timeout)
    if seconds is None or seconds <= 0:
        raise InvalidRequestError(f"timeout must be > 0 seconds and finite, or None, got {shorten(timeout)}")
    return seconds


class Deadline:
    """Of one request: `timeout` seconds from now, or None for no limit. Belongs to the running event loop."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout = read_timeout(timeout)
        self._loop = asyncio.get_running_loop()
        self._when = None if timeout is None else self._loop.time() + timeout
        self._timer: asyncio.TimerHandle | None = None
        self._num_output_tokens: int | None = None  # those that had come when it was over; None: it is not over

    @asynccontextmanager
    async def while_preparing(self) -> AsyncIterator[None]:
        """Around what is awaited before the request is submitted. Raises RequestTimeoutError when the time is over."""
        try:
            async with asyncio.timeout_at(self._when) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            self._num_output_tokens = 0
            raise self.error() from None

    def start(self, end_request: Callable[[], int | None]) -> None:
        """The request is submitted. When the time is over `end_request` is called once: it ends the request and returns
        how many output tokens there were, or None if the request had ended before.
        """
        if self._when is not None:
            self._timer = self._loop.call_at(self._when, self._on_time, end_request)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self, end_request: Callable[[], int | None]) -> None:
        self._timer = None
        self._num_output_tokens = end_request()

    @property
    def expired(self) -> bool:
        """The time was over before the request ended."""
        return self._num_output_tokens is not None

    def error(self) -> RequestTimeoutError:
        assert self._timeout is not None
        return RequestTimeoutError(f"the request timed out after {self._timeout:g} s, with {self._num_output_tokens} output tokens")
