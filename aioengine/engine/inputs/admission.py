"""How many requests may wait: whoever comes when the queue is full is told so at once."""

from __future__ import annotations

from aioengine.core.scheduler import Scheduler
from aioengine.errors import EngineOverloadedError
from aioengine.resolved_config import AdmissionConfig


class Admission:
    """Compares what waits in the scheduler's queue with the limits, before a request is added to it.

    Everything in the queue counts: new requests, preempted ones, and also those that the next step will admit, since they
    wait until it is scheduled. A request with n continuations counts as n. Refused requests are counted in the
    scheduler's stats.
    """

    def __init__(self, config: AdmissionConfig, scheduler: Scheduler) -> None:
        self._config = config
        self._scheduler = scheduler

    def check(self, *, num_reqs: int, num_tokens: int = 0) -> None:
        """Raise EngineOverloadedError if that many more requests, with so many prompt tokens together, may not wait.

        num_tokens: 0 while the prompt has not been tokenised.
        """
        waiting = self._scheduler.waiting
        limits = (
            ("max_num_queued_reqs", "requests", len(waiting), num_reqs, self._config.max_num_queued_reqs),
            ("max_num_queued_tokens", "prompt tokens", waiting.num_prompt_tokens, num_tokens, self._config.max_num_queued_tokens),
        )
        for name, what, num_waiting, num_new, limit in limits:
            if limit is not None and num_new and num_waiting + num_new > limit:
                self._scheduler.note_rejected(num_reqs)
                advice = "try again later" if num_new <= limit else "that many may never wait together"
                raise EngineOverloadedError(f"{num_waiting} {what} wait, {num_new} more would exceed {name}={limit}: {advice}")
