"""The scheduler against hand-made model outputs: exact tokens, positions and block ids."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import InvalidRequestError
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.sampling_params import SamplingParams

EOS = 2


def make_scheduler(
    num_blocks: int = 64, *, eos: frozenset[int] = frozenset({EOS}), cache: dict[str, Any] | None = None, **config: Any
) -> Scheduler:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, **config}
    cache_settings: dict[str, Any] = {"block_size": 4, "prefix_caching_seed": "test", **(cache or {})}
    return Scheduler(
        SchedulerConfig(**settings),
        cache=CacheConfig(**cache_settings),
        num_kv_cache_blocks=num_blocks,
        eos_token_ids=eos,
        check_invariants=True,
    )


def make_request(
    request_id: str, prompt: int | list[int], *, max_tokens: int = 8, priority: int = 0, salt: str | None = None, **params: Any
) -> Request:
    token_ids = [100 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        request_id,
        token_ids,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        priority=priority,
        cache_salt=salt,
    )


def distinct(request_id: str, num_tokens: int, **kwargs: Any) -> Request:
    """A request whose prompt shares nothing with another id's."""
    return make_request(request_id, [1000 * (1 + sum(map(ord, request_id))) + i for i in range(num_tokens)], **kwargs)


def output_for(out: SchedulerOutput, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    req_ids = list(out.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
        sampled_token_ids=[tokens.get(req_id, []) for req_id in req_ids],
    )


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    out = scheduler.schedule()
    assert out is not None
    return out


def update(scheduler: Scheduler, out: SchedulerOutput, **tokens: int) -> list[EngineCoreOutput]:
    return scheduler.update_from_output(out, output_for(out, {req_id: [token] for req_id, token in tokens.items()}))


# ------------------------------------------------------------------ the seed's timeline
def test_one_request_follows_the_timeline_of_the_seed() -> None:
    scheduler = make_scheduler()
    request = make_request("r1", 5)
    scheduler.add_request(request)

    out = schedule(scheduler)
    (new,) = out.scheduled_new_reqs
    assert (new.req_id, new.prompt_token_ids, new.num_computed_tokens) == ("r1", [100, 101, 102, 103, 104], 0)
    assert new.block_ids == ([1, 2],)
    assert out.num_scheduled_tokens == {"r1": 5}
    assert out.total_num_scheduled_tokens == 5
    assert request.num_computed_tokens == 5, "schedule() has already advanced the scheduler's own counter"
    assert request.num_tokens == 5

    (result,) = update(scheduler, out, r1=7)
    assert result.new_token_ids == [7]
    assert result.finish_reason is None
    assert request.num_tokens == 6
    assert request.num_computed_tokens == 5, "a sampled token is in the history before it is computed"

    out = schedule(scheduler)
    cached = out.scheduled_cached_reqs
    assert out.scheduled_new_reqs == []
    assert cached.req_ids == ["r1"]
    assert cached.num_computed_tokens == [5]
    assert cached.num_output_tokens == [1]
    assert cached.new_block_ids == [None], "the token fits into the second block"
    assert cached.all_token_ids == {}
    assert cached.resumed_req_ids == frozenset()
    assert out.num_scheduled_tokens == {"r1": 1}


def test_a_block_is_added_when_the_last_one_is_full() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 8))
    update(scheduler, schedule(scheduler), r1=7)
    out = schedule(scheduler)
    assert out.scheduled_cached_reqs.new_block_ids == [([3],)]


def test_a_step_is_scheduled_before_the_previous_tokens_are_known() -> None:
    scheduler = make_scheduler()
    request = make_request("r1", 4)
    scheduler.add_request(request)
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert second.scheduled_cached_reqs.num_computed_tokens == [4]
    assert second.scheduled_cached_reqs.num_output_tokens == [1], "the token in flight is counted"
    assert request.num_output_placeholders == 2
    update(scheduler, first, r1=7)
    update(scheduler, second, r1=8)
    assert request.output_token_ids == [7, 8]
    assert request.num_output_placeholders == 0


def test_nothing_is_scheduled_past_max_tokens_while_the_last_token_is_in_flight() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4, max_tokens=2))
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None
    update(scheduler, first, r1=7)
    (result,) = update(scheduler, second, r1=8)
    assert result.finish_reason == "length"


def test_no_position_past_max_model_len_is_scheduled_while_tokens_are_in_flight() -> None:
    scheduler = make_scheduler(max_model_len=8, eos=frozenset())
    request = make_request("r1", 6, max_tokens=100)
    scheduler.add_request(request)
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None, "position 7 would hold the eighth token, which is sampled but never computed"
    update(scheduler, first, r1=7)
    (result,) = update(scheduler, second, r1=8)
    assert (result.finish_reason, request.num_tokens) == ("length", 8)


def test_steps_must_come_back_in_order() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4))
    schedule(scheduler)
    second = schedule(scheduler)
    with pytest.raises(AssertionError, match="step 2 came back after step 0"):
        update(scheduler, second, r1=1)


# ------------------------------------------------------------------ budget and chunks
def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(distinct("a", 4))
    update(scheduler, schedule(scheduler), a=7)
    scheduler.add_request(distinct("b", 20))
    scheduler.add_request(distinct("c", 1))
    out = schedule(scheduler)
    assert list(out.num_scheduled_tokens.items()) == [("a", 1), ("b", 9)]
    assert scheduler.take_report().admission_stop == "budget"


def test_a_long_prompt_is_computed_in_chunks_and_yields_a_token_only_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = make_request("r1", 18)
    scheduler.add_request(request)
    sizes = []
    for _ in range(2):
        out = schedule(scheduler)
        sizes.append(out.num_scheduled_tokens["r1"])
        assert update(scheduler, out) == []
        assert request.num_output_placeholders == 0
    out = schedule(scheduler)
    assert [*sizes, out.num_scheduled_tokens["r1"]] == [8, 8, 2]
    assert out.scheduled_cached_reqs.num_computed_tokens == [16]
    (result,) = update(scheduler, out, r1=7)
    assert result.new_token_ids == [7]


def test_long_prefill_token_threshold_leaves_budget_to_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=10)
    scheduler.add_request(distinct("a", 40))
    scheduler.add_request(distinct("b", 12))
    scheduler.add_request(distinct("c", 3))
    assert schedule(scheduler).num_scheduled_tokens == {"a": 10, "b": 10, "c": 3}


def test_the_threshold_does_not_hold_back_who_is_alone() -> None:
    scheduler = make_scheduler(300, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=1024, long_prefill_token_threshold=8)
    scheduler.add_request(distinct("a", 200))
    sizes = [schedule(scheduler).num_scheduled_tokens["a"] for _ in range(2)]
    scheduler.add_request(distinct("b", 3))  # it cannot run yet, but it waits
    sizes += [schedule(scheduler).num_scheduled_tokens["a"] for _ in range(2)]
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    sizes.append(schedule(scheduler).num_scheduled_tokens["a"])
    assert sizes == [64, 64, 8, 8, 56]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_model_len=16, enable_chunked_prefill=False)
    scheduler.add_request(distinct("a", 10))
    scheduler.add_request(distinct("b", 10))
    out = schedule(scheduler)
    assert out.num_scheduled_tokens == {"a": 10}
    assert scheduler.take_report().admission_stop == "budget"
    update(scheduler, out, a=7)
    assert schedule(scheduler).num_scheduled_tokens == {"a": 1, "b": 10}


def test_max_num_seqs_limits_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(distinct(name, 4, max_tokens=1))
    out = schedule(scheduler)
    assert list(out.num_scheduled_tokens) == ["a", "b"]
    assert scheduler.take_report().admission_stop == "max_num_seqs"
    update(scheduler, out, a=7, b=7)
    out = schedule(scheduler)
    assert list(out.num_scheduled_tokens) == ["c"]
    assert out.finished_req_ids == {"a", "b"}
    assert scheduler.take_report().admission_stop == "queue_empty"


# ------------------------------------------------------------------ stopping
@pytest.mark.parametrize(
    ("params", "tokens", "expected", "reason", "stop_reason"),
    [
        ({"max_tokens": 3}, [5, 6, 7], [5, 6, 7], "length", None),
        ({}, [5, EOS], [5, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 3}, [5, EOS, 6], [5, EOS, 6], "length", None),
        ({"stop_token_ids": [9]}, [5, 9], [5, 9], "stop", 9),
        ({"stop_token_ids": [9], "min_tokens": 3}, [9, EOS, 9], [9, EOS, 9], "stop", 9),
    ],
)
def test_a_request_ends_with_its_reason(
    params: dict[str, Any], tokens: list[int], expected: list[int], reason: str, stop_reason: int | None
) -> None:
    scheduler = make_scheduler()
    request = make_request("r1", 4, **params)
    scheduler.add_request(request)
    result = None
    for token in tokens:
        (result,) = update(scheduler, schedule(scheduler), r1=token)
    assert result is not None
    assert (result.finish_reason, result.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == expected
    assert schedule(scheduler).is_cleanup_only


def test_the_total_length_ends_at_max_model_len() -> None:
    scheduler = make_scheduler(max_model_len=6)
    request = make_request("r1", 4, max_tokens=100)
    scheduler.add_request(request)
    update(scheduler, schedule(scheduler), r1=7)
    (result,) = update(scheduler, schedule(scheduler), r1=8)
    assert result.finish_reason == "length"
    assert request.num_tokens == 6


def test_tokens_after_the_first_stop_are_trimmed() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4))
    out = schedule(scheduler)
    scheduler.requests["r1"].num_output_placeholders = 3  # as if the step sampled three tokens
    (result,) = scheduler.update_from_output(out, output_for(out, {"r1": [5, EOS, 6]}))
    assert result.new_token_ids == [5, EOS]


def test_finished_ids_travel_once_in_a_clean_up_only_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4, max_tokens=1))
    update(scheduler, schedule(scheduler), r1=7)
    assert scheduler.has_work
    assert scheduler.is_lingering("r1")
    out = schedule(scheduler)
    assert out.is_cleanup_only
    assert out.finished_req_ids == {"r1"}
    update(scheduler, out)
    assert not scheduler.is_lingering("r1")
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    assert out.finished_req_ids == {"r1"}, "the old output is not changed when the scheduler starts a new set"
    check_idle(scheduler)


def test_a_step_in_flight_of_an_aborted_request_is_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4))
    first, second = schedule(scheduler), schedule(scheduler)
    (ended,) = scheduler.finish_requests(["r1", "unknown"], RequestStatus.FINISHED_ABORTED)
    assert ended.finish_reason == "abort"
    assert update(scheduler, first, r1=7) == []
    assert update(scheduler, second, r1=8) == []
    out = schedule(scheduler)
    assert out.finished_req_ids == {"r1"}
    update(scheduler, out)
    check_idle(scheduler)


def test_an_id_is_refused_until_the_worker_has_forgotten_it() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4))
    with pytest.raises(InvalidRequestError, match="'r1' is in use"):
        scheduler.add_request(make_request("r1", 4))
    first = schedule(scheduler)
    scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
    with pytest.raises(InvalidRequestError, match="'r1' is in use"):
        scheduler.add_request(make_request("r1", 4))
    cleanup = schedule(scheduler)
    update(scheduler, first, r1=7)
    update(scheduler, cleanup)
    scheduler.add_request(make_request("r1", 4))
    assert schedule(scheduler).num_scheduled_tokens == {"r1": 4}


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED], ids=lambda s: s.name
)
def test_only_what_was_aborted_is_counted_as_aborted(status: RequestStatus) -> None:
    """A stop string ends a request from outside too."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4))
    update(scheduler, schedule(scheduler), a=7)
    scheduler.finish_requests(["a", "unknown"], status)
    assert scheduler.make_stats().num_aborted_reqs == (status == RequestStatus.FINISHED_ABORTED)


def test_aborting_a_request_that_never_ran_needs_no_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r1", 4))
    scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule() is None
    check_idle(scheduler)


# ------------------------------------------------------------------ what fits
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(12, 1, True), (12, 5, True), (12, 6, False), (16, 1, True), (16, 2, False)]
)
def test_a_request_that_can_never_fit_is_refused_and_the_exactly_fitting_one_runs(num_prompt: int, max_tokens: int, fits: bool) -> None:
    scheduler = make_scheduler(num_blocks=5, eos=frozenset())  # 4 usable blocks of 4: 16 slots, and the last token needs none
    request = make_request("r1", num_prompt, max_tokens=max_tokens)
    if not fits:
        with pytest.raises(InvalidRequestError, match=r"needs 5 KV blocks .* but the cache has 4"):
            scheduler.add_request(request)
        return
    scheduler.add_request(request)
    assert scheduler.max_tokens_limit(num_prompt) >= max_tokens
    for _ in range(max_tokens):
        update(scheduler, schedule(scheduler), r1=7)
    assert request.finish_reason == "length"
    assert request.num_preemptions == 0


def test_prompts_at_the_length_limit() -> None:
    scheduler = make_scheduler(max_model_len=8)
    with pytest.raises(InvalidRequestError, match="8 tokens, but max_model_len is 8"):
        scheduler.add_request(make_request("long", 8))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add_request(make_request("empty", []))
    scheduler.add_request(make_request("ok", 7))
    (result,) = update(scheduler, schedule(scheduler), ok=5)
    assert result.finish_reason == "length"


# ------------------------------------------------------------------ prefix cache
def test_a_prefix_hit_starts_behind_the_shared_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 10, max_tokens=1))
    update(scheduler, schedule(scheduler), a=7)
    scheduler.add_request(make_request("b", 10))
    out = schedule(scheduler)
    (new,) = out.scheduled_new_reqs
    assert new.num_computed_tokens == 8
    assert new.block_ids[0][:2] == [1, 2]
    assert out.num_scheduled_tokens == {"b": 2}
    assert scheduler.requests["b"].num_cached_tokens == 8
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)


def test_a_hit_never_covers_the_whole_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, max_tokens=1))
    update(scheduler, schedule(scheduler), a=7)
    scheduler.add_request(make_request("b", 8))
    out = schedule(scheduler)
    assert out.num_scheduled_tokens == {"b": 4}, "one block is computed again to get logits"


def test_requests_of_the_same_step_share_the_prefix_that_the_first_one_computes() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9))
    scheduler.add_request(make_request("b", 9))
    out = schedule(scheduler)
    assert out.num_scheduled_tokens == {"a": 9, "b": 1}
    assert out.scheduled_new_reqs[1].block_ids[0][:2] == out.scheduled_new_reqs[0].block_ids[0][:2]
    assert scheduler.kv_cache_manager.block_pool.ref_cnt[1] == 2


def test_salts_and_switched_off_caching_share_nothing() -> None:
    scheduler = make_scheduler()
    for name, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
        scheduler.add_request(make_request(name, 9, salt=salt))
    assert schedule(scheduler).num_scheduled_tokens == {"a": 9, "b": 9, "c": 9, "d": 1}
    scheduler = make_scheduler(cache={"enable_prefix_caching": False})
    for name in "ab":
        scheduler.add_request(make_request(name, 9))
    assert schedule(scheduler).num_scheduled_tokens == {"a": 9, "b": 9}
    assert scheduler.make_stats().prefix_cache_queries == 0


def test_a_conversation_finds_the_blocks_of_its_own_answer() -> None:
    scheduler = make_scheduler(eos=frozenset())
    request = make_request("turn1", 4, max_tokens=5)
    scheduler.add_request(request)
    for token in (11, 12, 13, 14, 15):
        update(scheduler, schedule(scheduler), turn1=token)
    history = request.all_token_ids.copy()
    scheduler.add_request(make_request("turn2", [*history, 50, 51]))
    assert schedule(scheduler).scheduled_new_reqs[0].num_computed_tokens == 8


def test_uncached_blocks_are_reused_before_cached_ones_and_tails_before_heads() -> None:
    scheduler = make_scheduler(num_blocks=8)  # 7 usable
    scheduler.add_request(distinct("a", 10, max_tokens=1))  # blocks 1 2 3, of which 1 2 are full
    update(scheduler, schedule(scheduler), a=7)
    pool = scheduler.kv_cache_manager.block_pool
    assert list(pool.free_block_queue) == [3, 4, 5, 6, 7, 2, 1]
    scheduler.take_report()
    scheduler.add_request(distinct("b", 22, max_tokens=1))
    update(scheduler, schedule(scheduler), b=7)
    assert scheduler.take_report().block_changes.evicted == [2]


def test_reset_prefix_cache_is_refused_while_blocks_are_held() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9, max_tokens=1))
    out = schedule(scheduler)
    assert not scheduler.reset_prefix_cache()
    update(scheduler, out, a=7)
    assert scheduler.reset_prefix_cache()
    assert scheduler.make_stats().num_cached_blocks == 0
    scheduler.add_request(make_request("b", 9))
    assert schedule(scheduler).num_scheduled_tokens == {"b": 9}


# ------------------------------------------------------------------ preemption
def two_requests_that_collide() -> tuple[Scheduler, SchedulerOutput]:
    """Four usable blocks; a and b hold two each and both need a third."""
    scheduler = make_scheduler(num_blocks=5, eos=frozenset(), cache={"enable_prefix_caching": False})
    scheduler.add_request(distinct("a", 8))
    scheduler.add_request(distinct("b", 8))
    update(scheduler, schedule(scheduler), a=7, b=8)
    return scheduler, schedule(scheduler)


def test_the_newest_running_request_is_preempted_when_blocks_run_out() -> None:
    scheduler, out = two_requests_that_collide()
    assert out.num_scheduled_tokens == {"a": 1}
    assert out.preempted_req_ids == {"b"}
    request = scheduler.requests["b"]
    assert (request.status, request.num_computed_tokens, request.block_ids) == (RequestStatus.PREEMPTED, 0, ([],))
    report = scheduler.take_report()
    assert report.admission_stop == "preempted"
    stats = scheduler.make_stats()
    assert (stats.num_waiting_reqs, stats.num_preempted_reqs, stats.num_preemptions) == (1, 1, 1)


def test_a_preempted_request_resumes_with_its_history_and_new_blocks() -> None:
    scheduler, out = two_requests_that_collide()
    update(scheduler, out, a=9)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    out = schedule(scheduler)
    cached = out.scheduled_cached_reqs
    request = scheduler.requests["b"]
    assert out.scheduled_new_reqs == []
    assert cached.req_ids == ["b"]
    assert cached.resumed_req_ids == {"b"}
    assert cached.all_token_ids == {"b": request.all_token_ids}
    assert cached.new_block_ids == [request.block_ids]
    assert out.num_scheduled_tokens == {"b": 9}, "the prompt and the token it had sampled"
    assert cached.num_output_tokens == [1]
    (result,) = update(scheduler, out, b=5)
    assert result.new_token_ids == [5]
    assert request.output_token_ids == [8, 5]


def test_a_token_in_flight_survives_the_preemption_of_its_request() -> None:
    scheduler = make_scheduler(num_blocks=6, eos=frozenset(), cache={"enable_prefix_caching": False})
    scheduler.add_request(distinct("a", 8))
    scheduler.add_request(distinct("b", 7))
    update(scheduler, schedule(scheduler), a=7, b=8)
    flying = schedule(scheduler)  # a takes the fifth block, b its last free slot
    assert flying.num_scheduled_tokens == {"a": 1, "b": 1}
    second = schedule(scheduler)  # b needs a third block and there is none
    assert second.preempted_req_ids == {"b"}
    assert scheduler.schedule() is not None
    assert scheduler.take_report().admission_stop in ("in_flight", "no_blocks")
    update(scheduler, flying, a=9, b=10)
    assert scheduler.requests["b"].output_token_ids == [8, 10]


def test_a_request_can_end_by_a_token_that_was_in_flight_when_it_was_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, eos=frozenset({EOS}), cache={"enable_prefix_caching": False})
    scheduler.add_request(distinct("a", 8))
    scheduler.add_request(distinct("b", 7))
    update(scheduler, schedule(scheduler), a=7, b=8)
    flying = schedule(scheduler)
    second = schedule(scheduler)
    assert second.preempted_req_ids == {"b"}
    results = {result.request_id: result for result in update(scheduler, flying, a=9, b=EOS)}
    assert results["b"].finish_reason == "stop"
    assert "b" not in scheduler.requests
    assert not scheduler.waiting


def test_with_priorities_the_worst_running_request_is_preempted_and_the_best_waiting_admitted() -> None:
    scheduler = make_scheduler(num_blocks=5, policy="priority", eos=frozenset(), cache={"enable_prefix_caching": False})
    scheduler.add_request(distinct("worse", 8, priority=5))
    scheduler.add_request(distinct("better", 8, priority=1))
    out = schedule(scheduler)
    assert list(out.num_scheduled_tokens) == ["better", "worse"]
    update(scheduler, out, worse=7, better=8)
    assert schedule(scheduler).preempted_req_ids == {"worse"}


def test_a_prompt_is_admitted_only_when_all_of_it_finds_room() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8, eos=frozenset())
    scheduler.add_request(distinct("a", 8))
    update(scheduler, schedule(scheduler), a=7)
    scheduler.add_request(distinct("b", 12))
    out = schedule(scheduler)  # a takes a third block; two are left, b's chunk would fit, b would not
    assert out.num_scheduled_tokens == {"a": 1}
    assert scheduler.take_report().admission_stop == "no_blocks"


# ------------------------------------------------------------------ zeroing, reports
def test_new_blocks_are_listed_for_zeroing_only_when_the_cache_needs_it() -> None:
    scheduler = make_scheduler(cache={"zero_new_blocks": True})
    scheduler.add_request(make_request("a", 9))
    scheduler.add_request(make_request("b", 9))
    out = schedule(scheduler)
    assert out.new_block_ids_to_zero == [1, 2, 3, 4], "blocks taken over from the cache are not cleared"
    update(scheduler, out, a=7, b=7)
    assert schedule(scheduler).new_block_ids_to_zero == []
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9))
    assert schedule(scheduler).new_block_ids_to_zero == []


def test_block_changes_are_reported_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9, max_tokens=1))
    out = schedule(scheduler)
    assert scheduler.take_report().block_changes.allocated == [1, 2, 3]
    update(scheduler, out, a=7)
    changes = scheduler.take_report().block_changes
    assert (changes.allocated, sorted(changes.freed)) == ([], [1, 2, 3])
    assert scheduler.take_report().block_changes.freed == []
