"""One simulation: arrivals and the ends of steps, in the order of their times, over one or several replicas."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, Protocol, get_args

from aioengine.outputs import EngineCoreOutput
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.simulate.replica import Replica
from aioengine_bench.timeline import RequestRecord

Routing = Literal["round_robin", "least_loaded", "prefix_aware"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_MAX_IMBALANCE = 1.5  # prefix_aware: the replica with the prefix may have that many times the load of the least loaded one


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """duration: seconds of the virtual clock."""

    duration: float
    num_steps: int
    num_preemptions: int


class Recorder(Protocol):
    """Is told who comes, and what each step gave."""

    def note_arrival(self, arrival: Arrival) -> None: ...

    def note_failure(self, arrival: Arrival, error: str) -> None: ...

    def take(self, outputs: Sequence[EngineCoreOutput], now: float) -> None: ...


class DetailedRecorder:
    """Keeps what each request got, and when."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []  # in the order in which requests ended
        self._live: dict[str, tuple[Arrival, list[float]]] = {}

    def note_arrival(self, arrival: Arrival) -> None:
        self._live[arrival.request_id] = arrival, []

    def note_failure(self, arrival: Arrival, error: str) -> None:
        del self._live[arrival.request_id]
        self.records.append(RequestRecord(arrival.index, arrival.prompt_len, arrival.time, arrival.time, outcome="failed", error=error))

    def take(self, outputs: Sequence[EngineCoreOutput], now: float) -> None:
        for output in outputs:
            self._live[output.request_id][1].append(now)
            if output.finish_reason is not None:
                self._finish(*self._live.pop(output.request_id), output.num_cached_tokens)

    def _finish(self, arrival: Arrival, times: list[float], num_cached_tokens: int) -> None:
        self.records.append(
            RequestRecord(
                index=arrival.index,
                prompt_len=arrival.prompt_len,
                due_time=arrival.time,
                send_time=arrival.time,
                chunk_times=tuple(times),
                chunk_sizes=(1,) * len(times),
                num_cached_tokens=num_cached_tokens,
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
                chosen: dict[int, Replica] = {}
                while arrival is not None and arrival.time <= now:  # who comes at once is in the queue before a step is planned
                    replica = route(arrival)
                    _add(arrival, replica, recorder)
                    chosen[id(replica)] = replica
                    if on_arrival is not None:
                        on_arrival()
                    arrival = next(coming, None)
                for replica in chosen.values():
                    replica.run(now)
            elif replica is not None and due is not None:
                now = max(now, due)
                replica.update(now)
                replica.run(now)
            else:
                break
    return SimulatedRun(
        now,
        sum(replica.num_steps for replica in replicas),
        sum(replica.scheduler.totals.num_preemptions for replica in replicas),
    )


def _add(arrival: Arrival, replica: Replica, recorder: Recorder) -> None:
    recorder.note_arrival(arrival)
    if (error := replica.add(arrival)) is not None:
        recorder.note_failure(arrival, error)


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
