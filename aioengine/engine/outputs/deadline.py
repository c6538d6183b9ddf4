"""The time limit of one request, in the queue and running, whether or not anybody reads its output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aioengine.checks.values import number, shorten
from aioengine.errors import InvalidRequestError, RequestTimeoutError

MAX_SECONDS = 1e9
"""Some thirty years; beyond that no event loop can tell the time any more."""


def check_seconds(name: str, seconds: object) -> str | None:
    """What is wrong with a number of seconds, if it is none; None is one, for no limit."""
    if seconds is None:
        return None
    plain = number(seconds)
    if plain is None and not isinstance(seconds, (int, float)):
        return f"{name} must be a number of seconds or None, got {shorten(seconds)}"
    if plain is None or not 0 <= plain <= MAX_SECONDS:
        return f"{name} must be >= 0 and <= {MAX_SECONDS:g} seconds, or None, got {shorten(seconds)}"
    return None


def read_timeout(timeout: object) -> float | None:
    """A positive number of seconds, not too large, or None. Raises InvalidRequestError."""
    wrong = check_seconds("timeout", timeout)
    seconds = None if timeout is None else number(timeout)
    if wrong is None and seconds == 0:
        wrong = f"timeout must be > 0 seconds, or None, got {shorten(timeout)}"
    if wrong is not None:
        raise InvalidRequestError(wrong)
    return seconds


class Deadline:
    """Of one request: `timeout` seconds from now, or None for no limit. Belongs to the running event loop."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout = read_timeout(timeout)
        self._loop = asyncio.get_running_loop()
        self._when = None if timeout is None else self._loop.time() + timeout
        self._timer: asyncio.TimerHandle | None = None
        self._num_output_tokens: int | None = None  # those that had come when it was over; None: it is not over

    def limit(self, preparing: asyncio.Task[Any]) -> None:
        """Cancel what is done before the request is submitted when the time is over."""
        if self._when is not None:
            self._timer = self._loop.call_at(self._when, self._give_up, preparing)

    def start(self, end_request: Callable[[], int | None]) -> None:
        """The request is submitted. When the time is over `end_request` is called once: it ends the request and returns
        how many output tokens there were, or None if the request had ended before.
        """
        self.cancel()
        if self._when is not None:
            self._timer = self._loop.call_at(self._when, self._on_time, end_request)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, preparing: asyncio.Task[Any]) -> None:
        self._timer = None
        if preparing.cancel():
            self._num_output_tokens = 0

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
