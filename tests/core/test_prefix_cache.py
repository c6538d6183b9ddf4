"""What the prefix cache finds after twins and evictions, what it counts, and how it is emptied."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.core.block_pool import BlockPool
from aioengine.core.invariants import check_idle
from aioengine.core.prefix_cache_stats import NUM_RECENT_REQUESTS, PrefixCacheStats
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput, SchedulerStats
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.testing import make_request, make_scheduler


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    """Schedule a step and answer it: every request that samples gets the same token."""
    out = scheduler.schedule()
    assert out is not None
    answer(scheduler, out, token)
    return out


def answer(scheduler: Scheduler, out: SchedulerOutput, token: int = 7) -> None:
    ids = list(out.num_scheduled_tokens)
    starts = dict(zip(out.scheduled_cached_reqs.req_ids, out.scheduled_cached_reqs.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
    sampled = []
    for req_id in ids:
        request = scheduler.requests.get(req_id)
        samples = request is not None and starts[req_id] + out.num_scheduled_tokens[req_id] >= request.num_tokens
        sampled.append([token] if samples else [])
    scheduler.update_from_output(out, ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled))


def run_until(scheduler: Scheduler, request: Request, num_tokens: int) -> None:
    while request.num_tokens < num_tokens:
        step(scheduler)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_request(request)


def starts(out: SchedulerOutput) -> dict[str, int]:
    return {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}


# ------------------------------------------------------------------ twins
def evict_all_free(scheduler: Scheduler) -> None:
    """Use every free block once for something else."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.free(pool.allocate(pool.num_free_blocks))


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_a_living_twin_is_found_once_the_first_of_its_content_is_gone(prompt_logprobs: int | None) -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset())
    prompt = list(range(8))
    first = make_request(prompt, request_id="first", max_tokens=5, prompt_logprobs=prompt_logprobs)
    second = make_request(prompt, request_id="second", max_tokens=60, prompt_logprobs=prompt_logprobs)
    add(scheduler, first, second)
    while not first.is_finished:
        step(scheduler)
    shared = 0 if prompt_logprobs is not None else 1
    assert len(set(first.block_hashes) & set(second.block_hashes)) == 3
    assert len(scheduler.kv_cache_manager.block_pool._twins) == 3 - shared
    evict_all_free(scheduler)
    add(scheduler, make_request([*prompt, 7, 7, 7, 7, 99], request_id="third"))
    third = step(scheduler)
    assert starts(third) == {"third": 12}
    assert third.scheduled_new_reqs[0].block_ids[0][:3] == second.block_ids[0][:3]


def test_a_twin_that_takes_over_is_reported_as_cached_and_the_other_as_evicted() -> None:
    pool = BlockPool(4)
    first, twin = pool.allocate(2)
    pool.register(first, b"aaaa")
    pool.register(twin, b"aaaa")
    pool.register(twin, b"aaaa")
    pool.take_changes()
    pool.free([first])
    (taken, _) = pool.allocate(2)[::-1]
    assert taken == first
    changes = pool.take_changes()
    assert (changes.evicted, changes.cached) == ([first], [twin])
    assert pool.find(b"aaaa") == twin
    assert pool.num_cached_blocks == 1


def test_the_oldest_of_several_twins_takes_over_and_one_that_is_let_go_of_does_not() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(4)
    for block_id in blocks:
        pool.register(block_id, b"h")
    pool.free([blocks[1]])
    pool.free([blocks[0]])
    assert list(pool.free_block_queue) == [blocks[1], 5, blocks[0]], "a twin that nobody owns goes first"
    pool.allocate(3)
    assert pool.find(b"h") == blocks[2]
    pool.free([blocks[2]])
    pool.allocate(1)
    assert pool.find(b"h") == blocks[3]


def test_a_content_that_is_forgotten_is_not_found_in_a_twin_either() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.register(block_id, b"h")
    pool.forget([b"h", b"unknown"])
    assert pool.find(b"h") is None
    pool.register(blocks[2], b"h")
    assert pool.find(b"h") == blocks[2], "computed anew it is found"
    pool.register(blocks[1], b"h")
    pool.free(blocks)
    pool.reset_cache()
    assert pool.find(b"h") is None
    assert not pool._twins
    assert not pool._twin_hash


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "register", "forget", "touch"]), st.integers(0, 7)), max_size=80))
@settings(max_examples=300, deadline=None)
def test_a_content_is_found_while_any_owned_block_has_it(calls: list[tuple[str, int]]) -> None:
    """The pool against books that know what every block holds."""
    pool = BlockPool(7)
    content: dict[int, bytes] = {}  # of owned blocks that were registered
    free_content: dict[int, bytes] = {}
    for call, number in calls:
        owned = [block_id for block_id in range(1, 7) if pool.ref_cnt[block_id]]
        if call == "allocate" and pool.num_free_blocks:
            (block_id,) = pool.allocate(1)
            free_content.pop(block_id, None)
            content.pop(block_id, None)
        elif call == "free" and owned:
            block_id = owned[number % len(owned)]
            pool.free([block_id])
            if not pool.ref_cnt[block_id] and block_id in content:
                free_content[block_id] = content.pop(block_id)
        elif call == "register" and owned:
            block_id = owned[number % len(owned)]
            if block_id not in content:
                content[block_id] = bytes([number % 3])
                pool.register(block_id, content[block_id])
        elif call == "forget":
            pool.forget([bytes([number % 3])])
            for books in (content, free_content):
                for block_id in [block_id for block_id, held in books.items() if held == bytes([number % 3])]:
                    del books[block_id]
        elif call == "touch" and (found := pool.find(bytes([number % 3]))) is not None:
            pool.touch([found])
            if found in free_content:
                content[found] = free_content.pop(found)
        for name in range(3):
            found = pool.find(bytes([name]))
            holders = {block_id for books in (content, free_content) for block_id, held in books.items() if held == bytes([name])}
            assert found is None or found in holders, "a block is found for what it does not hold"
            if bytes([name]) in content.values():
                assert found is not None, "an owned block holds it and it is not found"


def test_a_block_that_fills_with_the_last_token_before_a_preemption_is_found_when_it_comes_back() -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset(), max_num_seqs=2)
    request = make_request(7, request_id="a", max_tokens=20)
    add(scheduler, request)
    first = scheduler.schedule()
    second = scheduler.schedule()  # computes the eighth token, which is not known yet: the block has no name
    assert first is not None
    assert second is not None
    answer(scheduler, first)
    assert request.num_cached_blocks == 1
    plan = scheduler._start_pass()
    plan.preempt_all()
    assert len(scheduler.kv_cache_manager.get_computed_blocks(request)[0]) == 1
    answer(scheduler, second)
    assert len(scheduler.kv_cache_manager.get_computed_blocks(request)[0]) == 2


# ------------------------------------------------------------------ what is counted
def run_to_the_end(scheduler: Scheduler) -> None:
    for _ in range(2000):
        if not scheduler.has_work:
            check_idle(scheduler)
            return
        step(scheduler)
    raise AssertionError("no progress")


@given(
    num_blocks=st.integers(7, 40),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    shared=st.booleans(),
    budget=st.integers(8, 64),
)
@settings(max_examples=60, deadline=None)
def test_each_request_counts_once_however_often_it_comes_back(num_blocks: int, lengths: list[int], shared: bool, budget: int) -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=num_blocks, eos_token_ids=frozenset(), max_num_batched_tokens=budget)
    requests = [
        make_request([1] * n if shared else [100 * i + k for k in range(n)], request_id=f"r{i}", max_tokens=4)
        for i, n in enumerate(lengths)
    ]
    add(scheduler, *requests)
    run_to_the_end(scheduler)
    stats = scheduler.make_stats()
    assert stats.prefix_cache_queries == stats.recent_prefix_cache_queries == sum(lengths)
    assert stats.prefix_cache_hits == stats.recent_prefix_cache_hits == sum(request.num_cached_tokens for request in requests)
    assert stats.num_resumed_reqs == stats.num_preemptions == sum(request.num_preemptions for request in requests)
    assert 0 <= stats.num_preempted_hits <= stats.num_preempted_queries


def test_thrashing_reads_as_thrashing_and_not_as_sharing() -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=10, block_size=8, eos_token_ids=frozenset())
    add(scheduler, *(make_request([100 * i + k for k in range(20)], request_id=f"r{i}", max_tokens=12) for i in range(6)))
    run_to_the_end(scheduler)
    stats = scheduler.make_stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.prefix_cache_hit_rate) == (120, 0, 0.0)
    assert stats.num_preempted_queries > 0


def test_the_recent_rate_looks_at_the_last_requests_and_starts_over_with_the_cache() -> None:
    stats = PrefixCacheStats()
    for _ in range(NUM_RECENT_REQUESTS):
        stats.record(10, 0, preempted=False)
    for _ in range(NUM_RECENT_REQUESTS // 2):
        stats.record(10, 10, preempted=False)
        stats.record(10, 10, preempted=True)
    assert (stats.recent_queries, stats.recent_hits) == (10 * NUM_RECENT_REQUESTS, 5 * NUM_RECENT_REQUESTS)
    assert (stats.queries, stats.hits) == (15 * NUM_RECENT_REQUESTS, 5 * NUM_RECENT_REQUESTS)
    stats.forget_recent()
    assert (stats.recent_queries, stats.recent_hits, stats.queries) == (0, 0, 15 * NUM_RECENT_REQUESTS)


def test_the_rate_of_stats_from_before_it_was_kept_is_that_of_all_requests() -> None:
    assert SchedulerStats(0, 0, 0, 9, 9, 0, 0, 40, 10).prefix_cache_hit_rate == 0.25
    assert (
        SchedulerStats(0, 0, 0, 9, 9, 0, 0, 40, 10, recent_prefix_cache_queries=0, recent_prefix_cache_hits=0).prefix_cache_hit_rate is None
    )
    assert SchedulerStats(0, 0, 0, 9, 9, 0, 0, 0, 0).prefix_cache_hit_rate is None


# ------------------------------------------------------------------ emptying it under running requests
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"policy": "priority"}, {"num_speculative_tokens": 4, "prompt_lookup_min": 1}, {"max_num_batched_tokens": 9}]
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_reset_preempts_whoever_runs_and_changes_no_output(depth: int, options: dict[str, Any], at: int) -> None:
    depth = 1 if options.get("num_speculative_tokens") else depth
    scheduler = make_scheduler(eos_token_ids=frozenset(), async_scheduling=depth > 1, **options)
    requests = [make_request([1, 2, 3] * 5, request_id=f"r{i}", max_tokens=12, priority=i % 2) for i in range(3)]
    add(scheduler, *requests)
    planned: list[SchedulerOutput] = []
    told: list[str] = []
    num_steps, num_running = 0, 0
    while scheduler.has_work or planned:
        while len(planned) < depth and (out := scheduler.schedule()) is not None:
            planned.append(out)
            told += sorted(out.preempted_req_ids)
        if num_steps == at:
            num_running = len(scheduler.running)
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            stats = scheduler.make_stats()
            assert (stats.num_cached_blocks, stats.num_used_blocks, stats.num_running_reqs) == (0, 0, 0)
            assert stats.num_preemptions == num_running
            assert scheduler.reset_prefix_cache(reset_running_requests=True), "again, with nobody running"
        answer_by_history(scheduler, planned.pop(0))
        num_steps += 1
    assert len(told) == num_running > 0
    assert scheduler.make_stats().num_resumed_reqs == num_running
    assert {tuple(request.output_token_ids) for request in requests} == {tuple(expected(requests[0]))}
    check_idle(scheduler)


def next_token(history: list[int]) -> int:
    return (sum(history[-4:]) + len(history)) % 3 + 1


def expected(request: Request) -> list[int]:
    history = request.prompt_token_ids
    for _ in range(request.max_tokens):
        history.append(next_token(history))
    return history[request.num_prompt_tokens :]


def answer_by_history(scheduler: Scheduler, out: SchedulerOutput) -> None:
    """Tokens that depend on the history only, whatever was known when the step was planned."""
    cached = out.scheduled_cached_reqs
    num_known = {new.req_id: len(new.prompt_token_ids) for new in out.scheduled_new_reqs}
    ends = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
    for index, req_id in enumerate(cached.req_ids):
        num_known[req_id] = 15 + cached.num_output_tokens[index]
        ends[req_id] = cached.num_computed_tokens[index]
    ids = list(out.num_scheduled_tokens)
    sampled: list[list[int]] = []
    for req_id in ids:
        request = scheduler.requests.get(req_id)
        draft_token_ids = out.scheduled_spec_decode_tokens.get(req_id, [])
        tokens: list[int] = []
        if request is not None and ends[req_id] + out.num_scheduled_tokens[req_id] == num_known[req_id] + len(draft_token_ids):
            history = request.all_token_ids[: num_known[req_id]]
            for draft_token_id in [*draft_token_ids, None]:
                tokens.append(next_token(history))
                history.append(tokens[-1])
                if tokens[-1] != draft_token_id:
                    break
        sampled.append(tokens)
    scheduler.update_from_output(out, ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled))


def test_who_ends_between_a_reset_and_the_next_step_is_told_as_ended_only() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(9, request_id="a"), make_request(9, request_id="b"))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    out = scheduler.schedule()
    assert out is not None
    assert out.finished_req_ids == {"a"}
    assert out.preempted_req_ids == {"b"}
    assert out.scheduled_cached_reqs.resumed_req_ids == {"b"}, "it is back in the same step"
    assert out.scheduled_cached_reqs.all_token_ids.keys() == {"b"}
