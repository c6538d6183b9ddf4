"""Whether the next step may be scheduled: pausing an engine, and letting it take single steps."""

from __future__ import annotations

import asyncio
from collections import deque

from aioengine.errors import AioEngineError

StepWaiter = asyncio.Future[int | None]
"""Of one `step()`: the id of the step that ran, or None if there was nothing to run."""


class StepGate:
    """Open unless paused; while paused it lets one step through for each `allow_one()`."""

    def __init__(self) -> None:
        self.is_paused = False
        self._waiters: deque[StepWaiter] = deque()  # allowed, not scheduled yet
        self._in_flight: dict[int, StepWaiter] = {}  # step id -> who waits for it

    @property
    def is_open(self) -> bool:
        return not self.is_paused or bool(self._waiters)

    def allow_one(self) -> StepWaiter:
        """Raises AioEngineError if nothing is paused."""
        if not self.is_paused:
            raise AioEngineError("single steps need a paused engine: call pause() first")
        waiter: StepWaiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def note_scheduled(self, step_id: int) -> None:
        if self.is_paused:
            self._in_flight[step_id] = self._waiters.popleft()

    def note_done(self, step_id: int) -> None:
        waiter = self._in_flight.pop(step_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(step_id)

    def nothing_to_run(self) -> None:
        """Answer everybody whose step was not scheduled."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """No step will come back any more."""
        waiters = [*self._waiters, *self._in_flight.values()]
        self._waiters.clear()
        self._in_flight.clear()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # marks it as seen: whoever waited may be gone
