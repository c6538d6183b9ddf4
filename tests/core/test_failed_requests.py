"""`ModelRunnerOutput.failed_req_ids`, and the totals that the scheduler keeps of requests that end from outside."""

from __future__ import annotations

import pytest

from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput
from aioengine.request import RequestStatus
from aioengine.testing import make_request, make_scheduler


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    return output


def update(scheduler: Scheduler, output: SchedulerOutput, *, failed: dict[str, str] | None = None) -> dict[str, EngineCoreOutput]:
    req_ids = list(output.num_scheduled_tokens)
    failed = failed or {}
    result = ModelRunnerOutput(
        req_ids,
        {req_id: index for index, req_id in enumerate(req_ids)},
        [[] if req_id in failed else [7] for req_id in req_ids],
        failed_req_ids=failed,
    )
    return {core_output.request_id: core_output for core_output in scheduler.update_from_output(output, result)}


def finish_all(scheduler: Scheduler) -> None:
    while (output := scheduler.schedule()) is not None:
        update(scheduler, output)
    check_idle(scheduler)


def test_it_ends_with_the_cause_and_its_mates_go_on() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(6, request_id=name, max_tokens=3))
    outputs = update(scheduler, step(scheduler), failed={"b": "NaN"})
    assert outputs["b"] == EngineCoreOutput("b", [], "error", "NaN", error="NaN")
    assert outputs["a"].new_token_ids == outputs["c"].new_token_ids == [7]
    assert [request.request_id for request in scheduler.running] == ["a", "c"]
    assert step(scheduler).finished_req_ids == {"b"}


def test_tokens_of_later_steps_in_flight_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(6, request_id="a", max_tokens=9))
    scheduler.add_request(make_request(6, request_id="b", max_tokens=9))
    first, second = step(scheduler), step(scheduler)
    assert "a" in second.num_scheduled_tokens
    assert update(scheduler, first, failed={"a": "NaN"})["a"].finish_reason == "error"
    assert "a" not in update(scheduler, second), "its token is of no use"
    assert "a" not in update(scheduler, step(scheduler), failed={"a": "NaN again"})
    finish_all(scheduler)


def test_a_request_that_was_preempted_meanwhile() -> None:
    """Three blocks of four: both fit at first, and the second one gives way when the first one grows."""
    scheduler = make_scheduler(num_kv_cache_blocks=4, enable_prefix_caching=False)
    scheduler.add_request(make_request(4, request_id="a", max_tokens=8))
    scheduler.add_request(make_request(4, request_id="b", max_tokens=8))
    first, second = step(scheduler), step(scheduler)
    assert second.preempted_req_ids == {"b"}
    assert update(scheduler, first, failed={"b": "NaN"})["b"].finish_reason == "error"
    assert scheduler.waiting.num_preempted == len(scheduler.waiting) == scheduler.waiting.num_prompt_tokens == 0
    update(scheduler, second)
    finish_all(scheduler)


def test_a_request_that_was_aborted_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(6, request_id="a"))
    first = step(scheduler)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert update(scheduler, first, failed={"a": "NaN"}) == {}
    finish_all(scheduler)


@pytest.mark.parametrize("shares", [True, False])
def test_what_it_cached_is_forgotten_also_where_others_hold_it(shares: bool) -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    if shares:
        scheduler.add_request(make_request(prompt, request_id="mate", max_tokens=9))
    scheduler.add_request(make_request(prompt, request_id="bad", max_tokens=9))
    first = step(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.num_cached_blocks == 3
    update(scheduler, first, failed={"bad": "NaN"})
    assert pool.num_cached_blocks == 0, "by content: also the mate's copy of its last block"
    assert len(scheduler.take_report().block_changes.evicted) == 3
    finish_all(scheduler)


def test_nobody_finds_what_a_request_had_cached_that_was_preempted_before_its_failure_was_known() -> None:
    """Four blocks of four: `b` lets go of its blocks while the step that shows its failure is in flight."""
    scheduler = make_scheduler(num_kv_cache_blocks=5)
    prompt = [20, 21, 22, 23, 24, 25, 26]
    scheduler.add_request(make_request([1, 2, 3, 4, 5, 6, 7, 8], request_id="a", max_tokens=8))
    scheduler.add_request(make_request(prompt, request_id="b", max_tokens=8))
    first, second = step(scheduler), step(scheduler)
    assert second.preempted_req_ids == {"b"}
    update(scheduler, first, failed={"b": "NaN"})
    update(scheduler, second)
    asks_the_same = make_request(prompt, request_id="c", max_tokens=1)
    assert scheduler.kv_cache_manager.get_computed_blocks(asks_the_same) == ([],)
    finish_all(scheduler)


def test_totals() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(6, request_id=name, max_tokens=1))
    assert scheduler.waiting.num_prompt_tokens == 18
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_STOPPED)
    scheduler.finish_requests(["a", "nobody"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.waiting.num_prompt_tokens == 6
    finish_all(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_aborted_reqs, stats.num_rejected_reqs, scheduler.waiting.num_prompt_tokens) == (1, 0, 0)
