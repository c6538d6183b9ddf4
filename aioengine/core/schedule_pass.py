"""One call of `schedule()`: the token budget, and what the step will contain.

There is no prefill and no decode here. A request has `num_computed_tokens`, and a step lets it catch up with the tokens
it has and the ones being sampled. That covers chunked prefill, prefix-cache hits, preemption and decoding alike.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container

from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.ngram_proposer import NgramProposer
from aioengine.core.priority_preemption import Claim, num_to_preempt
from aioengine.core.request_queue import RequestQueue, SchedulingKey, scheduling_key
from aioengine.core.scheduler_output import AdmissionStop, CachedRequestData, KVLoad, NewRequestData
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import SchedulerConfig


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
        proposer: NgramProposer | None = None,
        num_loading: int = 0,  # requests that wait for blocks to be loaded: they will run
    ) -> None:
        self.config = config
        self.proposer = proposer
        self.running = running
        self.waiting = waiting
        self.kv_cache_manager = kv_cache_manager
        self._num_loading = num_loading

        # It keeps one request from taking what others could have; whoever is alone takes nothing from anybody.
        has_others = len(running) + len(waiting) + num_loading > 1
        self._max_tokens_a_request = config.long_prefill_token_threshold if has_others else 0  # 0: no limit
        self.token_budget = config.max_num_batched_tokens
        self.num_scheduled_tokens: dict[str, int] = {}
        self.spec_token_ids: dict[str, list[int]] = {}  # draft tokens, counted in num_scheduled_tokens
        self.running_reqs: list[Request] = []
        self.running_new_block_ids: list[tuple[list[int], ...] | None] = []  # for each of running_reqs, by group; None: none
        self.admitted_reqs: list[Request] = []  # new and resumed ones
        self.new_reqs: list[Request] = []
        self.resumed_reqs: list[Request] = []
        self.loading_reqs: list[Request] = []  # waiting ones whose blocks begin to be loaded
        self.loads: list[KVLoad] = []  # one for each of them
        self.preempted_reqs: list[Request] = []
        self.num_priority_preempted_reqs = 0  # of these, the first ones: preempted for a waiting request
        self.admission_stop: AdmissionStop = "queue_empty"
        self.stopped_req: Request | None = None  # the waiting one at which admission stopped
        self.num_blocks_needed = 0  # free ones that it would take; 0: blocks are not what it lacks

    # ------------------------------------------------------------------ room for a more urgent request
    def make_room(self) -> None:
        """Policy "priority": preempt running requests of strictly lower priority if that lets the best waiting one in.

        For one waiting request a step, and before any tokens are given, so that nothing has to be taken back. Who gave way
        comes after that request in the queue and, being of lower priority, cannot preempt it in turn.
        """
        if self.config.policy != "priority" or not self.waiting or not self.running:
            return
        request = self.waiting.peek()
        if request.num_output_placeholders or self.running[-1].priority <= request.priority:
            return
        self.num_priority_preempted_reqs = num_to_preempt(
            request, running=self.running, claims=self._claims(), config=self.config, kv_cache_manager=self.kv_cache_manager
        )
        for _ in range(self.num_priority_preempted_reqs):
            self._preempt(self.running.pop())

    def _claims(self) -> list[Claim]:
        """Entry i: what `schedule_running` will give to the first i running requests."""
        claims, budget = [Claim(0, 0)], self.token_budget
        for request in self.running:
            num_new_tokens = self._num_tokens_of_running(request)
            num_tokens = request.num_computed_tokens + num_new_tokens
            num_new_blocks = self.kv_cache_manager.num_new_blocks(request, num_tokens) if num_new_tokens else 0
            claims.append(Claim(claims[-1].num_tokens + num_new_tokens, claims[-1].num_blocks + num_new_blocks))
            self.token_budget -= num_new_tokens
        self.token_budget = budget
        return claims

    # ------------------------------------------------------------------ running requests
    def schedule_running(self) -> None:
        """Give every running request its next tokens, best first, while there is budget."""
        if self.proposer is not None:
            self.proposer.start_step()
        for index, request in enumerate(self.running):  # whoever is preempted meanwhile comes behind `index`
            if self.token_budget == 0:
                break
            num_new_tokens = self._num_tokens_of_running(request)
            if num_new_tokens <= 0:
                continue
            draft_token_ids: list[int] = []
            if self.proposer is not None:
                draft_token_ids = self._propose_draft_tokens(request, num_new_tokens, num_after=len(self.running) - index - 1)
                num_new_tokens += len(draft_token_ids)
            new_block_ids: tuple[list[int], ...] | None = ()
            if request.num_computed_tokens + num_new_tokens > request.num_settled_tokens:
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens)
                if new_block_ids is None:
                    break  # it was the last one, and has been preempted itself
            self.num_scheduled_tokens[request.request_id] = num_new_tokens
            self.token_budget -= num_new_tokens
            if draft_token_ids:
                request.spec_token_ids = self.spec_token_ids[request.request_id] = draft_token_ids
            self.running_reqs.append(request)
            self.running_new_block_ids.append(new_block_ids or None)

    def _num_tokens_of_running(self, request: Request) -> int:
        if request.spec_token_ids:
            return 0  # where it goes on depends on what becomes of the draft tokens in flight: the difference below would be negative
        num_known_tokens = request.num_tokens + request.num_output_placeholders
        if num_known_tokens >= request.max_num_tokens:
            return 0  # a step in flight samples its last token, which is never computed
        num_new_tokens = num_known_tokens - request.num_computed_tokens
        if num_new_tokens == 1 and self.token_budget:  # mostly: no limit is below it
            return 1
        return self._limit(num_new_tokens)

    def _limit(self, num_new_tokens: int) -> int:
        if 0 < self._max_tokens_a_request < num_new_tokens:
            num_new_tokens = self._max_tokens_a_request
        return num_new_tokens if num_new_tokens < self.token_budget else self.token_budget

    def _propose_draft_tokens(self, request: Request, num_new_tokens: int, *, num_after: int) -> list[int]:
        """Draft tokens for what follows the last known token of a running request, if that token is all it computes now.

        They take nothing that others need: each of the `num_after` requests behind it still gets a token of the budget, the
        pool keeps a free block for every running request, and a more urgent request that was made room for comes first.
        A grammar would have to be asked about every draft token, so requests with structured output get none.
        """
        assert self.proposer is not None
        if request.sampling_params.structured_outputs is not None:
            return []
        num_outstanding = request.num_tokens - request.num_computed_tokens
        if num_outstanding != 1 or not num_new_tokens or not request.num_output_tokens or request.num_output_placeholders:
            self.proposer.observe(request.request_id, request.all_token_ids)
            return []
        limit = min(
            self.config.num_speculative_tokens,
            request.max_num_tokens - request.num_tokens - 1,  # the step samples one token more than there are draft tokens
            self._limit(self.token_budget - num_after) - 1,
            self._num_slots_for_draft_tokens(request),
        )
        if self.num_priority_preempted_reqs:
            limit = 0
        return self.proposer.propose(request.request_id, request.all_token_ids, limit=limit, num_running=len(self.running))

    def _num_slots_for_draft_tokens(self, request: Request) -> int:
        kv = self.kv_cache_manager
        num_tokens = request.num_computed_tokens + 1
        num_blocks = max(len(request.block_ids[0]), -(-num_tokens // kv.block_size))
        num_blocks += max(0, kv.block_pool.num_free_blocks // len(kv.groups) - len(self.running))
        return num_blocks * kv.block_size - num_tokens

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int) -> tuple[list[int], ...] | None:
        while True:
            new_block_ids = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_block_ids is not None:
                return new_block_ids
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None

    def preempt_all(self) -> None:
        """Preempt whoever runs, as if no block were left: the last one first."""
        while self.running:
            self._preempt(self.running.pop())

    def _preempt(self, request: Request) -> None:
        """Free the blocks of a request and let it start over; what the prefix cache still holds then, it gets back.

        Tokens that a step in flight samples for it stay expected: that step reads and writes the blocks before any step
        that reuses them.
        """
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)  # the last block may have become full of known tokens
        self.kv_cache_manager.free(request)
        num_computed_tokens = min(request.num_computed_tokens, request.num_tokens + request.num_output_placeholders)  # no guesses
        request.recompute_until = max(request.recompute_until, num_computed_tokens)
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.add(request)
        self.preempted_reqs.append(request)

    # ------------------------------------------------------------------ waiting requests
    def schedule_waiting(self) -> None:
        """Admit waiting requests in order until something runs out, and remember what it was, and for whom."""
        if len(self.preempted_reqs) > self.num_priority_preempted_reqs:
            self.admission_stop, self.stopped_req = "preempted", self.waiting.peek()
            return
        while self.waiting:
            request = self.waiting.peek()
            if (stop := self._find_stop(request) or self._admit(request)) is not None:
                self.admission_stop, self.stopped_req = stop, request
                return
        self.admission_stop = "queue_empty"

    def _find_stop(self, request: Request) -> AdmissionStop | None:
        """Why this waiting request cannot be admitted, whatever it needs; None: it depends on what it needs."""
        if len(self.running) + self._num_loading + len(self.loading_reqs) >= self.config.max_num_seqs:
            return "max_num_seqs"
        if self.token_budget == 0:
            return "budget"
        if request.num_output_placeholders:
            return "in_flight"
        if self.num_priority_preempted_reqs and request in self.preempted_reqs:
            return "preempted"  # a step cannot both take a request's slot and give it one
        return None

    def _admit(self, request: Request) -> AdmissionStop | None:
        """Move a request from waiting to running with its first tokens, or say why not."""
        kv = self.kv_cache_manager
        computed = kv.get_computed_blocks(request)
        num_computed_tokens = len(computed[0]) * kv.block_size
        num_missing_tokens = request.num_tokens - num_computed_tokens
        if not self.config.enable_chunked_prefill and num_missing_tokens > self.token_budget:
            return "budget"
        num_new_tokens = self._limit(num_missing_tokens)
        # Room for all its known tokens, not only for the first chunk: a half-admitted prompt would only preempt others.
        num_blocks = kv.num_blocks_to_take(request.num_tokens, computed)
        if num_blocks > kv.block_pool.num_free_blocks:
            self.num_blocks_needed = num_blocks
            return "no_blocks"
        if request.status == RequestStatus.WAITING and kv.num_external_blocks(request) > len(computed[0]):
            self._start_load(request, computed)
            return None
        new_block_ids = kv.allocate_slots(request, num_new_tokens, computed=computed)
        assert new_block_ids is not None, "it was counted that the blocks are there"
        kv.record_prefix_cache_lookup(request, num_hits=num_computed_tokens)

        self.waiting.pop()
        self._insert_running(request)
        (self.new_reqs if request.status == RequestStatus.WAITING else self.resumed_reqs).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        self.admitted_reqs.append(request)
        return None

    def _start_load(self, request: Request, computed: tuple[list[int], ...]) -> None:
        """Let a request wait for its blocks where it holds nobody up. It comes back to the queue, in its place, when they are there."""
        block_ids = self.kv_cache_manager.allocate_for_load(request, computed)
        self.loads.append(KVLoad(request.request_id, block_ids, computed[0]))
        self.waiting.pop()
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.loading_reqs.append(request)

    def _insert_running(self, request: Request) -> None:
        if self.running and self._key(self.running[-1]) > self._key(request):
            insort(self.running, request, key=self._key)
        else:  # mostly
            self.running.append(request)

    def _key(self, request: Request) -> SchedulingKey:
        return scheduling_key(self.config.policy, request)

    # ------------------------------------------------------------------ what the worker is told
    @property
    def scheduled_reqs(self) -> list[Request]:
        """Those of num_scheduled_tokens, in its order."""
        return self.running_reqs + self.admitted_reqs

    def structured_output_request_ids(self) -> frozenset[str]:
        """The requests that a grammar constrains and that sample in this step. Before the counters are advanced past it."""
        return frozenset(
            request.request_id
            for request, num_tokens in zip(self.scheduled_reqs, self.num_scheduled_tokens.values(), strict=True)
            if request.sampling_params.structured_outputs is not None
            and request.num_computed_tokens + num_tokens == request.num_tokens + request.num_output_placeholders
        )

    def make_new_request_data(self) -> list[NewRequestData]:
        return [
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=tuple(map(list, request.block_ids)),
                num_computed_tokens=request.num_computed_tokens,
                pooling_params=request.pooling_params,
                lora_name=request.lora_name,
            )
            for request in self.new_reqs
        ]

    def make_cached_request_data(self, prev_step_req_ids: Container[str]) -> CachedRequestData:
        """The differences for requests that the worker knows. `prev_step_req_ids`: who was in the previous step."""
        requests = self.running_reqs + self.resumed_reqs
        if not requests:
            return CachedRequestData()
        new_block_ids = self.running_new_block_ids + [tuple(map(list, request.block_ids)) for request in self.resumed_reqs]
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
