"""Why a request was slow: how long it waited and for what, and how long it stood preempted.

The core has no clock; this is kept beside it, from what each call of `schedule()` says. Nothing is done for each request in each
step: one sum is kept of the time that passed under each reason, and a request's wait is the difference of two readings of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from aioengine.core.scheduler_output import AdmissionStop, SchedulerOutput

PREPARE = "prepare"
"""Before the request reached the scheduler: its text was tokenised, its grammar compiled."""

_NAMES: dict[AdmissionStop, str] = {
    "queue_empty": "step",  # nothing stood in its way but the steps that were under way
    "budget": "budget",
    "max_num_seqs": "seqs",
    "no_blocks": "blocks",
    "preempted": "preempted",
    "in_flight": "in_flight",
}


@dataclass(frozen=True, slots=True)
class RequestSchedule:
    """scheduled_time: of its first tokens, in seconds of `time.perf_counter()`; None: it never ran.

    waits: the seconds before that by what they were spent on; they add up to the time in the queue.
    """

    scheduled_time: float | None
    waits: dict[str, float]
    preemptions: tuple[tuple[float, float], ...] = ()  # from when to when it stood preempted


class _Waits:
    """Seconds by reason, of all the time there was."""

    __slots__ = ("_name", "_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_NAMES.values(), 0.0)
        self._name = "step"
        self._since = 0.0

    def turn(self, stop: AdmissionStop, now: float) -> None:
        """From now on requests wait because of this."""
        self._seconds[self._name] += now - self._since
        self._name, self._since = _NAMES[stop], now

    def read(self, now: float) -> dict[str, float]:
        seconds = self._seconds.copy()
        seconds[self._name] += now - self._since
        return seconds


class _Times:
    __slots__ = ("added_time", "arrival_time", "preempted_since", "preemptions", "scheduled_time", "waits")

    def __init__(self, arrival_time: float, added_time: float, waits: dict[str, float]) -> None:
        self.arrival_time = arrival_time
        self.added_time = added_time
        self.waits = waits  # the reading when it was added; from when it is scheduled, its own
        self.scheduled_time: float | None = None
        self.preempted_since: float | None = None
        self.preemptions: tuple[tuple[float, float], ...] = ()


class RequestTimes:
    """The times of the live requests of one engine, by the scheduler's ids."""

    def __init__(self) -> None:
        self._waits = _Waits()
        self._live: dict[str, _Times] = {}

    def __len__(self) -> int:
        return len(self._live)

    def note_added(self, request_id: str, *, arrival_time: float, now: float) -> None:
        """It is in the scheduler's queue."""
        self._live[request_id] = _Times(arrival_time, now, self._waits.read(now))

    def note_schedule(self, output: SchedulerOutput | None, *, stop: AdmissionStop, now: float) -> None:
        """`schedule()` was called at `now` and admitted until `stop`."""
        if output is not None:
            for new in output.scheduled_new_reqs:
                if (times := self._live.get(new.req_id)) is not None:
                    times.waits, times.scheduled_time = self._own_waits(times, now), now
            for request_id in sorted(output.preempted_req_ids):
                if (times := self._live.get(request_id)) is not None:
                    times.preempted_since = now
            for request_id in sorted(output.scheduled_cached_reqs.resumed_req_ids):
                if (times := self._live.get(request_id)) is not None:
                    _resume(times, now)
        self._waits.turn(stop, now)

    def take(self, request_id: str, *, now: float) -> RequestSchedule | None:
        """It has ended: what is known of it, which is forgotten here. None if it is not known."""
        times = self._live.pop(request_id, None)
        if times is None:
            return None
        _resume(times, now)
        return self._schedule(times, now)

    def look_up(self, request_id: str, *, now: float) -> RequestSchedule | None:
        """As `take`, of one that goes on."""
        times = self._live.get(request_id)
        return None if times is None else self._schedule(times, now)

    def clear(self) -> None:
        self._live.clear()

    def _schedule(self, times: _Times, now: float) -> RequestSchedule:
        waits = times.waits if times.scheduled_time is not None else self._own_waits(times, now)
        return RequestSchedule(times.scheduled_time, waits, times.preemptions)

    def _own_waits(self, times: _Times, now: float) -> dict[str, float]:
        before = times.waits
        waits = {PREPARE: times.added_time - times.arrival_time}
        waits.update((name, seconds - before[name]) for name, seconds in self._waits.read(now).items())
        return {name: seconds for name, seconds in waits.items() if seconds > 0}


def _resume(times: _Times, now: float) -> None:
    if times.preempted_since is not None:
        times.preemptions = (*times.preemptions, (times.preempted_since, now))
        times.preempted_since = None
