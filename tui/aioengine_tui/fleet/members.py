"""Follows several engines, each into a state of its own, and adds them up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aioengine.errors import AioEngineError
from aioengine.events.sources.base import StepSource
from aioengine_tui.model.metrics import quantiles_of
from aioengine_tui.model.state import DashboardState, Gauges

_RETRY_S = 2.0

OpenSource = Callable[[str], StepSource]


class Member:
    """One engine: its address, its state, and why it cannot be reached, if so."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.state = DashboardState()
        self.problem: str | None = None
        self.source: StepSource | None = None

    @property
    def is_reached(self) -> bool:
        """It has told its state, and is connected."""
        return self.problem is None and self.state.stats is not None and self.state.status.state not in ("lost", "ended", "connecting")

    def gauges(self) -> Gauges:
        """As they stand now."""
        if self.source is not None and self.state.header is not None:
            self.state.tick(self.source.now())
        return self.state.gauges()

    async def follow(self, open_source: OpenSource) -> None:
        """Until cancelled. An address where nobody answers is tried again and again."""
        while True:
            try:
                async with open_source(self.address) as self.source:
                    self.problem = None
                    async for item in self.source:
                        self.state.apply(item)
                    self.problem = "it has ended"
            except AioEngineError as exc:
                self.problem = str(exc)
            finally:
                self.source = None
            await asyncio.sleep(_RETRY_S)


class Fleet:
    """The engines that are watched together. `follow()` makes it the engines at those addresses; `close()` ends it."""

    def __init__(self, open_source: OpenSource) -> None:
        self._open_source = open_source
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.members: list[Member] = []

    def follow(self, addresses: Iterable[str]) -> None:
        """Engines that are new are followed from now on; those at other addresses are left."""
        wanted = list(dict.fromkeys(addresses))
        for member in [member for member in self.members if member.address not in wanted]:
            self._tasks.pop(member.address).cancel()
            self.members.remove(member)
        known = {member.address for member in self.members}
        for address in wanted:
            if address not in known:
                member = Member(address)
                self.members.append(member)
                self._tasks[address] = asyncio.create_task(member.follow(self._open_source), name=f"aioengine-follow-{address}")

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def wait_until_reached(self, seconds: float) -> None:
        """Until every member has told its state or cannot be reached, but no longer than that."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not all(member.is_reached or member.problem for member in self.members):
            await asyncio.sleep(0.02)
            if asyncio.get_running_loop().time() > deadline:
                return


@dataclass(frozen=True, slots=True)
class FleetTotals:
    """Of all engines that are reached. Percentiles are those of all their samples together, not means of percentiles."""

    num_engines: int
    num_reached: int
    steps_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    num_running: int
    num_waiting: int  # without the preempted ones
    num_preempted: int
    num_preemptions: int
    num_used_blocks: int
    num_total_blocks: int
    kv_cache_usage: float  # 0..1
    prefix_hit_rate: float | None  # 0..1
    ttft_p50: float | None  # seconds, of the last minute
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


def add_up(members: Sequence[Member]) -> FleetTotals:
    reached = [member for member in members if member.is_reached]
    gauges = [member.gauges() for member in reached]
    datas = [member.state.data for member in reached]
    stats = [data.stats for data in datas if data.stats is not None]
    ttfts = [sample for data in datas for sample in data.ttfts.recent(data.now)]
    itls = [sample for data in datas for sample in data.itls.recent(data.now)]
    ttft_p50, ttft_p95 = quantiles_of(ttfts, 0.5, 0.95)
    itl_p50, itl_p95 = quantiles_of(itls, 0.5, 0.95)
    used, total = sum(one.num_used_blocks for one in stats), sum(one.num_total_blocks for one in stats)
    queries, hits = sum(one.prefix_cache_queries for one in stats), sum(one.prefix_cache_hits for one in stats)
    return FleetTotals(
        num_engines=len(members),
        num_reached=len(reached),
        steps_per_s=sum(one.steps_per_s for one in gauges),
        prefill_tokens_per_s=sum(one.prefill_tokens_per_s for one in gauges),
        decode_tokens_per_s=sum(one.decode_tokens_per_s for one in gauges),
        num_running=sum(one.num_running for one in gauges),
        num_waiting=sum(one.num_waiting for one in gauges),
        num_preempted=sum(one.num_preempted for one in gauges),
        num_preemptions=sum(one.num_preemptions for one in stats),
        num_used_blocks=used,
        num_total_blocks=total,
        kv_cache_usage=used / total if total else 0.0,
        prefix_hit_rate=hits / queries if queries else None,
        ttft_p50=ttft_p50,
        ttft_p95=ttft_p95,
        itl_p50=itl_p50,
        itl_p95=itl_p95,
    )
