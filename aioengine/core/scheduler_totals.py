"""What a scheduler has counted since it was built: the absolute numbers that every observer is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aioengine.request import Request, RequestStatus


class SchedulerTotals:
    """Running totals, never reset. Tokens of a prompt and those that a preemption lost are told apart here."""

    def __init__(self) -> None:
        self.num_arrived_reqs = 0
        self.num_finished_reqs = 0  # however they ended
        self.num_aborted_reqs = 0
        self.num_error_reqs = 0
        self.num_rejected_reqs = 0  # refused before they came to the scheduler
        self.num_preemptions = 0
        self.num_output_tokens = 0  # sampled and accepted
        self.num_prompt_tokens_computed = 0  # for the first time
        self.num_recomputed_tokens = 0  # prompt and output tokens, again after a preemption
        self.num_draft_tokens = 0  # draft tokens that were checked
        self.num_accepted_tokens = 0  # those of them that were right
        self.num_external_queries = 0  # tokens that a KV connector was asked for
        self.num_external_hits = 0  # and that came from it
        self._catching_up: dict[str, Request] = {}  # running ones whose next step computes prompt tokens, or lost ones

    def note_ended(self, request: Request) -> None:
        """Its status says how."""
        self.num_finished_reqs += 1
        self.num_aborted_reqs += request.status == RequestStatus.FINISHED_ABORTED
        self.num_error_reqs += request.status == RequestStatus.FINISHED_ERROR
        self._catching_up.pop(request.request_id, None)

    def note_preempted(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.num_preemptions += 1
            self._catching_up.pop(request.request_id, None)

    def note_scheduled(self, num_scheduled_tokens: Mapping[str, int], *, admitted: Iterable[Request]) -> None:
        """A step computes so many tokens of each request. To be called before their counters are advanced past it.

        Costs nothing for a request that only decodes.
        """
        for request in admitted:
            self._catching_up[request.request_id] = request
        for req_id, request in list(self._catching_up.items()):
            start = request.num_computed_tokens
            end = start + num_scheduled_tokens.get(req_id, 0)
            num_lost = max(0, min(end, request.recompute_until) - start)
            self.num_recomputed_tokens += num_lost
            self.num_prompt_tokens_computed += max(0, min(end, request.num_prompt_tokens) - start - num_lost)
            if end >= max(request.num_prompt_tokens, request.recompute_until):
                del self._catching_up[req_id]
