"""What the scheduler does with draft tokens: counted as computed at once, taken back where they were wrong, never in anybody's way."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import EngineCoreOutput, Logprob, ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.testing import EOS_TOKEN_ID, make_request, make_scheduler

PERIODIC = [1, 2, 3] * 3


def drafting(**options: Any) -> Scheduler:
    return make_scheduler(**{"num_speculative_tokens": 4, "prompt_lookup_min": 1, "async_scheduling": False, **options})


def step(scheduler: Scheduler) -> SchedulerOutput:
    out = scheduler.schedule()
    assert out is not None
    return out


def answer(scheduler: Scheduler, out: SchedulerOutput, **tokens: list[int]) -> list[EngineCoreOutput]:
    req_ids = list(out.num_scheduled_tokens)
    sampled = [tokens.get(req_id, []) for req_id in req_ids]
    return scheduler.update_from_output(out, ModelRunnerOutput(req_ids, {r: i for i, r in enumerate(req_ids)}, sampled))


def started(scheduler: Scheduler, names: str = "a", prompt: list[int] = PERIODIC, first: int = 1, **params: Any) -> Request:
    """Requests, one a letter, whose prompts have been computed in one step, and whose first token is known; the first of them."""
    requests = [make_request(prompt, request_id=name, **{"max_tokens": 20, **params}) for name in names]
    for request in requests:
        scheduler.add_request(request)
    out = step(scheduler)
    assert not out.scheduled_spec_decode_tokens, "nothing is drafted before the first token"
    answer(scheduler, out, **{name: [first] for name in names})
    return requests[0]


def draft_token_ids(out: SchedulerOutput, request_id: str = "a") -> list[int]:
    return out.scheduled_spec_decode_tokens.get(request_id, [])


# ------------------------------------------------------------------ right and wrong
def test_draft_tokens_are_scheduled_behind_the_known_token_and_counted_at_once() -> None:
    scheduler = drafting()
    request = started(scheduler)
    out = step(scheduler)
    assert out.scheduled_spec_decode_tokens == {"a": [2, 3, 1, 2]}
    assert out.num_scheduled_tokens == {"a": 5}
    assert out.total_num_scheduled_tokens == 5
    assert out.scheduled_cached_reqs.num_computed_tokens == [9]
    assert out.scheduled_cached_reqs.num_output_tokens == [1], "a draft token is not an output token"
    assert (request.num_tokens, request.num_tokens_with_spec, request.num_computed_tokens) == (10, 14, 14)


@pytest.mark.parametrize("num_right", range(5))
def test_the_next_step_starts_behind_the_last_accepted_draft_token(num_right: int) -> None:
    scheduler = drafting()
    request = started(scheduler)
    out = step(scheduler)
    sampled = [*draft_token_ids(out)[:num_right], 77]
    (output,) = answer(scheduler, out, a=sampled)
    assert output.new_token_ids == sampled
    assert request.output_token_ids == [1, *sampled]
    assert request.num_computed_tokens == request.num_tokens - 1 == 10 + num_right
    assert request.num_tokens_with_spec == request.num_tokens
    out = step(scheduler)
    assert out.scheduled_cached_reqs.num_computed_tokens == [10 + num_right]
    assert out.num_scheduled_tokens == {"a": 1}, "nothing like 77 was seen before"
    stats = scheduler.make_stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, num_right)
    assert stats.acceptance_rate == num_right / 4


def test_a_stop_token_among_accepted_draft_tokens_ends_the_request_there() -> None:
    scheduler = drafting()
    request = started(scheduler, prompt=[1, EOS_TOKEN_ID, 5, 1, EOS_TOKEN_ID, 5], first=1)
    out = step(scheduler)
    assert draft_token_ids(out)[:2] == [EOS_TOKEN_ID, 5]
    (output,) = answer(scheduler, out, a=[EOS_TOKEN_ID, 5, 1, EOS_TOKEN_ID, 9])
    assert (output.new_token_ids, output.finish_reason) == ([EOS_TOKEN_ID], "stop")
    assert request.output_token_ids == [1, EOS_TOKEN_ID]
    assert step(scheduler).finished_req_ids == {"a"}
    check_idle(scheduler)


def test_logprobs_end_where_the_tokens_do() -> None:
    scheduler = drafting()
    started(scheduler, prompt=[1, EOS_TOKEN_ID, 5, 1, EOS_TOKEN_ID, 5], first=1, logprobs=0)
    out = step(scheduler)
    sampled = [EOS_TOKEN_ID, 5, 1, EOS_TOKEN_ID, 9]
    entries = [{token: Logprob(-0.5 * place, 1)} for place, token in enumerate(sampled)]
    (output,) = scheduler.update_from_output(out, ModelRunnerOutput(["a"], {"a": 0}, [sampled], logprobs={"a": entries}))
    assert (output.new_token_ids, output.logprobs) == ([EOS_TOKEN_ID], entries[:1])


@pytest.mark.parametrize(("max_tokens", "num_draft_tokens"), [(2, 0), (3, 1), (4, 2), (6, 4), (20, 4)])
def test_no_more_is_drafted_than_can_be_put_out(max_tokens: int, num_draft_tokens: int) -> None:
    scheduler = drafting()
    started(scheduler, max_tokens=max_tokens)
    assert len(draft_token_ids(step(scheduler))) == num_draft_tokens


def test_max_model_len_limits_the_draft_tokens() -> None:
    scheduler = drafting(max_model_len=13)
    started(scheduler)  # 10 tokens: three more fit
    out = step(scheduler)
    assert len(draft_token_ids(out)) == 2
    (output,) = answer(scheduler, out, a=[2, 3, 1])
    assert output.finish_reason == "length"


# ------------------------------------------------------------------ who gets none
def test_no_draft_tokens_while_the_prompt_is_computed_nor_for_structured_output() -> None:
    scheduler = drafting(max_num_batched_tokens=4, max_num_seqs=4)
    scheduler.add_request(make_request(PERIODIC, request_id="a", max_tokens=20))
    for num_tokens in (4, 4, 1):  # the last chunk is one token, as a decoding step is
        out = step(scheduler)
        assert (out.num_scheduled_tokens, draft_token_ids(out)) == ({"a": num_tokens}, [])
        answer(scheduler, out, a=[1] if num_tokens == 1 else [])
    assert draft_token_ids(step(scheduler))

    scheduler = drafting()
    started(scheduler, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    assert not draft_token_ids(step(scheduler))


def test_every_running_request_gets_its_token_before_anybody_gets_draft_tokens() -> None:
    scheduler = drafting(max_num_batched_tokens=12, max_num_seqs=8)
    started(scheduler, "abcde", [7, 7], first=7)
    out = step(scheduler)
    assert all(name in out.num_scheduled_tokens for name in "abcde")
    assert out.total_num_scheduled_tokens <= 12
    assert out.scheduled_spec_decode_tokens


def test_the_threshold_of_one_requests_share_holds_for_draft_tokens_too() -> None:
    scheduler = drafting(long_prefill_token_threshold=3, max_num_seqs=1)
    scheduler.add_request(make_request(PERIODIC, request_id="a", max_tokens=20))
    scheduler.add_request(make_request(4, request_id="waits"))  # whoever is alone has no threshold
    for _ in range(3):
        answer(scheduler, out := step(scheduler), a=[1] if out.scheduled_cached_reqs.num_computed_tokens == [6] else [])
    assert out.num_scheduled_tokens == {"a": 3}
    assert step(scheduler).num_scheduled_tokens == {"a": 3}


# ------------------------------------------------------------------ blocks
def test_draft_tokens_preempt_nobody_and_leave_a_block_for_everybody() -> None:
    scheduler = drafting(num_kv_cache_blocks=7, block_size=4, enable_prefix_caching=False)
    started(scheduler, "ab", PERIODIC[:7], first=2, max_tokens=12)  # 8 tokens each, in two blocks
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 2
    out = step(scheduler)
    assert not out.preempted_req_ids
    assert out.num_scheduled_tokens == {"a": 1, "b": 1}, "both fill their second block; a third one is kept for each"
    answer(scheduler, out, a=[3], b=[3])
    out = step(scheduler)
    assert draft_token_ids(out, "a") == draft_token_ids(out, "b") == [1, 2, 3], (
        "the block that the known token needs has room for three more"
    )
    assert scheduler.totals.num_preemptions == 0


def test_a_block_with_a_rejected_draft_token_is_never_served() -> None:
    scheduler = drafting(block_size=4)
    started(scheduler, "a", PERIODIC[:7])  # 1 2 3 1 2 3 1, then 1
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    request = started(scheduler, "b", [1, 2, 3, 1, 2, 3, 1, 2, 3], first=1)
    out = step(scheduler)
    assert draft_token_ids(out, "b") == [2, 3, 1, 2]  # fills positions 10 and 11, and begins the fourth block
    answer(scheduler, out, b=[9])
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    assert request.num_tokens == 11

    as_drafted = make_request([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], request_id="c")
    scheduler.add_request(as_drafted)
    (new,) = step(scheduler).scheduled_new_reqs
    assert new.num_computed_tokens == 8, "the third block held a draft token that was rejected"


def test_blocks_of_accepted_draft_tokens_are_served() -> None:
    scheduler = drafting(block_size=4)
    started(scheduler, "b", [1, 2, 3, 1, 2, 3, 1, 2, 3], first=1)
    out = step(scheduler)
    answer(scheduler, out, b=[*draft_token_ids(out, "b"), 3])
    scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request([1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2], request_id="c"))
    (new,) = step(scheduler).scheduled_new_reqs
    assert new.num_computed_tokens == 12


# ------------------------------------------------------------------ while draft tokens are in flight
def test_a_request_that_ends_meanwhile_leaves_nothing() -> None:
    scheduler = drafting()
    started(scheduler)
    out = step(scheduler)
    assert draft_token_ids(out)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert answer(scheduler, out, a=[2, 3, 9]) == []
    step(scheduler)
    check_idle(scheduler)


def test_a_request_with_draft_tokens_in_flight_waits_for_them() -> None:
    """No engine plans a step then, but the books hold if one does."""
    scheduler = drafting()
    request = started(scheduler)
    out = step(scheduler)
    assert draft_token_ids(out)
    assert scheduler.schedule() is None
    answer(scheduler, out, a=[2, 9])
    assert request.output_token_ids == [1, 2, 9]


def test_a_request_that_was_preempted_meanwhile_takes_its_tokens_and_starts_over() -> None:
    scheduler = drafting(policy="priority", max_num_seqs=1)
    request = started(scheduler)
    out = step(scheduler)
    assert draft_token_ids(out)
    scheduler.add_request(make_request([50, 60], request_id="urgent", priority=-1, max_tokens=1))
    urgent_out = step(scheduler)
    assert urgent_out.preempted_req_ids == {"a"}
    answer(scheduler, out, a=[2, 3, 9])
    assert request.output_token_ids == [1, 2, 3, 9]
    assert request.num_computed_tokens == 0
    answer(scheduler, urgent_out, urgent=[5])
    resumed = step(scheduler)
    assert resumed.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert resumed.scheduled_cached_reqs.all_token_ids == {"a": [*PERIODIC, 1, 2, 3, 9]}
    assert not draft_token_ids(resumed)
