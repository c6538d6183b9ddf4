"""A recording's own requests, tokens and times of steps, driven by the simulator's loop: it must come to the recording's frames.

What `replay` repeats call by call is decided here by the loop of the simulation itself: when to schedule, and how often. So this is
the test of that loop against a real engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.step_event import Event, SchedulerCall, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.replay.frames import FrameReplay
from aioengine.replay.recording import steps_in_order

_OUTSIDE: frozenset[SchedulerCall] = frozenset({"add", "finish", "reset", "reset_running"})


class RecordedLoop(FrameReplay):
    """Schedules by the rules of `Replica`, at the times at which a recorded engine could."""

    def frames(self, events: Sequence[Event]) -> Iterator[SchedulerOutput]:
        """The outputs in order. What came from outside comes when it came; steps end when they ended; the rest is the loop's.

        Raises ConfigError as `steps_in_order`.
        """
        depth = self.scheduler.config.max_concurrent_batches
        steps = list(steps_in_order(events))
        results = {event.step_id: event for event in steps if isinstance(event, StepResultEvent)}
        self._untold = {event.step_id: event for event in steps if isinstance(event, StepEvent)}
        in_flight: deque[SchedulerOutput] = deque()
        for event in steps:
            self._event = event
            if isinstance(event, StepEvent):
                if not _OUTSIDE.intersection(event.calls):
                    continue  # nothing came: if this step was right to come, the loop has scheduled it by itself
                self._learn_next()
                for _ in self._calls(event):
                    pass
            else:
                self._take_in(event, in_flight.popleft())
            while len(in_flight) < depth and (output := self._schedule()) is not None:
                self.scheduler.drop_report()
                in_flight.append(output)
                yield output
        assert all(output.step_id not in results for output in in_flight), "a result of a step that was not taken in"

    def _schedule(self) -> SchedulerOutput | None:
        self._learn_next()
        return self.scheduler.schedule()

    def _learn_next(self) -> None:
        """The block hashes that requests come to in the next step: where text was left out, the scheduler cannot compute them."""
        event = self._untold.pop(self.scheduler.last_step_id + 1, None)
        if event is not None:
            self._learn_hashes(event)

    def _take_in(self, event: StepResultEvent, output: SchedulerOutput) -> None:
        self._learn_hashes(event)
        for call in self._calls(event):
            if call == "update":
                self.scheduler.update_from_output(output, self._worker_output(event, output))
        self.scheduler.drop_report()


def simulated_frames(header: WireHeader, events: Sequence[Event]) -> list[SchedulerOutput]:
    """The frames of a simulation with the recorded times of steps. Raises ConfigError for what cannot be run again."""
    return list(RecordedLoop(header).frames(events))
