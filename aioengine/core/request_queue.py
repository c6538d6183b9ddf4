"""The requests that wait, in the order in which they will be admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from aioengine.request import Request
from aioengine.resolved_config import SchedulingPolicy

SchedulingKey = tuple[int, int]

SJF_AGING_TOKENS = 256
"""Policy "sjf": what having come one request earlier is worth, in tokens of the prompt."""


def scheduling_key(policy: SchedulingPolicy, request: Request) -> SchedulingKey:
    """The one order of a policy: who is admitted first and, read backwards, who is preempted first.

    fcfs: by arrival. priority: a lower number first, equals by arrival. sjf: the shortest prompt first, but each request that came
    before weighs like so many tokens: who waits is overtaken by a bounded number, and no clock is needed for it.
    """
    if policy == "fcfs":
        return (0, request.arrival_index)
    if policy == "priority":
        return (request.priority, request.arrival_index)
    return (request.num_prompt_tokens + SJF_AGING_TOKENS * request.arrival_index, request.arrival_index)


class RequestQueue:
    """A heap by scheduling key.

    A preempted request comes back with `add` like a new one: its key puts it before all that arrived after it. Removal
    only unlists: the entry is dropped when it reaches the top, so an abort does not scan the queue.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy: SchedulingPolicy = policy
        self._heap: list[tuple[SchedulingKey, int, Request]] = []
        self._live: dict[str, int] = {}  # request_id -> the number of its entry in the heap
        self._num_added = 0
        self.num_preempted = 0  # of those in the queue, how many ran before
        self.num_prompt_tokens = 0  # of those in the queue, together

    def add(self, request: Request) -> None:
        self._num_added += 1
        self._live[request.request_id] = self._num_added
        self.num_preempted += request.num_preemptions > 0
        self.num_prompt_tokens += request.num_prompt_tokens
        heapq.heappush(self._heap, (scheduling_key(self._policy, request), self._num_added, request))

    def peek(self) -> Request:
        """The request that is next, still in the queue."""
        while not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        """Take the request that is next."""
        request = self.peek()
        heapq.heappop(self._heap)
        self._unlist(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        self._unlist(request)
        if len(self._heap) > 2 * len(self._live) + 16:  # unlisted entries under a top that never moves
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _unlist(self, request: Request) -> None:
        del self._live[request.request_id]
        self.num_preempted -= request.num_preemptions > 0
        self.num_prompt_tokens -= request.num_prompt_tokens

    def _is_live(self, entry: tuple[SchedulingKey, int, Request]) -> bool:
        return self._live.get(entry[2].request_id) == entry[1]

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission."""
        return iter([entry[2] for entry in sorted(self._heap, key=lambda entry: entry[:2]) if self._is_live(entry)])

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._live
