"""One call of `schedule()`: the token budget, and what the step will contain.

There is no prefill and no decode here. A request has `num_computed_tokens`, and a step lets it catch up with the tokens
it has and the ones being sampled. That covers chunked prefill, prefix-cache hits, preemption and decoding alike.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container

from aioengine.config import SchedulerConfig
from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.request_queue import RequestQueue, SchedulingKey, scheduling_key
from aioengine.core.scheduler_output import AdmissionStop, CachedRequestData, NewRequestData
from aioengine.request import Request, RequestStatus


class SchedulePass:
    """Owns the budget and the lists while one step is planned; thrown away after it.

    `running` is sorted by scheduling key and the last one is preempted first. So whoever is preempted comes after the
    request that needs its blocks and has not been given tokens in this pass: nothing ever has to be taken back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        running: list[Request],
        waiting: RequestQueue,
        kv_cache_manager: KVCacheManager,
    ) -> None:
        self.config = config
        self.running = running
        self.waiting = waiting
        self.kv_cache_manager = kv_cache_manager

        self.token_budget = config.max_num_batched_tokens
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled_reqs: list[Request] = []  # those of num_scheduled_tokens, in its order
        self.running_reqs: list[Request] = []
        self.running_new_block_ids: list[list[int]] = []  # one list for each of running_reqs
        self.new_reqs: list[Request] = []
        self.resumed_reqs: list[Request] = []
        self.preempted_reqs: list[Request] = []
        self.admission_stop: AdmissionStop = "queue_empty"

    # ------------------------------------------------------------------ running requests
    def schedule_running(self) -> None:
        """Give every running request its next tokens, best first, while there is budget."""
        index = 0
        while index < len(self.running) and self.token_budget > 0:
            request = self.running[index]
            num_new_tokens = self._num_tokens_of_running(request)
            if num_new_tokens > 0:
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens)
                if new_block_ids is None:
                    break  # it was the last one, and has been preempted itself
                self._give(request, num_new_tokens)
                self.running_reqs.append(request)
                self.running_new_block_ids.append(new_block_ids)
            index += 1

    def _num_tokens_of_running(self, request: Request) -> int:
        num_known_tokens = request.num_tokens + request.num_output_placeholders
        if num_known_tokens >= request.max_num_tokens:
            return 0  # a step in flight samples its last token, which is never computed
        return self._limit(num_known_tokens - request.num_computed_tokens)

    def _limit(self, num_new_tokens: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        return num_new_tokens if num_new_tokens < self.token_budget else self.token_budget

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int) -> list[int] | None:
        while True:
            new_block_ids = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                return new_block_ids
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Free the blocks of a request and let it start over; what the prefix cache still holds then, it gets back.

        Tokens that a step in flight samples for it stay expected: that step reads and writes the blocks before any step
        that reuses them.
        """
        self.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.add(request)
        self.preempted_reqs.append(request)

    # ------------------------------------------------------------------ waiting requests
    def schedule_waiting(self) -> None:
        """Admit waiting requests in order until something runs out, and remember what it was."""
        if self.preempted_reqs:
            self.admission_stop = "preempted"
            return
        while self.waiting:
            if len(self.running) >= self.config.max_num_seqs:
                self.admission_stop = "max_num_seqs"
                return
            if self.token_budget == 0:
                self.admission_stop = "budget"
                return
            request = self.waiting.peek()
            if request.num_output_placeholders:
                self.admission_stop = "in_flight"
                return
            if (stop := self._admit(request)) is not None:
                self.admission_stop = stop
                return
        self.admission_stop = "queue_empty"

    def _admit(self, request: Request) -> AdmissionStop | None:
        """Move a request from waiting to running with its first tokens, or say why not."""
        kv = self.kv_cache_manager
        computed_block_ids = kv.get_computed_blocks(request)
        num_computed_tokens = len(computed_block_ids) * kv.block_size
        num_missing_tokens = request.num_tokens - num_computed_tokens
        if not self.config.enable_chunked_prefill and num_missing_tokens > self.token_budget:
            return "budget"
        num_new_tokens = self._limit(num_missing_tokens)
        # Room for all its known tokens, not only for the first chunk: a half-admitted prompt would only preempt others.
        if not kv.can_hold(request.num_tokens, computed_block_ids):
            return "no_blocks"
        new_block_ids = kv.allocate_slots(request, num_new_tokens, computed_block_ids=computed_block_ids)
        assert new_block_ids is not None, "can_hold() said that the blocks are there"
        kv.record_prefix_cache_lookup(num_tokens=request.num_tokens, num_hits=num_computed_tokens)

        self.waiting.pop()
        insort(self.running, request, key=self._key)
        (self.new_reqs if request.status == RequestStatus.WAITING else self.resumed_reqs).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
        self._give(request, num_new_tokens)
        return None

    def _key(self, request: Request) -> SchedulingKey:
        return scheduling_key(self.config.policy, request)

    def _give(self, request: Request, num_new_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.scheduled_reqs.append(request)
        self.token_budget -= num_new_tokens

    # ------------------------------------------------------------------ what the worker is told
    def make_new_request_data(self) -> list[NewRequestData]:
        return [
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=tuple(list(table) for table in request.block_ids),
                num_computed_tokens=request.num_computed_tokens,
            )
            for request in self.new_reqs
        ]

    def make_cached_request_data(self, prev_step_req_ids: Container[str]) -> CachedRequestData:
        """The differences for requests that the worker knows. `prev_step_req_ids`: who was in the previous step."""
        new_block_ids: list[tuple[list[int], ...] | None] = [(added,) if added else None for added in self.running_new_block_ids]
        new_block_ids += [tuple(list(table) for table in request.block_ids) for request in self.resumed_reqs]
        requests = self.running_reqs + self.resumed_reqs
        return CachedRequestData(
            req_ids=[request.request_id for request in requests],
            resumed_req_ids=frozenset(request.request_id for request in self.resumed_reqs),
            all_token_ids={
                request.request_id: request.all_token_ids.copy() for request in requests if request.request_id not in prev_step_req_ids
            },
            new_block_ids=new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[r.num_tokens - r.num_prompt_tokens + r.num_output_placeholders for r in requests],
        )
