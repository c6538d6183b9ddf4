"""The strict worker of `aioengine.testing` notices what breaks the `SchedulerOutput` contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.executor.base import Executor
from aioengine.testing import ContractError, FakeExecutor, FakeTokenizer, make_request, make_scheduler, scripted


@pytest.fixture
def executor() -> Iterator[FakeExecutor]:
    executor = FakeExecutor(block_size=4, max_num_seqs=2)
    executor.initialize_kv_cache(65).result()
    yield executor
    executor.shutdown()


def test_it_is_an_executor(executor: FakeExecutor) -> None:
    assert isinstance(executor, Executor)
    assert executor.collective_rpc("check_health").result() == [None]


def test_a_correct_run_passes_and_leaves_nothing(executor: FakeExecutor) -> None:
    scheduler = make_scheduler(num_kv_cache_blocks=7, max_num_seqs=2, max_num_batched_tokens=8)
    for length in (5, 9, 14):
        scheduler.add_request(make_request(length, max_tokens=8))
    while (output := scheduler.schedule()) is not None:
        executor.execute_model(output).result()
        scheduler.update_from_output(output, executor.sample_tokens().result())
    assert scheduler.totals.num_preemptions > 0
    assert executor.req_ids == set()


Change = Callable[[SchedulerOutput], SchedulerOutput]


def _cached(**changes: object) -> Change:
    return lambda output: dataclasses.replace(
        output,
        scheduled_cached_reqs=dataclasses.replace(output.scheduled_cached_reqs, **changes),  # type: ignore[arg-type]
    )


BROKEN: list[tuple[Change, str]] = [
    (lambda output: dataclasses.replace(output, step_id=7), "step 7 after step 1"),
    (_cached(num_computed_tokens=[4]), "starts at 4, the worker is at 5"),
    (_cached(num_output_tokens=[2]), "2 output tokens, not 1"),
    (_cached(new_block_ids=[([0],)]), "has a block that cannot be"),
    (_cached(new_block_ids=[([1],)]), "has a block twice"),
    (_cached(all_token_ids={"a": [1]}), "the history of 'a' is"),
    (_cached(resumed_req_ids=frozenset({"a"})), "is resumed but was not preempted"),
    (lambda output: dataclasses.replace(output, finished_req_ids=frozenset({"a"})), "is unknown here"),
    (lambda output: dataclasses.replace(output, preempted_req_ids=frozenset({"a"})), "without having been resumed"),
    (lambda output: dataclasses.replace(output, num_scheduled_tokens={"a": 9}, total_num_scheduled_tokens=9), "scheduled up to 14"),
    (lambda output: dataclasses.replace(output, total_num_scheduled_tokens=9), "the total is not the sum"),
    (lambda output: dataclasses.replace(output, scheduled_cached_reqs=CachedRequestData()), "are not the scheduled ones"),
    (lambda output: dataclasses.replace(output, new_block_ids_to_zero=[1]), "block 1 does not hold position 0"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_a_broken_output_is_refused(executor: FakeExecutor, change: Change, message: str) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(5, request_id="a"))
    first = scheduler.schedule()
    assert first is not None
    executor.execute_model(first).result()
    scheduler.update_from_output(first, executor.sample_tokens().result())
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(ContractError, match=message):
        executor.execute_model(change(second)).result()


def test_fake_tokenizer_round_trip() -> None:
    tokenizer = FakeTokenizer()
    text = "<|user|>héllo<eos> 🚀"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert tokenizer.decode(token_ids) == "héllo 🚀"
    assert tokenizer.encode("a") == [257, 97]


def test_scripted_answers() -> None:
    next_token = scripted("ab", then=7)
    params = make_request(1).sampling_params
    assert [next_token([0] * n, 2, params) for n in (2, 3, 4, 5)] == [97, 98, 7, 7]
