"""Policy "sjf": short prompts first, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine.core.request_queue import SJF_AGING_TOKENS, RequestQueue
from aioengine.resolved_config import SchedulingPolicy
from aioengine.testing import make_request


def order_of_admission(policy: SchedulingPolicy, prompt_lens: Sequence[int]) -> list[int]:
    """The numbers of requests of such prompts, which came in this order and wait together."""
    queue = RequestQueue(policy)
    for index, prompt_len in enumerate(prompt_lens):
        request = make_request(prompt_len, request_id=str(index))
        request.arrival_index = index
        queue.add(request)
    return [int(queue.pop().request_id) for _ in prompt_lens]


def test_a_short_prompt_goes_before_a_long_one_that_came_earlier() -> None:
    assert order_of_admission("sjf", [2000, 100, 50]) == [1, 2, 0]
    assert order_of_admission("fcfs", [2000, 100, 50]) == [0, 1, 2]


def test_a_long_prompt_is_overtaken_by_a_bounded_number() -> None:
    """Ten requests earlier weigh as much as the difference of the prompts: from the tenth on it goes first."""
    lengths = [10 * SJF_AGING_TOKENS + 8, *[8] * 30]
    assert order_of_admission("sjf", lengths).index(0) == 9


def test_one_that_was_preempted_keeps_its_place() -> None:
    queue = RequestQueue("sjf")
    early, late = make_request(300), make_request(8)
    early.arrival_index, late.arrival_index = 0, 5
    queue.add(late)
    queue.add(early)
    assert queue.pop() is early
    queue.add(early)
    assert queue.peek() is early
