"""A burst of requests does not hold up those that run."""

from __future__ import annotations

import asyncio
import itertools

from aioengine.server.turnstile import Turnstile


async def test_a_few_pass_in_a_turn_in_the_order_in_which_they_came() -> None:
    turnstile = Turnstile(3)
    turnstile.num_streams = 1
    passed: list[int] = []

    async def one(number: int) -> None:
        await turnstile.enter()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(20)]
    counts = [0]
    while len(passed) < 20:
        await asyncio.sleep(0)
        counts.append(len(passed))
    assert passed == list(range(20))
    assert max(later - earlier for earlier, later in itertools.pairwise(counts)) <= 3
    await asyncio.gather(*tasks)


async def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    turnstile = Turnstile(1)
    turnstile.num_streams = 1
    await turnstile.enter()
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[:9]:
        task.cancel()
    await asyncio.wait_for(tasks[9], 1)
    assert all(task.cancelled() for task in tasks[:9] if not task.done() or task.cancelled())
    await asyncio.wait_for(turnstile.enter(), 1)


async def test_where_no_stream_runs_nobody_waits() -> None:
    turnstile = Turnstile(1)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert all(task.done() for task in tasks)
