"""The scheduler's books, checked: what must hold between any two calls.

Run after every call in tests and under AIOENGINE_CHECK=1, and by the engine whenever it goes idle. It reads everything
and changes nothing. A violation is a bug in this package, so it raises AssertionError and names the broken rule.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from aioengine.core.block_hash import hash_block, in_group, salt_bytes
from aioengine.core.block_pool import NULL_BLOCK_ID, BlockPool
from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.ngram_proposer import NgramProposer
from aioengine.core.request_queue import RequestQueue, scheduling_key
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import SchedulerConfig


class Books(Protocol):
    """What a scheduler keeps: all that is read here."""

    config: SchedulerConfig
    kv_cache_manager: KVCacheManager
    proposer: NgramProposer | None
    requests: dict[str, Request]
    running: list[Request]
    waiting: RequestQueue
    loading: dict[str, Request]
    _finished_req_ids: set[str]
    _lingering_req_ids: set[str]

    @property
    def has_work(self) -> bool: ...


def check_scheduler(scheduler: Books, output: SchedulerOutput | None = None) -> None:
    """Check requests, queues and blocks; with `output`, also what schedule() has just returned."""
    _check_requests(scheduler)
    _check_queues(scheduler)
    _check_blocks(scheduler)
    _check_hashes(scheduler)
    if output is not None:
        _check_output(scheduler, output)


def check_idle(scheduler: Books) -> None:
    """Check that nothing is left over: to be called when no request lives and no step is in flight."""
    check_scheduler(scheduler)
    check_no_leak(scheduler)


def check_no_leak(scheduler: Books) -> None:
    """The part of `check_idle` that costs nothing, so that it always runs when the engine goes idle (SGLang's idea)."""
    pool = scheduler.kv_cache_manager.block_pool
    assert not scheduler.requests, f"requests left: {sorted(scheduler.requests)}"
    assert not scheduler.has_work, "there is work left"
    assert pool.num_free_blocks == pool.num_total_blocks, f"{pool.num_total_blocks - pool.num_free_blocks} blocks leaked"


def _check_requests(scheduler: Books) -> None:
    block_size = scheduler.kv_cache_manager.block_size
    for request in scheduler.requests.values():
        assert not request.is_finished, f"finished but still listed: {request}"
        assert request.num_output_placeholders >= 0, f"negative placeholders: {request}"
        if request.spec_token_ids:
            assert request.num_output_placeholders == 1, f"draft tokens that no step in flight checks: {request}"
            assert request.num_computed_tokens == request.num_tokens_with_spec < request.max_num_tokens, f"rejected draft tokens: {request}"
        else:
            assert 0 <= request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders, (
                f"computed beyond its tokens: {request}"
            )
        assert len(request.block_ids) == len(scheduler.kv_cache_manager.groups), f"not a table for each group: {request}"
        assert len({len(table) for table in request.block_ids}) == 1, f"tables of different lengths: {request}"
        assert request.num_computed_tokens <= len(request.block_ids[0]) * block_size, f"computed tokens without a slot: {request}"
        assert request.num_tokens <= scheduler.config.max_model_len, f"longer than max_model_len: {request}"
        assert request.num_output_tokens < request.max_tokens, f"ran past max_tokens: {request}"
        if request.status not in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            assert not any(request.block_ids), f"waiting with blocks: {request}"
        if request.status != RequestStatus.RUNNING:
            assert request.num_computed_tokens == 0, f"waiting with computed tokens: {request}"
            assert not request.spec_token_ids, f"waiting with draft tokens: {request}"
    if scheduler.proposer is not None:
        assert scheduler.proposer.req_ids <= scheduler.requests.keys(), "n-grams are kept of requests that are gone"


def _check_queues(scheduler: Books) -> None:
    running, waiting = scheduler.running, list(scheduler.waiting)
    loading = list(scheduler.loading.values())
    listed = Counter(request.request_id for request in running + waiting + loading)
    assert listed == Counter(scheduler.requests.keys()), "every live request is in exactly one queue"
    assert all(request.status == RequestStatus.RUNNING for request in running), "only running requests are in running"
    assert all(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for request in waiting), "whoever is queued waits"
    assert all(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in loading), "whoever loads waits for it"
    assert len(running) <= scheduler.config.max_num_seqs, f"{len(running)} running, max_num_seqs {scheduler.config.max_num_seqs}"
    for queue in (running, waiting):
        keys = [scheduling_key(scheduler.config.policy, request) for request in queue]
        assert keys == sorted(keys), "queues are in scheduling order"
    assert scheduler.waiting.num_preempted == sum(request.status == RequestStatus.PREEMPTED for request in waiting)
    assert not scheduler.requests.keys() & scheduler._finished_req_ids, "an ended request is still listed"
    assert scheduler._finished_req_ids <= scheduler._lingering_req_ids


def _check_blocks(scheduler: Books) -> None:
    kv = scheduler.kv_cache_manager
    pool = kv.block_pool
    owners: Counter[int] = Counter()
    for request in scheduler.requests.values():
        held = []
        for group, table in zip(kv.groups, request.block_ids, strict=True):
            start = group.first_block_in_sight(request.num_computed_tokens - len(request.spec_token_ids), block_size=kv.block_size)
            assert not any(table[:start]), f"a block behind the window of {group} is held: {request} {table}"
            assert all(table[start:]), f"the null block is where {group} still sees: {request} {table}"
            held += table[start:]
        assert len(set(held)) == len(held), f"its tables hold a block twice: {request} {request.block_ids}"
        owners.update(held)
    free = list(pool.free_block_queue)
    assert len(free) == len(set(free)) == pool.num_free_blocks, "a block is twice in the free queue, or the count is wrong"
    assert NULL_BLOCK_ID not in free, "the null block is in the free queue"
    for block_id in range(1, pool.num_blocks):
        assert pool.ref_cnt[block_id] == owners[block_id], (
            f"block {block_id}: ref_cnt {pool.ref_cnt[block_id]}, but {owners[block_id]} tables hold it"
        )
        assert (pool.ref_cnt[block_id] == 0) == (block_id in pool.free_block_queue), f"block {block_id}: free and owned, or neither"


def _check_hashes(scheduler: Books) -> None:
    kv = scheduler.kv_cache_manager
    pool = kv.block_pool
    for block_hash, block_id in pool._cached.items():
        assert pool.block_hash[block_id] == block_hash, f"block {block_id} is found under a hash it does not have"
    assert sum(block_hash is not None for block_hash in pool.block_hash) == pool.num_cached_blocks
    _check_twins(pool)
    for request in scheduler.requests.values():
        parent = kv._root_hash
        for index, block_hash in enumerate(request.block_hashes):
            token_ids = request.all_token_ids[index * kv.block_size : (index + 1) * kv.block_size]
            assert len(token_ids) == kv.block_size, f"a block that is not full has a hash: {request}"
            extra = salt_bytes(request.cache_salt, request.lora_key) if index == 0 else b""
            assert block_hash == hash_block(parent, token_ids, extra=extra), f"hash {index} is wrong: {request}"
            parent = block_hash
        assert request.num_cached_blocks <= min(len(request.block_ids[0]), len(request.block_hashes)), (
            f"more cached blocks than blocks: {request}"
        )
        num_certain = min(request.num_computed_tokens, request.num_tokens)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            num_certain = (len(request.block_ids[0]) - 1) * kv.block_size  # at least one of its blocks is being loaded
        assert request.num_cached_blocks * kv.block_size <= num_certain, f"a block with draft tokens in it is cached: {request}"
        for group_id, table in enumerate(request.block_ids):
            for block_id, block_hash in zip(table[: request.num_cached_blocks], request.block_hashes, strict=False):
                held = pool.block_hash[block_id] or pool._twin_hash.get(block_id)
                assert held is None or held == in_group(block_hash, group_id), f"block {block_id} caches something else: {request}"


def _check_twins(pool: BlockPool) -> None:
    """A twin is owned, and found for nothing itself; a content that has twins is found in another block."""
    listed = [(block_id, block_hash) for block_hash, twins in pool._twins.items() for block_id in twins]
    assert sorted(listed) == sorted(pool._twin_hash.items()), "the twins of a content are not the blocks that are twins"
    assert all(pool._twins.values()), "a content has an empty list of twins"
    for block_id, block_hash in listed:
        assert pool.ref_cnt[block_id] > 0, f"block {block_id} is a twin that nobody owns"
        assert pool.block_hash[block_id] is None, f"block {block_id} is a twin and is found itself"
        assert block_hash in pool._cached, f"block {block_id} has a content that only twins have"


def _check_output(scheduler: Books, output: SchedulerOutput) -> None:
    scheduled = output.num_scheduled_tokens
    cached = output.scheduled_cached_reqs
    new_ids = {request.req_id for request in output.scheduled_new_reqs}
    assert output.total_num_scheduled_tokens == sum(scheduled.values()), "the total is not the sum"
    assert output.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens, "over the token budget"
    assert all(num_tokens > 0 for num_tokens in scheduled.values()), "a request is scheduled with no token"
    assert not new_ids & set(cached.req_ids), "a request is both new and cached"
    assert new_ids | set(cached.req_ids) == scheduled.keys(), "new and cached requests are not the scheduled ones"
    assert cached.resumed_req_ids <= set(cached.req_ids)
    assert not output.finished_req_ids & scheduled.keys(), "a finished request is scheduled"
    # Who was preempted between two steps may be back at once; the worker then hears of both in the same step.
    assert not (output.preempted_req_ids - cached.resumed_req_ids) & scheduled.keys(), "a preempted request is scheduled"
    assert not output.preempted_req_ids & output.finished_req_ids, "a finished request is preempted"
    threshold = scheduler.config.long_prefill_token_threshold
    if threshold and len(scheduler.requests) > 1:
        assert max(scheduled.values(), default=0) <= threshold, f"over the threshold of {threshold} tokens while others wait"
    assert output.scheduled_spec_decode_tokens.keys() <= set(cached.req_ids) - cached.resumed_req_ids, (
        "draft tokens for a request that starts"
    )
    lengths = {len(cached.req_ids), len(cached.new_block_ids), len(cached.num_computed_tokens), len(cached.num_output_tokens)}
    assert len(lengths) == 1, "the parallel lists differ in length"
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    for req_id, num_tokens in scheduled.items():
        request = scheduler.requests[req_id]
        assert starts[req_id] + num_tokens == request.num_computed_tokens, f"the start is not where the step starts: {request}"
        draft_token_ids = output.scheduled_spec_decode_tokens.get(req_id, [])
        assert draft_token_ids == request.spec_token_ids, f"{len(draft_token_ids)} draft tokens are handed out for {request}"
        assert not draft_token_ids or num_tokens == 1 + len(draft_token_ids), f"draft tokens come after one known token: {request}"
        assert starts[req_id] < request.num_tokens + request.num_output_placeholders
