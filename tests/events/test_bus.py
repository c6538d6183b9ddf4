"""The bus: publishing never waits, slow readers lose the oldest events, broken observers lose only themselves."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aioengine.core.scheduler_output import SchedulerStats
from aioengine.events.bus import StepBus
from aioengine.events.step_event import EngineSnapshot, Event

STATS = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


def event(step_id: int) -> EngineSnapshot:
    return EngineSnapshot(step_id=step_id, time=0.0, stats=STATS, requests=[], cached_block_ids=[])


async def read(subscription: object, count: int) -> list[int]:
    return [(await anext(subscription)).step_id for _ in range(count)]  # type: ignore[call-overload]


async def test_every_subscription_gets_every_event_in_order() -> None:
    bus = StepBus()
    with bus.subscribe() as one, bus.subscribe() as two:
        for i in range(5):
            bus.publish(event(i))
        assert await read(one, 5) == [0, 1, 2, 3, 4]
        assert await read(two, 5) == [0, 1, 2, 3, 4]


async def test_a_full_subscription_drops_the_oldest_and_counts_them() -> None:
    bus = StepBus()
    subscription = bus.subscribe(maxlen=3)
    for i in range(10):
        bus.publish(event(i))
    statistics = subscription.statistics()
    assert (statistics.num_buffered, statistics.maxlen, statistics.num_received, statistics.num_dropped) == (3, 3, 10, 7)
    assert await read(subscription, 3) == [7, 8, 9]
    assert subscription.num_dropped == 7


async def test_a_waiting_reader_wakes_up() -> None:
    bus = StepBus()
    subscription = bus.subscribe()
    reader = asyncio.create_task(read(subscription, 2))
    await asyncio.sleep(0)
    bus.publish(event(1))
    await asyncio.sleep(0)
    bus.publish(event(2))
    assert await asyncio.wait_for(reader, 1) == [1, 2]


async def test_readers_of_one_subscription_share_its_events() -> None:
    bus = StepBus()
    subscription = bus.subscribe()
    readers = [asyncio.create_task(read(subscription, 1)) for _ in range(3)]
    await asyncio.sleep(0)
    for i in range(3):
        bus.publish(event(i))
    assert sorted(ids[0] for ids in await asyncio.wait_for(asyncio.gather(*readers), 1)) == [0, 1, 2]


async def test_a_cancelled_reader_loses_nothing() -> None:
    bus = StepBus()
    subscription = bus.subscribe()
    reader = asyncio.create_task(read(subscription, 1))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    bus.publish(event(1))
    assert await read(subscription, 1) == [1]


@pytest.mark.parametrize("closed_by", ["bus", "subscription"])
async def test_closing_ends_the_iteration_after_what_is_buffered(closed_by: str) -> None:
    bus = StepBus()
    subscription = bus.subscribe()
    bus.publish(event(1))
    (bus if closed_by == "bus" else subscription).close()
    bus.publish(event(2))
    assert [e.step_id async for e in subscription] == [1]
    assert [e.step_id async for e in subscription] == []
    assert subscription.closed
    assert not bus.has_observers


async def test_closing_the_bus_wakes_a_waiting_reader() -> None:
    bus = StepBus()
    subscription = bus.subscribe()

    async def collect() -> list[Event]:
        return [e async for e in subscription]

    reader = asyncio.create_task(collect())
    await asyncio.sleep(0)
    bus.close()
    assert await asyncio.wait_for(reader, 1) == []


async def test_subscribing_to_a_closed_bus_ends_at_once() -> None:
    bus = StepBus()
    bus.close()
    assert [e async for e in bus.subscribe()] == []


async def test_drain_takes_what_is_there() -> None:
    bus = StepBus()
    subscription = bus.subscribe()
    assert subscription.drain() == []
    bus.publish(event(1))
    bus.publish(event(2))
    assert [e.step_id for e in subscription.drain()] == [1, 2]
    assert subscription.drain() == []
    bus.publish(event(3))
    assert await read(subscription, 1) == [3]


def test_an_observer_that_raises_is_logged_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    bus = StepBus()
    seen: list[int] = []

    def broken(_: Event) -> None:
        raise RuntimeError("broken on purpose")

    bus.add_observer(broken)
    bus.add_observer(lambda e: seen.append(e.step_id))
    with caplog.at_level(logging.ERROR):
        bus.publish(event(1))
        bus.publish(event(2))
    assert seen == [1, 2]
    assert len(caplog.records) == 1
    assert "broken on purpose" in caplog.text


def test_observers_may_leave_while_an_event_is_published() -> None:
    bus = StepBus()
    seen: list[str] = []

    def once(_: Event) -> None:
        seen.append("once")
        bus.remove_observer(once)

    bus.add_observer(once)
    bus.add_observer(lambda _: seen.append("always"))
    bus.publish(event(1))
    bus.publish(event(2))
    assert seen == ["once", "always", "always"]


def test_has_observers_tells_whether_events_are_worth_building() -> None:
    bus = StepBus()
    assert not bus.has_observers
    with bus.subscribe():
        assert bus.has_observers
    assert not bus.has_observers
    bus.add_observer(print)
    assert bus.has_observers
    bus.remove_observer(print)
    assert not bus.has_observers


def test_a_subscription_must_hold_something() -> None:
    with pytest.raises(ValueError, match="maxlen must be at least 1, got 0"):
        StepBus().subscribe(maxlen=0)
