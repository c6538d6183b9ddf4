"""New requests, and answers that begin, let through a few at a time."""

from __future__ import annotations

import asyncio
from collections import deque

NUM_PER_TURN = 8
"""Each takes a quarter of a millisecond."""


class Turnstile:
    """Lets at most `num_per_turn` through in one turn of the event loop, in the order in which they come.

    Between two turns the engine goes on with its steps, and the streams that run get their events: a burst of hundreds of
    requests would hold them up all together. Where no stream runs everybody passes at once, and into one step.

    num_streams: that run; whoever runs them counts them.
    """

    def __init__(self, num_per_turn: int = NUM_PER_TURN) -> None:
        self.num_streams = 0
        self._num_per_turn = num_per_turn
        self._num_passed = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def enter(self) -> None:
        if not self.num_streams and not self._waiting:
            return
        if self._num_passed < self._num_per_turn and not self._waiting:
            self._pass()
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _pass(self) -> None:
        self._num_passed += 1
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._num_passed = 0
        while self._waiting and self._num_passed < self._num_per_turn:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else it was cancelled
                waiter.set_result(None)
                self._pass()
