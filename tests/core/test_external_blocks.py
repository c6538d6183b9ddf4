"""Blocks that a KV connector has: their request waits for them and holds nobody up; and what is told of blocks that leave."""

from __future__ import annotations

import pytest

from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import KVConnectorMetadata, SchedulerOutput
from aioengine.request import Request, RequestStatus
from aioengine.testing import make_request, make_scheduler
from tests.core.test_prefix_cache import add, answer, evict_all_free, starts, step

PROMPT = list(range(40, 60))  # 5 blocks of 4 tokens; at most 4 of them can be taken over


def waiting_for_blocks(scheduler: Scheduler, num_external_blocks: int = 5) -> tuple[Request, SchedulerOutput]:
    """A request whose load has begun, and the step that said so."""
    request = make_request(PROMPT, num_external_blocks=num_external_blocks, max_tokens=3)
    add(scheduler, request)
    out = scheduler.schedule()
    assert out is not None
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return request, out


def transfers(out: SchedulerOutput) -> KVConnectorMetadata:
    assert out.kv_connector_metadata is not None
    return out.kv_connector_metadata


def test_a_request_waits_for_its_blocks_while_others_run() -> None:
    scheduler = make_scheduler()
    request, out = waiting_for_blocks(scheduler)
    (load,) = transfers(out).loads
    assert (load.req_id, len(load.block_ids)) == (request.request_id, 4)
    assert not out.num_scheduled_tokens
    answer(scheduler, out)
    other = make_request(9, max_tokens=2)
    add(scheduler, other)
    assert starts(step(scheduler)) == {other.request_id: 0}
    stats = scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_loading_reqs, stats.num_running_reqs) == (1, 1, 1)
    scheduler.finish_load(request.request_id, 4)
    out = step(scheduler)
    assert starts(out) == {request.request_id: 16}
    assert out.scheduled_new_reqs[0].block_ids == (load.block_ids + request.block_ids[0][4:],)
    assert request.num_cached_tokens == 16
    stats = scheduler.make_stats()
    assert (stats.external_prefix_cache_queries, stats.external_prefix_cache_hits, stats.num_loading_reqs) == (16, 16, 0)


@pytest.mark.parametrize("num_loaded", [0, 1, 3])
def test_what_could_not_be_loaded_is_computed(num_loaded: int) -> None:
    scheduler = make_scheduler()
    request, out = waiting_for_blocks(scheduler)
    answer(scheduler, out)
    scheduler.finish_load(request.request_id, num_loaded)
    out = step(scheduler)
    assert starts(out) == {request.request_id: 4 * num_loaded}
    assert out.kv_connector_metadata is None, "it is not tried again"


def test_only_what_the_pool_lacks_is_loaded() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(PROMPT[:9], max_tokens=1))
    step(scheduler)
    request, out = waiting_for_blocks(scheduler)
    (load,) = transfers(out).loads
    assert load.block_ids == request.block_ids[0][2:]
    answer(scheduler, out)
    scheduler.finish_load(request.request_id, 2)
    assert starts(step(scheduler)) == {request.request_id: 16}


def test_nothing_is_loaded_that_the_pool_has() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(PROMPT, max_tokens=1))
    step(scheduler)
    request = make_request(PROMPT, num_external_blocks=5)
    add(scheduler, request)
    assert starts(step(scheduler)) == {request.request_id: 16}


def test_who_wants_logprobs_of_the_prompt_computes_it() -> None:
    scheduler = make_scheduler()
    request = make_request(PROMPT, num_external_blocks=5, prompt_logprobs=1)
    add(scheduler, request)
    assert starts(step(scheduler)) == {request.request_id: 0}


def test_a_preempted_request_computes_what_it_lost() -> None:
    """It comes back as one that the worker knows."""
    scheduler = make_scheduler()
    add(scheduler, make_request(PROMPT, max_tokens=1))
    step(scheduler)
    request = make_request(PROMPT, num_external_blocks=5, max_tokens=9)  # what it could load is there already
    add(scheduler, request)
    assert starts(step(scheduler)) == {request.request_id: 16}
    scheduler.reset_prefix_cache(reset_running_requests=True)
    out = step(scheduler)
    assert request.request_id in out.scheduled_cached_reqs.resumed_req_ids
    assert out.kv_connector_metadata is None


def test_a_request_that_ends_while_it_waits_gives_its_blocks_back() -> None:
    scheduler = make_scheduler()
    request, out = waiting_for_blocks(scheduler)
    scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 64
    answer(scheduler, out)
    scheduler.finish_load(request.request_id, 4)  # comes too late
    assert scheduler.kv_cache_manager.block_pool.num_cached_blocks == 0
    assert scheduler.schedule() is None
    check_idle(scheduler)


def test_a_reset_ends_a_load_and_its_request_computes() -> None:
    scheduler = make_scheduler()
    request, out = waiting_for_blocks(scheduler)
    answer(scheduler, out)
    assert not scheduler.reset_prefix_cache(), "blocks are held"
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.finish_load(request.request_id, 4)
    assert starts(step(scheduler)) == {request.request_id: 0}


def test_requests_that_load_count_as_running_ones_to_come() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    request, out = waiting_for_blocks(scheduler)
    answer(scheduler, out)
    add(scheduler, make_request(5), make_request(6))
    assert len(step(scheduler).num_scheduled_tokens) == 1
    assert scheduler.admission_stop == "max_num_seqs"
    scheduler.finish_load(request.request_id, 4)
    assert request.request_id in step(scheduler).num_scheduled_tokens


def test_nothing_is_loaded_for_a_request_that_does_not_fit_yet() -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=8)
    add(scheduler, make_request(13, max_tokens=3))
    step(scheduler)
    request = make_request(PROMPT, num_external_blocks=5, max_tokens=1)
    add(scheduler, request)
    assert step(scheduler).kv_connector_metadata is None
    assert scheduler.admission_stop == "no_blocks"


def test_the_step_that_overwrites_blocks_tells_their_content() -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=8, has_kv_connector=True)
    first = make_request(PROMPT, max_tokens=1)
    add(scheduler, first)
    step(scheduler)
    hashes = dict(scheduler.kv_cache_manager.block_pool.cached_blocks())
    assert len(hashes) == 5
    add(scheduler, make_request(25, max_tokens=1))  # all seven blocks
    out = step(scheduler)
    saves = transfers(out).saves
    assert sorted(saves) == sorted(hashes)
    assert scheduler.take_leaving_hashes() == [hashes[block_id] for block_id in saves]


def test_content_that_another_block_still_has_does_not_leave() -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=12, has_kv_connector=True)
    twins = [make_request(PROMPT[:5], max_tokens=9), make_request(PROMPT[:5], max_tokens=9)]
    add(scheduler, *twins)
    step(scheduler)
    scheduler.finish_requests([twins[0].request_id], RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    scheduler.kv_cache_manager.block_pool.take_leaving()
    evict_all_free(scheduler)
    assert scheduler.kv_cache_manager.block_pool.take_leaving() == []


def test_without_a_connector_nothing_is_told() -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=8)
    for _ in range(3):
        add(scheduler, make_request(20, max_tokens=1))
        assert step(scheduler).kv_connector_metadata is None
