"""What tests have the ranks do, in a module that a rank imports at once."""

from __future__ import annotations

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.worker.worker import Worker


def fail_alone(worker: Worker, rank: int) -> None:
    """From the next step on."""

    def fail(scheduler_output: SchedulerOutput) -> None:
        raise ZeroDivisionError("this rank alone")

    if worker.group.rank == rank:
        worker.execute_model = fail  # type: ignore[method-assign]


def num_held(worker: Worker) -> tuple[int, int]:
    """Requests that the worker knows, and its free places."""
    states = worker.runner.states
    return states.num_requests, states.num_free_slots
