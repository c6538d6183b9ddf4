"""The scheduler: decides each step's batch, and takes in what the step produced.

Plain synchronous code without a clock: the same calls in the same order give the same outputs. The engine calls
`schedule()` and `update_from_output()`, possibly with two steps in flight (with draft tokens it keeps to one, as they continue
known tokens); everything else is adding and ending requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from aioengine.core.block_hash import BlockHash
from aioengine.core.invariants import check_scheduler
from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.ngram_proposer import NgramProposer
from aioengine.core.request_queue import RequestQueue
from aioengine.core.schedule_pass import SchedulePass
from aioengine.core.scheduler_output import AdmissionStop, BlockChanges, KVConnectorMetadata, SchedulerOutput, SchedulerStats
from aioengine.core.scheduler_totals import SchedulerTotals
from aioengine.core.stop import check_stop, set_end_conditions
from aioengine.errors import InvalidRequestError
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """What observers are told beside the output itself."""

    admission_stop: AdmissionStop
    block_changes: BlockChanges
    stopped_req_id: str | None  # the waiting request at which admission stopped
    num_blocks_needed: int  # free blocks that it would take; 0: blocks are not what it lacks
    block_hashes: dict[str, list[str]]  # that requests got since the last report, by request, shortened


class Scheduler:
    """Owns every request from `add_request()` to its end.

    `num_kv_cache_blocks` includes the null block. With `check_invariants` the books are checked after every call, which
    costs time proportional to everything alive.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        cache: CacheConfig,
        num_kv_cache_blocks: int,
        eos_token_ids: frozenset[int] = frozenset(),
        check_invariants: bool = False,
    ) -> None:
        self.config = config
        self.kv_cache_manager = KVCacheManager(
            cache, num_kv_cache_blocks=num_kv_cache_blocks, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self._max_request_tokens = self.kv_cache_manager.longest_request(config.max_model_len)  # that the cache can hold
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(config.policy)
        self.running: list[Request] = []  # sorted by scheduling key
        self.loading: dict[str, Request] = {}  # hold blocks that a KV connector is filling
        self.totals = SchedulerTotals()

        self.proposer: NgramProposer | None = None
        if config.num_speculative_tokens:
            self.proposer = NgramProposer(
                num_speculative_tokens=config.num_speculative_tokens, min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max
            )

        self._check_invariants = check_invariants
        self._last_step_id = 0
        self._last_updated_step_id = 0
        self._finished_req_ids: set[str] = set()  # ended, not yet told to the worker
        self._preempted_req_ids: dict[str, None] = {}  # preempted between two steps, not yet told to the worker
        self._lingering_req_ids: set[str] = set()  # ended, the worker may still hold them
        self._structured_output_req_ids: set[str] = set()  # live ones
        self._prev_step_req_ids: Container[str] = ()
        self._admission_stop: AdmissionStop = "queue_empty"
        self._stopped_req_id: str | None = None
        self._num_blocks_needed = 0
        self._leaving: list[tuple[int, BlockHash]] = []  # what the last step's saves hold

    # ------------------------------------------------------------------ requests in and out
    def add_request(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError if it could never run to its end here."""
        self._check_fits(request)
        set_end_conditions(request, max_model_len=self.config.max_model_len, eos_token_ids=self.eos_token_ids)
        request.arrival_index = self.totals.num_arrived_reqs
        self.totals.num_arrived_reqs += 1
        request.block_ids = self.kv_cache_manager.make_tables()
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if request.block_hashes:
            self.kv_cache_manager.note_hashes(request, 0)
        if request.sampling_params.structured_outputs is not None:
            self._structured_output_req_ids.add(request.request_id)
        self._check()

    def _check_fits(self, request: Request) -> None:
        if request.request_id in self.requests or request.request_id in self._lingering_req_ids:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use")
        num_prompt_tokens, max_model_len = request.num_prompt_tokens, self.config.max_model_len
        if num_prompt_tokens == 0:
            raise InvalidRequestError("the prompt has no tokens")
        if num_prompt_tokens >= max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {max_model_len} and at least one token must be generated"
            )
        num_tokens = min(num_prompt_tokens + request.max_tokens, max_model_len)
        kv = self.kv_cache_manager
        if num_tokens - 1 > self._max_request_tokens:
            groups = f", in {len(kv.groups)} KV-cache groups" if len(kv.groups) > 1 else ""
            raise InvalidRequestError(
                f"the request needs {kv.num_blocks_for(num_tokens - 1)} KV blocks ({num_prompt_tokens} prompt tokens and up to "
                f"{num_tokens - num_prompt_tokens} more, {kv.block_size} a block{groups}), "
                f"but the cache has {kv.block_pool.num_total_blocks}"
            )

    def max_tokens_limit(self, num_prompt_tokens: int) -> int:
        """The most tokens that a prompt of this length can be continued by; below 1: it does not fit at all.

        The last token is sampled but never computed, so it needs no slot in the KV cache.
        """
        return min(self.config.max_model_len, self._max_request_tokens + 1) - num_prompt_tokens

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside: aborts, stop strings, errors. Unknown and ended ids are ignored.

        Safe at any time, also while steps that contain them are in flight: their tokens are dropped when they arrive.
        Returns the requests that this call ended.
        """
        assert status.is_finished
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            self._end(request, status)
            ended.append(request)
        self._check()
        return ended

    def note_rejected(self, num_reqs: int) -> None:
        """So many requests were refused before they came here."""
        self.totals.num_rejected_reqs += num_reqs

    def _end(self, request: Request, status: RequestStatus) -> None:
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            del self.loading[request.request_id]
        else:
            self.waiting.remove(request)
        request.status = status
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        kv = self.kv_cache_manager
        if request.status != RequestStatus.FINISHED_ERROR:
            kv.cache_blocks(request, request.num_computed_tokens)  # the last blocks may have become full of known tokens
        kv.free(request)
        if self.proposer is not None:
            self.proposer.forget(request.request_id)
        del self.requests[request.request_id]
        self.totals.note_ended(request)
        self._structured_output_req_ids.discard(request.request_id)
        self._preempted_req_ids.pop(request.request_id, None)  # the worker is told that it ended
        if request.num_cached_tokens >= 0:  # it has been scheduled: the worker knows it
            self._finished_req_ids.add(request.request_id)
            self._lingering_req_ids.add(request.request_id)

    # ------------------------------------------------------------------ one step
    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step: running requests first, then waiting ones.

        Returns None if there is nothing to hand to the worker: no request can take a token now (they wait for tokens in
        flight, or there are none) and no ended request has to be made known.
        """
        plan = self._start_pass()
        plan.make_room()
        plan.schedule_running()
        plan.schedule_waiting()
        self._note_stop(plan)
        self._note_preempted(plan)
        if not (plan.num_scheduled_tokens or self._preempted_req_ids or self._finished_req_ids or plan.loads):
            self._check()
            return None

        self._last_step_id += 1
        output = SchedulerOutput(
            step_id=self._last_step_id,
            scheduled_new_reqs=plan.make_new_request_data(),
            scheduled_cached_reqs=plan.make_cached_request_data(self._prev_step_req_ids),
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - plan.token_budget,
            finished_req_ids=frozenset(self._finished_req_ids),
            preempted_req_ids=frozenset(self._preempted_req_ids),
            new_block_ids_to_zero=self.kv_cache_manager.take_block_ids_to_zero(),
            scheduled_spec_decode_tokens=plan.spec_token_ids,
            structured_output_request_ids=plan.structured_output_request_ids() if self._structured_output_req_ids else frozenset(),
            kv_connector_metadata=self._take_transfers(plan),
        )
        self._update_after_schedule(plan)
        self._check(output)
        return output

    def _start_pass(self) -> SchedulePass:
        return SchedulePass(
            self.config,
            running=self.running,
            waiting=self.waiting,
            kv_cache_manager=self.kv_cache_manager,
            proposer=self.proposer,
            num_loading=len(self.loading),
        )

    def _note_stop(self, plan: SchedulePass) -> None:
        self._admission_stop = plan.admission_stop
        self._stopped_req_id = plan.stopped_req.request_id if plan.stopped_req is not None else None
        self._num_blocks_needed = plan.num_blocks_needed

    def _take_transfers(self, plan: SchedulePass) -> KVConnectorMetadata | None:
        """What the step's new blocks mean to the KV connector."""
        self._leaving = self.kv_cache_manager.block_pool.take_leaving()
        for request in plan.loading_reqs:
            self.loading[request.request_id] = request
        if not self._leaving and not plan.loads:
            return None
        return KVConnectorMetadata(loads=plan.loads, saves=[block_id for block_id, _ in self._leaving])

    def take_leaving_hashes(self) -> list[BlockHash]:
        """The content of the last step's `kv_connector_metadata.saves`, in their order."""
        leaving, self._leaving = self._leaving, []
        return [block_hash for _, block_hash in leaving]

    def finish_load(self, request_id: str, num_blocks: int) -> None:
        """The first `num_blocks` blocks of a request's `KVLoad` hold what they should; 0: it could not be loaded.

        The request goes back to the queue. Does nothing if it has ended, or was reset, meanwhile.
        """
        request = self.loading.pop(request_id, None)
        if request is None:
            return
        self.totals.num_external_queries += len(request.block_ids[0]) * self.kv_cache_manager.block_size
        self.totals.num_external_hits += num_blocks * self.kv_cache_manager.block_size
        self._stop_load(request, num_loaded=num_blocks)
        self._check()

    def _stop_load(self, request: Request, *, num_loaded: int = 0) -> None:
        self.kv_cache_manager.settle_load(request, num_loaded=num_loaded)
        request.num_external_blocks = 0
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def _note_preempted(self, plan: SchedulePass) -> None:
        if plan.preempted_reqs:
            self.totals.note_preempted(plan.preempted_reqs)
            self._preempted_req_ids.update((request.request_id, None) for request in plan.preempted_reqs)

    def _update_after_schedule(self, plan: SchedulePass) -> None:
        """Advance the counters past the step at once, so that the next one can be planned before its tokens are known."""
        self.totals.note_scheduled(plan.num_scheduled_tokens, admitted=plan.admitted_reqs)
        for request, num_tokens in zip(plan.scheduled_reqs, plan.num_scheduled_tokens.values(), strict=True):
            request.num_computed_tokens = num_computed_tokens = request.num_computed_tokens + num_tokens
            if num_computed_tokens == request.num_tokens + request.num_output_placeholders + len(request.spec_token_ids):
                request.num_output_placeholders += 1  # this step samples its next token
        if self.kv_cache_manager.has_windows:
            for request in plan.scheduled_reqs:
                self.kv_cache_manager.free_behind_windows(request)
        self._prev_step_req_ids = plan.num_scheduled_tokens
        self._finished_req_ids.clear()  # the output has its own copy
        self._preempted_req_ids.clear()

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the sampled tokens of a step. Steps must come in the order they were scheduled.

        Requests that ended meanwhile are skipped. Tokens are appended one by one; what follows a stop is dropped. Those that
        failed in the worker end with "error", and nobody else does.
        """
        assert scheduler_output.step_id == self._last_updated_step_id + 1, (
            f"step {scheduler_output.step_id} came back after step {self._last_updated_step_id}"
        )
        self._last_updated_step_id = scheduler_output.step_id
        self._lingering_req_ids -= scheduler_output.finished_req_ids
        core_outputs: list[EngineCoreOutput] = []
        ended: list[Request] = []  # in the order of the batch, as what they free is
        num_output_tokens = 0
        # What most steps have none of is not looked up for every request.
        requests, indices, sampled = self.requests, output.req_id_to_index, output.sampled_token_ids
        failed, spec_token_ids = output.failed_req_ids, scheduler_output.scheduled_spec_decode_tokens
        all_logprobs, all_prompt_logprobs, pooled = output.logprobs, output.prompt_logprobs, output.pooler_output
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(req_id)
            if request is None:
                continue
            if failed and req_id in failed:
                core_outputs.append(self._fail_request(request, failed[req_id]))
                continue
            if pooled and req_id in pooled:
                core_outputs.append(self._end_pooling(request, pooled[req_id]))
                continue
            token_ids = sampled[indices[req_id]]
            prompt_logprobs = all_prompt_logprobs.get(req_id) if all_prompt_logprobs else None
            if not token_ids:
                if prompt_logprobs:
                    core_outputs.append(EngineCoreOutput(req_id, [], None, None, None, request.num_cached_tokens, prompt_logprobs))
                continue
            draft_token_ids = spec_token_ids.get(req_id) if spec_token_ids else None
            if draft_token_ids is not None:
                self._settle_draft_tokens(request, len(draft_token_ids), num_accepted=len(token_ids) - 1)
            new_token_ids = self._append_tokens(request, token_ids)
            num_output_tokens += len(new_token_ids)
            finish_reason = None
            if request.is_finished:
                ended.append(request)
                finish_reason = request.finish_reason
            logprobs = all_logprobs.get(req_id) if all_logprobs else None
            if logprobs is not None:
                logprobs = logprobs[: len(new_token_ids)]
            # By position: keywords would take three times as long.
            core_output = EngineCoreOutput(
                req_id, new_token_ids, finish_reason, request.stop_reason, logprobs, request.num_cached_tokens, prompt_logprobs
            )
            if draft_token_ids is not None:
                core_output = core_output._replace(num_draft_tokens=len(draft_token_ids), num_accepted_tokens=len(token_ids) - 1)
            core_outputs.append(core_output)
        self.totals.num_output_tokens += num_output_tokens
        self._remove_ended(ended)
        self._check()
        return core_outputs

    def _fail_request(self, request: Request, cause: str) -> EngineCoreOutput:
        """End a request that the worker could not sample for. What it wrote into the KV cache is served to nobody else."""
        self.kv_cache_manager.forget_blocks(request)
        self._end(request, RequestStatus.FINISHED_ERROR)
        request.stop_reason = cause
        return EngineCoreOutput(request.request_id, [], "error", cause, num_cached_tokens=request.num_cached_tokens, error=cause)

    def _end_pooling(self, request: Request, vector: list[float]) -> EngineCoreOutput:
        """All of a prompt was computed, and its embedding is there: nothing is left to do."""
        self._end(request, RequestStatus.FINISHED_STOPPED)
        return EngineCoreOutput(request.request_id, [], "stop", num_cached_tokens=request.num_cached_tokens, pooling_output=vector)

    def _settle_draft_tokens(self, request: Request, num_draft_tokens: int, *, num_accepted: int) -> None:
        """Take back what was counted as computed for draft tokens that were rejected: those positions are computed anew."""
        request.spec_token_ids = []
        if request.status == RequestStatus.RUNNING:  # a preemption meanwhile has taken back everything
            request.num_computed_tokens -= num_draft_tokens - num_accepted
            self.kv_cache_manager.free_behind_windows(request)
        self.totals.num_draft_tokens += num_draft_tokens
        self.totals.num_accepted_tokens += num_accepted
        assert self.proposer is not None
        num_tokens = request.num_tokens + num_accepted + 1
        self.proposer.record(request.request_id, num_draft_tokens=num_draft_tokens, num_accepted=num_accepted, num_tokens=num_tokens)

    def _append_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        """Append the tokens of one step until one stops the request; returns those that were appended."""
        request.num_output_placeholders -= 1
        all_token_ids, end_token_ids = request.all_token_ids, request.end_token_ids
        for num_accepted, token_id in enumerate(token_ids, 1):
            all_token_ids.append(token_id)
            request.num_tokens += 1
            # A token that ends nothing costs these three comparisons and no call.
            may_end = request.num_tokens >= request.max_num_tokens or token_id in end_token_ids or request.tail_repeats is not None
            if may_end and self._ends(request):
                return token_ids[:num_accepted]
        return token_ids

    def _ends(self, request: Request) -> bool:
        was_waiting = request.status == RequestStatus.PREEMPTED
        if not check_stop(request, eos_token_ids=self.eos_token_ids):
            return False
        if was_waiting:  # preempted while the step that ends it was in flight
            self.waiting.remove(request)
        return True

    def _remove_ended(self, requests: list[Request]) -> None:
        if not requests:
            return
        req_ids = {request.request_id for request in requests}
        self.running[:] = [request for request in self.running if request.request_id not in req_ids]
        for request in requests:
            self._free_request(request)

    # ------------------------------------------------------------------ what others may know
    @property
    def has_work(self) -> bool:
        """Something waits, runs, or has ended without the worker knowing."""
        return bool(self.waiting or self.running or self.loading or self._finished_req_ids)

    @property
    def admission_stop(self) -> AdmissionStop:
        """Why the last `schedule()` admitted nobody further."""
        return self._admission_stop

    @property
    def last_step_id(self) -> int:
        return self._last_step_id

    def is_lingering(self, request_id: str) -> bool:
        """The request ended, but the worker has not yet confirmed the step that tells it so."""
        return request_id in self._lingering_req_ids

    @property
    def lingering_req_ids(self) -> frozenset[str]:
        """Ended requests that the worker may still hold: told in a step that has not come back, or not told yet."""
        return frozenset(self._lingering_req_ids)

    def take_report(self) -> ScheduleReport:
        """Why the last `schedule()` stopped admitting, and what happened to blocks since the last report."""
        return ScheduleReport(
            admission_stop=self._admission_stop,
            block_changes=self.kv_cache_manager.block_pool.take_changes(),
            stopped_req_id=self._stopped_req_id,
            num_blocks_needed=self._num_blocks_needed,
            block_hashes=self.kv_cache_manager.take_new_hashes(),
        )

    def drop_report(self) -> None:
        """In place of `take_report()` where nobody reads it: it must not pile up, and need not be worked out."""
        self.kv_cache_manager.block_pool.drop_changes()
        self.kv_cache_manager.drop_new_hashes()

    def make_stats(self) -> SchedulerStats:
        pool, prefix_cache, totals = self.kv_cache_manager.block_pool, self.kv_cache_manager.prefix_cache_stats, self.totals
        return SchedulerStats(
            num_waiting_reqs=len(self.waiting) + len(self.loading),
            num_running_reqs=len(self.running),
            num_preempted_reqs=self.waiting.num_preempted,
            num_total_blocks=pool.num_total_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_preemptions=totals.num_preemptions,
            prefix_cache_queries=prefix_cache.queries,
            prefix_cache_hits=prefix_cache.hits,
            num_draft_tokens=totals.num_draft_tokens,
            num_accepted_tokens=totals.num_accepted_tokens,
            num_aborted_reqs=totals.num_aborted_reqs,
            num_rejected_reqs=totals.num_rejected_reqs,
            recent_prefix_cache_queries=prefix_cache.recent_queries,
            recent_prefix_cache_hits=prefix_cache.recent_hits,
            num_resumed_reqs=prefix_cache.num_resumed_reqs,
            num_preempted_queries=prefix_cache.num_preempted_queries,
            num_preempted_hits=prefix_cache.num_preempted_hits,
            num_arrived_reqs=totals.num_arrived_reqs,
            num_finished_reqs=totals.num_finished_reqs,
            num_error_reqs=totals.num_error_reqs,
            num_output_tokens=totals.num_output_tokens,
            num_prompt_tokens_computed=totals.num_prompt_tokens_computed,
            num_recomputed_tokens=totals.num_recomputed_tokens,
            num_evicted_blocks=pool.num_evicted_blocks,
            external_prefix_cache_queries=totals.num_external_queries,
            external_prefix_cache_hits=totals.num_external_hits,
            num_loading_reqs=len(self.loading),
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Refused (False) while a request holds blocks: it may share them.

        reset_running_requests: preempt those that hold blocks; then it is never refused. They compute all their tokens
        anew. What steps in flight sample for them is kept: the tokens come out as they would have without this call.
        """
        if reset_running_requests:
            for request in self.loading.values():
                self._stop_load(request)
            self.loading.clear()
        if reset_running_requests and self.running:
            plan = self._start_pass()
            plan.preempt_all()
            self._note_preempted(plan)
            self._prev_step_req_ids = ()  # who comes back in the next step was in no step just before, to the worker
        is_reset = self.kv_cache_manager.reset_prefix_cache()
        self._check()
        return is_reset

    def _check(self, output: SchedulerOutput | None = None) -> None:
        if self._check_invariants:
            check_scheduler(self, output)
