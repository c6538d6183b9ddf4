"""One simulation: arrivals and the ends of steps, in the order of their times, over one or several replicas."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, get_args

from aioengine.outputs import EngineCoreOutput
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.simulate.replica import Replica
from aioengine_bench.timeline import RequestRecord

Routing = Literal["round_robin", "least_loaded", "prefix_aware"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_MAX_IMBALANCE = 1.5  # prefix_aware: the replica with the prefix may have that many times the load of the least loaded one


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """records: in the order in which requests ended. duration: seconds of the virtual clock."""

    records: list[RequestRecord]
    duration: float
    num_steps: int
    num_preemptions: int


class Recorder:
    """Collects what each request got. Without `every_token` only first and last: of a million requests the rest would not fit."""

    def __init__(self, *, every_token: bool) -> None:
        self.records: list[RequestRecord] = []
        self._every_token = every_token
        self._arrivals: dict[str, Arrival] = {}
        self._times: dict[str, list[float]] = {}
        self._counts: dict[str, int] = {}

    def note_arrival(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request_id] = arrival

    def note_failure(self, arrival: Arrival, error: str) -> None:
        del self._arrivals[arrival.request_id]
        self.records.append(RequestRecord(arrival.index, arrival.prompt_len, arrival.time, arrival.time, outcome="failed", error=error))

    def take(self, outputs: Sequence[EngineCoreOutput], now: float) -> None:
        times, counts, every_token = self._times, self._counts, self._every_token
        for output in outputs:
            req_id = output.request_id
            own = times.get(req_id)
            if own is None:
                times[req_id] = [now]
                counts[req_id] = 1
            elif every_token or output.finish_reason is not None:
                own.append(now)
                counts[req_id] += 1
            else:
                counts[req_id] += 1
            if output.finish_reason is not None:
                self._finish(req_id, output.num_cached_tokens)

    def _finish(self, req_id: str, num_cached_tokens: int) -> None:
        arrival, times, count = self._arrivals.pop(req_id), self._times.pop(req_id), self._counts.pop(req_id)
        sizes = (1,) * len(times) if len(times) == count else (1, count - 1)
        self.records.append(
            RequestRecord(
                arrival.index, arrival.prompt_len, arrival.time, arrival.time, tuple(times), sizes, num_cached_tokens=num_cached_tokens
            )
        )


def make_router(routing: Routing, replicas: Sequence[Replica]) -> Callable[[Arrival], Replica]:
    """Which replica gets a request. Equal ones in the order of their numbers."""
    if routing == "round_robin":
        turns = cycle(replicas)
        return lambda arrival: next(turns)

    def least_loaded(arrival: Arrival) -> Replica:
        return min(replicas, key=lambda replica: replica.num_outstanding_tokens)

    def prefix_aware(arrival: Arrival) -> Replica:
        limit = _MAX_IMBALANCE * least_loaded(arrival).num_outstanding_tokens + arrival.prompt_len
        allowed = [replica for replica in replicas if replica.num_outstanding_tokens <= limit]
        return max(allowed, key=lambda replica: (replica.num_cached_blocks_of(arrival), -replica.num_outstanding_tokens))

    return least_loaded if routing == "least_loaded" else prefix_aware


def simulate(
    arrivals: Iterable[Arrival],
    replicas: Sequence[Replica],
    *,
    recorder: Recorder,
    routing: Routing = "round_robin",
    on_arrival: Callable[[], object] | None = None,
) -> SimulatedRun:
    """Run to the end of the last request. The arrivals must come in the order of their times; they may be made as they are read."""
    route = make_router(routing, replicas)
    coming = iter(arrivals)
    arrival = next(coming, None)
    now = 0.0
    with _no_garbage_collection():
        while True:
            replica: Replica | None = None
            due = None
            for candidate in replicas:
                time = candidate.next_time
                if time is not None and (due is None or time < due):
                    replica, due = candidate, time
            if arrival is not None and (due is None or arrival.time <= due):
                now = max(now, arrival.time)
                replica = route(arrival)
                recorder.note_arrival(arrival)
                if (error := replica.add(arrival)) is not None:
                    recorder.note_failure(arrival, error)
                if on_arrival is not None:
                    on_arrival()
                arrival = next(coming, None)
            elif replica is not None and due is not None:
                now = max(now, due)
                replica.update(now)
            else:
                break
            replica.run(now)
    return SimulatedRun(
        recorder.records,
        now,
        sum(replica.num_steps for replica in replicas),
        sum(replica.scheduler.totals.num_preemptions for replica in replicas),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing here refers to itself, and a million live objects take long to look at."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
