"""How much the prefix cache saves users; what it saves of the engine's own rework is counted apart."""

from __future__ import annotations

from collections import deque

NUM_RECENT_REQUESTS = 1000
"""How far back the recent hit rate looks by default, as vLLM's does."""


class PrefixCacheStats:
    """Running totals in tokens, and the same of the last `max_recent_requests` requests.

    A request counts once, when it is first admitted. One that comes back after a preemption looks up what it computed itself:
    that would read as sharing where there is thrashing. One that must not look anything up does not count.
    """

    def __init__(self, max_recent_requests: int = NUM_RECENT_REQUESTS) -> None:
        self._max_recent_requests = max_recent_requests
        self.queries = 0  # tokens that were looked up
        self.hits = 0  # tokens that were found
        self.recent_queries = 0
        self.recent_hits = 0
        self.num_resumed_reqs = 0  # admissions after a preemption
        self.num_preempted_queries = 0  # tokens of these
        self.num_preempted_hits = 0
        self._recent: deque[tuple[int, int]] = deque()  # queries and hits of each of the last requests

    def record(self, num_queries: int, num_hits: int, *, preempted: bool) -> None:
        """A request was admitted; `preempted`: it had run before."""
        if preempted:
            self.num_resumed_reqs += 1
            self.num_preempted_queries += num_queries
            self.num_preempted_hits += num_hits
            return
        self.queries += num_queries
        self.hits += num_hits
        self._recent.append((num_queries, num_hits))
        self.recent_queries += num_queries
        self.recent_hits += num_hits
        if len(self._recent) > self._max_recent_requests:
            old_queries, old_hits = self._recent.popleft()
            self.recent_queries -= old_queries
            self.recent_hits -= old_hits

    def forget_recent(self) -> None:
        """The cache was emptied: how it did before says nothing of how it does now. The totals stay."""
        self._recent.clear()
        self.recent_queries = self.recent_hits = 0
