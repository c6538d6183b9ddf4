"""Policy "priority": the order, who gives way to whom, and that nobody is stuck."""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from aioengine.core.invariants import check_idle
from aioengine.core.request_queue import scheduling_key
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from tests.core.test_scheduler import distinct, make_request, make_scheduler, schedule, update
from tests.core.test_scheduler_machine import StrictWorker

URGENT, NORMAL, BATCH = -1, 0, 1


def priority_scheduler(num_blocks: int = 64, **config: Any) -> Scheduler:
    cache = {"enable_prefix_caching": config.pop("caching", False)}
    return make_scheduler(num_blocks, policy="priority", eos=frozenset(), cache=cache, **config)


def admitted(out: SchedulerOutput) -> list[str]:
    return [new.req_id for new in out.scheduled_new_reqs] + sorted(out.scheduled_cached_reqs.resumed_req_ids)


# ------------------------------------------------------------------ slots
def test_a_more_urgent_request_takes_the_slot_of_the_least_urgent_one() -> None:
    scheduler = priority_scheduler(max_num_seqs=2)
    scheduler.add_request(distinct("batch", 4, priority=BATCH))
    scheduler.add_request(distinct("normal", 4, priority=NORMAL))
    update(scheduler, schedule(scheduler), batch=7, normal=7)
    scheduler.add_request(distinct("urgent", 4, priority=URGENT))
    out = schedule(scheduler)
    assert out.preempted_req_ids == {"batch"}
    assert out.num_scheduled_tokens == {"normal": 1, "urgent": 4}
    assert scheduler.take_report().admission_stop == "max_num_seqs"
    update(scheduler, out, normal=7, urgent=7)
    scheduler.finish_requests(["urgent"], RequestStatus.FINISHED_ABORTED)
    assert admitted(schedule(scheduler)) == ["batch"], "it waits its turn and comes back with what it had"
    assert scheduler.requests["batch"].output_token_ids == [7]


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_equals_never_preempt_each_other_and_first_come_first_served_knows_no_urgency(policy: str) -> None:
    scheduler = make_scheduler(policy=policy, eos=frozenset(), max_num_seqs=1)
    scheduler.add_request(distinct("running", 4, priority=NORMAL))
    update(scheduler, schedule(scheduler), running=7)
    scheduler.add_request(distinct("waiting", 4, priority=NORMAL if policy == "priority" else URGENT))
    out = schedule(scheduler)
    assert out.num_scheduled_tokens == {"running": 1}
    assert not out.preempted_req_ids
    assert scheduler.take_report().admission_stop == "max_num_seqs"


def test_one_waiting_request_a_step_makes_room() -> None:
    scheduler = priority_scheduler(max_num_seqs=2)
    scheduler.add_request(distinct("b1", 4, priority=BATCH))
    scheduler.add_request(distinct("b2", 4, priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7, b2=7)
    scheduler.add_request(distinct("u1", 4, priority=URGENT))
    scheduler.add_request(distinct("u2", 4, priority=URGENT))
    first = schedule(scheduler)
    assert (admitted(first), set(first.preempted_req_ids)) == (["u1"], {"b2"}), "of equals the one that came last goes first"
    update(scheduler, first, b1=7, u1=7)
    second = schedule(scheduler)
    assert (admitted(second), set(second.preempted_req_ids)) == (["u2"], {"b1"})


def test_a_request_whose_last_token_is_in_flight_gives_its_slot_and_loses_nothing() -> None:
    scheduler = priority_scheduler(max_num_seqs=1)
    scheduler.add_request(distinct("batch", 4, priority=BATCH, max_tokens=2))
    update(scheduler, schedule(scheduler), batch=7)
    flying = schedule(scheduler)
    scheduler.add_request(distinct("urgent", 4, priority=URGENT))
    assert schedule(scheduler).preempted_req_ids == {"batch"}
    (result,) = update(scheduler, flying, batch=8)
    assert (result.request_id, result.finish_reason) == ("batch", "length")


# ------------------------------------------------------------------ blocks
def test_a_more_urgent_request_takes_the_blocks_of_as_few_as_it_needs() -> None:
    scheduler = priority_scheduler(num_blocks=9)  # eight usable blocks of four tokens
    for name in ("b1", "b2", "b3"):
        scheduler.add_request(distinct(name, 7, priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7, b2=7, b3=7)  # two blocks each, two are free
    scheduler.add_request(distinct("urgent", 11, priority=URGENT))  # needs three
    out = schedule(scheduler)
    assert out.preempted_req_ids == {"b3"}
    assert out.num_scheduled_tokens == {"b1": 1, "b2": 1, "urgent": 11}
    assert scheduler.take_report().admission_stop == "preempted", "what is left is too little for b3"
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 1


def test_what_running_requests_need_in_the_same_step_is_counted() -> None:
    scheduler = priority_scheduler(num_blocks=8)  # seven usable blocks
    for name in ("n1", "b1", "b2"):
        scheduler.add_request(distinct(name, 8, priority=NORMAL if name == "n1" else BATCH))
    update(scheduler, schedule(scheduler), n1=7, b1=7, b2=7)  # two blocks each, full: one is free, and each wants another
    scheduler.add_request(distinct("urgent", 8, priority=URGENT))  # needs two
    out = schedule(scheduler)
    assert out.preempted_req_ids == {"b1", "b2"}, "with only b2 gone, n1 and b1 would take two of the three free blocks"
    assert out.num_scheduled_tokens == {"n1": 1, "urgent": 8}


def test_nobody_is_preempted_if_it_would_not_help() -> None:
    scheduler = priority_scheduler(num_blocks=8)
    scheduler.add_request(distinct("n1", 15, priority=NORMAL))  # four of seven blocks
    scheduler.add_request(distinct("b1", 7, priority=BATCH))
    update(scheduler, schedule(scheduler), n1=7, b1=7)
    scheduler.add_request(distinct("waiting", 15, priority=NORMAL))  # needs four; without b1 there would be three
    out = schedule(scheduler)
    assert not out.preempted_req_ids
    assert out.num_scheduled_tokens == {"n1": 1, "b1": 1}
    assert scheduler.take_report().admission_stop == "no_blocks"


def test_blocks_shared_with_others_are_not_counted_as_gained() -> None:
    scheduler = priority_scheduler(num_blocks=9, caching=True)
    prefix = list(range(500, 512))
    scheduler.add_request(make_request("b1", [*prefix, 1], priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7)
    scheduler.add_request(make_request("b2", [*prefix, 2], priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7, b2=7)  # three shared blocks and one each: three are free
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 3
    scheduler.add_request(distinct("u1", 16, priority=URGENT))  # needs four: b2's own block is the fourth
    out = schedule(scheduler)
    assert (admitted(out), set(out.preempted_req_ids)) == (["u1"], {"b2"})
    update(scheduler, out, b1=7, u1=7)
    scheduler.add_request(distinct("u2", 12, priority=URGENT - 1))  # b1 gives four, one of which u1 takes for its next token
    out = schedule(scheduler)
    assert (admitted(out), set(out.preempted_req_ids)) == (["u2"], {"b1"})


def test_blocks_that_the_urgent_request_takes_over_are_not_counted_as_gained() -> None:
    """It does not ask for them, so that they become free gives it nothing."""
    scheduler = priority_scheduler(num_blocks=7, caching=True)
    prefix = list(range(500, 508))
    scheduler.add_request(distinct("b1", 8, priority=BATCH))
    scheduler.add_request(make_request("b2", prefix, priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7, b2=7)  # two blocks each, and two are free
    scheduler.add_request(make_request("urgent", [*prefix, *range(600, 609)], priority=URGENT))  # needs three beside b2's two
    out = schedule(scheduler)
    assert (admitted(out), set(out.preempted_req_ids)) == (["urgent"], {"b1", "b2"})
    assert out.num_scheduled_tokens == {"urgent": 9}


def test_a_budget_that_just_suffices_lets_the_urgent_request_in() -> None:
    scheduler = priority_scheduler(max_num_seqs=2, max_num_batched_tokens=2)
    scheduler.add_request(distinct("b1", 1, priority=BATCH))
    scheduler.add_request(distinct("b2", 1, priority=BATCH))
    update(scheduler, schedule(scheduler), b1=7, b2=7)
    scheduler.add_request(distinct("urgent", 1, priority=URGENT))
    out = schedule(scheduler)
    assert (out.num_scheduled_tokens, set(out.preempted_req_ids)) == ({"b1": 1, "urgent": 1}, {"b2"})


def test_no_ping_pong_the_preempted_request_comes_back_once() -> None:
    scheduler = priority_scheduler(max_num_seqs=1, num_blocks=6)
    scheduler.add_request(distinct("batch", 7, priority=BATCH, max_tokens=6))
    update(scheduler, schedule(scheduler), batch=7)
    scheduler.add_request(distinct("urgent", 7, priority=URGENT, max_tokens=6))
    order: list[str] = []
    while scheduler.has_work:
        out = schedule(scheduler)
        order += out.num_scheduled_tokens
        scheduler.update_from_output(
            out, ModelRunnerOutput(list(out.num_scheduled_tokens), dict.fromkeys(out.num_scheduled_tokens, 0), [[7]])
        )
    assert order == ["urgent"] * 6 + ["batch"] * 5
    assert scheduler.totals.num_preemptions == 1


# ------------------------------------------------------------------ any traffic
class Traffic:
    """Up to `depth` steps in flight on a worker that checks every slot; each step is checked against the rules of the policy."""

    def __init__(self, scheduler: Scheduler, *, depth: int) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.worker = StrictWorker(scheduler.kv_cache_manager.block_size, scheduler.config.max_num_seqs)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.first_admissions: list[Request] = []

    def step(self) -> None:
        """Schedule a step if there is one, and take in the oldest if as many as may be are in flight."""
        idle = not self.in_flight
        running = {request.request_id: request for request in self.scheduler.running}
        out = self.scheduler.schedule()
        if out is None:
            assert not (idle and self.scheduler.requests), "nothing is in flight, and yet nobody moves"
        else:
            assert out.num_scheduled_tokens or not (idle and self.scheduler.requests), "a step in which nobody moves"
            self._check(out, running)
            self.in_flight.append((out, self.worker.run(out)))
        if self.in_flight and (out is None or len(self.in_flight) >= self.depth):
            self.scheduler.update_from_output(*self.in_flight.popleft())

    def _check(self, out: SchedulerOutput, running: dict[str, Request]) -> None:
        gone = [running.pop(req_id) for req_id in out.preempted_req_ids]
        for request in gone:
            assert all(key(other) < key(request) for other in running.values()), (
                "the lowest priority goes first, of equals the last to come"
            )
        came = [self.scheduler.requests[req_id] for req_id in admitted(out)]
        for request in came:
            assert all(request.priority < other.priority for other in gone), "only a strictly more urgent request preempts others"
            assert all(key(request) < key(other) for other in self.scheduler.waiting), "the best that waits comes first"
        self.first_admissions += [request for request in came if request.num_preemptions == 0]


def key(request: Request) -> tuple[int, int]:
    return scheduling_key("priority", request)


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 8), st.integers(-1, 2)),
    min_size=1,
    max_size=14,
)


@given(
    arrivals=ARRIVALS,  # steps since the previous arrival, prompt, max_tokens, priority
    num_blocks=st.integers(8, 20),
    max_num_seqs=st.integers(1, 4),
    extra_budget=st.integers(0, 24),
    caching=st.booleans(),
    chunked=st.booleans(),
    depth=st.integers(1, 2),
)
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_traffic_keeps_the_order_moves_in_every_step_and_ends(
    arrivals: list[tuple[int, list[int], int, int]],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    caching: bool,
    chunked: bool,
    depth: int,
) -> None:
    scheduler = priority_scheduler(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget if chunked else 28 + extra_budget,
        max_model_len=28,
        enable_chunked_prefill=chunked,
        caching=caching,
    )
    traffic = Traffic(scheduler, depth=depth)
    requests = []
    for index, (pause, prompt, max_tokens, priority) in enumerate(arrivals):
        for _ in range(pause):
            traffic.step()
        requests.append(make_request(f"r{index}", prompt, max_tokens=max_tokens, priority=priority))
        scheduler.add_request(requests[-1])
    for _ in range(2000):
        if not scheduler.has_work and not traffic.in_flight:
            break
        traffic.step()
    check_idle(scheduler)
    assert all(request.is_finished for request in requests)
    for priority in {request.priority for request in requests}:
        equals = [request.arrival_index for request in traffic.first_admissions if request.priority == priority]
        assert equals == sorted(equals), "equals come in the order of their arrival"
