from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.executor.base import GrammarOutput

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]
OTHER = [27, 18, 28, 18, 28, 45, 9]
MakeDriver = Callable[..., Any]

SAMPLING = [
    pytest.param({"temperature": 0}, id="greedy"),
    pytest.param({"temperature": 1.5, "seed": 3, "top_p": 0.95}, id="seeded"),
]


def generate_alone(make_driver: MakeDriver, options: dict[str, Any], *, chunk: int = 64, **config: Any) -> list[int]:
    driver = make_driver(**config)
    driver.add("r", PROMPT, **options)
    tokens: list[int] = driver.generate("r", 12, chunk=chunk)
    return tokens


def test_the_cache_gives_the_same_tokens_as_no_cache_at_all(make_driver: MakeDriver) -> None:
    tokens = generate_alone(make_driver, {"temperature": 0})
    for i, token in enumerate(tokens):
        driver = make_driver()
        driver.add("r", PROMPT + tokens[:i])
        assert driver.generate("r", 1) == [token], f"token {i}"
    assert len(set(tokens)) > 3, "the tiny model must not repeat itself, or this shows nothing"


@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 4, 13])
def test_chunked_equals_unchunked(make_driver: MakeDriver, chunk: int, block_size: int, options: dict[str, Any]) -> None:
    assert generate_alone(make_driver, options, chunk=chunk, block_size=block_size) == generate_alone(make_driver, options)


@pytest.mark.parametrize("options", SAMPLING)
@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_preempted_and_resumed_equals_uninterrupted(make_driver: MakeDriver, after: int, options: dict[str, Any]) -> None:
    driver = make_driver()
    driver.add("r", PROMPT, **options)
    driver.add("other", OTHER)
    if after == 0:
        driver.step({"r": 5})  # in the middle of the prompt
    else:
        driver.generate("r", after)
    driver.preempt("r")
    # Others take the slot and the blocks meanwhile.
    driver.generate("other", 4)
    tokens = driver.generate("r", 12, chunk=6)
    assert tokens == generate_alone(make_driver, options)
    assert driver.runner.states.slot_of("r") != driver.runner.states.slot_of("other")


def test_resuming_in_the_same_slot_replaces_the_blocks(make_driver: MakeDriver) -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("r", PROMPT)
    driver.generate("r", 5)
    old_blocks = list(driver.blocks["r"])
    driver.preempt("r")
    driver.free_blocks = [block for block in driver.free_blocks if block not in old_blocks]
    driver.step({})  # nobody else runs: the preemption travels alone
    assert driver.generate("r", 12) == generate_alone(make_driver, {"temperature": 0})
    assert driver.runner.states.slot_of("r") == 0
    (block_table,) = driver.runner.block_tables.tables
    assert block_table.array[0, : block_table.num_blocks[0]].tolist() == driver.blocks["r"]
    assert not set(old_blocks) & set(driver.blocks["r"])


@pytest.mark.parametrize("options", SAMPLING)
def test_batched_equals_alone(make_driver: MakeDriver, options: dict[str, Any]) -> None:
    """A new request, a chunk in the middle of a prompt and a decoding request in the same steps, in changing orders."""
    driver = make_driver()
    driver.add("r", PROMPT, **options)
    driver.add("a", OTHER, temperature=1.0, seed=8)
    driver.add("b", PROMPT + OTHER, temperature=0)
    driver.step({"a": 7})
    driver.step({"r": 6, "a": 1})
    driver.step({"a": 1, "r": 7, "b": 9})
    driver.step({"b": 5, "r": 1})  # the prompt's last token: samples
    for i in range(11):
        step = {"b": 1, "r": 1} if i % 2 else {"r": 1, "a": 1, "b": 1}
        driver.step({r: min(n, driver.num_tokens(r) - driver.computed[r]) for r, n in step.items()})
    assert driver.outputs["r"] == generate_alone(make_driver, options)


def test_samples_only_where_the_known_tokens_end(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.add("a", OTHER)
    output = driver.step({"r": 13, "a": 7})
    assert output.req_ids == ["r", "a"]
    assert output.req_id_to_index == {"r": 0, "a": 1}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]
    assert driver.model.num_logits_rows == 1
    output = driver.step({"a": 1, "r": 1})
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 1]
    assert driver.model.num_logits_rows == 3


def test_a_step_in_which_nobody_samples_computes_no_logits(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    assert driver.step({"r": 4}).sampled_token_ids == [[]]
    assert driver.model.num_logits_rows == 0


def test_the_worker_keeps_sampled_tokens_itself(make_driver: MakeDriver) -> None:
    """Two steps in a row planned before the first one's token is known to the scheduler's side."""
    driver = make_driver()
    driver.add("r", PROMPT)
    expected = generate_alone(make_driver, {"temperature": 0})
    first = driver.plan({"r": 14})
    driver.blocks["r"].append(driver.free_blocks.pop())
    second = SchedulerOutput(
        step_id=2,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["r"], new_block_ids=[([driver.blocks["r"][-1]],)], num_computed_tokens=[14], num_output_tokens=[1]
        ),
        num_scheduled_tokens={"r": 1},
        total_num_scheduled_tokens=1,
    )
    tokens = []
    for out in (first, second):
        driver.runner.execute_model(out)
        tokens += driver.sample().sampled_token_ids[0]
    assert tokens == expected[:2]


def test_independent_steps_are_sampled_in_the_order_of_execution(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.add("a", OTHER)
    driver.runner.execute_model(driver.plan({"r": 14}))
    driver.runner.execute_model(driver.plan({"a": 7}))
    assert driver.sample().req_ids == ["r"]
    assert driver.sample().req_ids == ["a"]
    with pytest.raises(RuntimeError, match="no executed step"):
        driver.sample()


def test_a_token_sampled_late_does_not_land_in_a_slot_that_changed_hands(make_driver: MakeDriver) -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("r", PROMPT)
    driver.add("a", OTHER)
    driver.runner.execute_model(driver.plan({"r": 14}))
    driver.finish("r")
    driver.runner.execute_model(driver.plan({"a": 7}))
    assert len(driver.sample().sampled_token_ids[0]) == 1
    states = driver.runner.states
    assert states.num_known_tokens[0] == len(OTHER)
    assert len(driver.sample().sampled_token_ids[0]) == 1
    assert states.num_known_tokens[0] == len(OTHER) + 1


# ------------------------------------------------------------------ clean-up, slots
def test_cleanup_only_step_frees_slots_without_a_forward(make_driver: MakeDriver) -> None:
    driver = make_driver()
    for i in range(3):
        driver.add(f"r{i}", PROMPT)
    driver.step({f"r{i}": 14 for i in range(3)})
    assert driver.runner.states.num_free_slots == 0
    num_forwards = driver.model.num_forwards
    for i in range(3):
        driver.finish(f"r{i}")
    output = driver.step({})
    assert (output.req_ids, output.sampled_token_ids, output.logprobs) == ([], [], {})
    assert output.timing is not None
    assert driver.model.num_forwards == num_forwards
    assert driver.runner.states.num_free_slots == 3
    assert driver.runner.states.num_requests == 0


def test_slots_go_from_the_finished_to_the_new_in_one_step(make_driver: MakeDriver) -> None:
    driver = make_driver(max_num_seqs=1)
    expected = generate_alone(make_driver, {"temperature": 0})
    for i in range(4):
        driver.add(f"r{i}", PROMPT)
        driver.step({f"r{i}": 14})
        assert driver.outputs[f"r{i}"] == expected[:1]
        driver.finish(f"r{i}")
    driver.step({})
    assert driver.runner.states.num_free_slots == 1


def test_a_preempted_request_may_finish_and_unknown_ids_are_ignored(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.step({"r": 14})
    driver.preempt("r")
    driver.step({})
    assert driver.runner.states.num_free_slots == 3
    assert driver.runner.states.num_requests == 1
    driver.finish("r")
    driver.finished.add("never seen")
    driver.step({})
    assert driver.runner.states.num_requests == 0
    assert driver.runner.states.num_free_slots == 3


def test_an_id_can_be_used_again_once_it_is_finished(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", OTHER)
    driver.generate("r", 3)
    driver.finish("r")
    driver.known_to_worker.discard("r")
    driver.add("r", PROMPT)
    assert driver.generate("r", 12) == generate_alone(make_driver, {"temperature": 0})


def test_more_requests_than_slots_is_an_error_with_the_number(make_driver: MakeDriver) -> None:
    driver = make_driver(max_num_seqs=1)
    driver.add("r", PROMPT)
    driver.add("a", OTHER)
    with pytest.raises(RuntimeError, match=r"'a' got no slot: all 1 \(max_num_seqs\)"):
        driver.step({"r": 14, "a": 7})


# ------------------------------------------------------------------ blocks, logprobs, grammar, errors
def test_new_blocks_are_zeroed_before_the_forward(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT[:2])
    out = driver.plan({"r": 2})
    block = driver.blocks["r"][0]
    zeroing = SchedulerOutput(
        step_id=1,
        scheduled_new_reqs=out.scheduled_new_reqs,
        scheduled_cached_reqs=out.scheduled_cached_reqs,
        num_scheduled_tokens=out.num_scheduled_tokens,
        total_num_scheduled_tokens=2,
        new_block_ids_to_zero=[block],
    )
    driver.runner.execute_model(zeroing)
    for kv_cache in driver.runner._kv_caches:
        if kv_cache.shape[0] != 2:  # the Triton backend's layout has the blocks first
            kv_cache = kv_cache.transpose(0, 1)
        assert kv_cache[:, block, :2].abs().min() > 0  # the forward's own tokens came after
        assert not kv_cache[:, block, 2:].any()
        assert torch.isnan(kv_cache[:, block - 1]).all()


def test_logprobs_only_for_those_who_asked(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT, logprobs=2)
    driver.add("a", OTHER)
    output = driver.step({"a": 7, "r": 14})
    assert list(output.logprobs) == ["r"]
    (entry,) = output.logprobs["r"]
    assert next(iter(entry)) == output.sampled_token_ids[1][0]
    assert len(entry) == 2  # greedy: the sampled token is the most likely one


def test_bitmask_reaches_its_request(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.add("a", OTHER)
    allowed = np.zeros(64, dtype=np.uint8)
    allowed[50] = 1
    driver.runner.execute_model(driver.plan({"r": 3, "a": 7}))
    output = driver.sample(GrammarOutput({"a": np.packbits(allowed, bitorder="little").tobytes()}))
    assert output.sampled_token_ids == [[], [50]]


def test_min_tokens_counts_over_a_preemption(make_driver: MakeDriver) -> None:
    driver = make_driver()
    tokens = generate_alone(make_driver, {"temperature": 0})
    blocked = tokens[4]
    driver.add("r", PROMPT, min_tokens=12, stop_token_ids=(blocked,))
    driver.generate("r", 2)
    driver.preempt("r")
    driver.step({})
    assert blocked not in driver.generate("r", 12)


def test_timing_is_in_order(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    timing = driver.step({"r": 14}).timing
    assert timing.execute_start < timing.execute_end <= timing.sample_start < timing.sample_end


def test_a_token_that_is_not_known_is_never_fed_to_the_model(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    with pytest.raises(RuntimeError, match="up to position 15, but 14 tokens are known"):
        driver.step({"r": 15})


def test_a_position_without_a_block_is_never_written(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.blocks["r"] = [1]
    driver.free_blocks = [1, 1, 1]
    out = driver.plan({"r": 14})
    out.scheduled_new_reqs[0].block_ids[0].pop()
    with pytest.raises(RuntimeError, match="up to position 14, but 14 tokens are known and its blocks hold 12"):
        driver.runner.execute_model(out)


def test_a_count_that_the_worker_cannot_meet_is_an_error(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("r", PROMPT)
    driver.step({"r": 14})
    out = driver.plan({"r": 1})
    out.scheduled_cached_reqs.num_output_tokens[0] = 5
    with pytest.raises(RuntimeError, match="the scheduler counts 19 tokens, the worker holds 15"):
        driver.runner.execute_model(out)


@pytest.mark.parametrize(
    "config", [{}, {"max_num_seqs": 1}, {"block_size": 1}, {"max_model_len": 2}, {"max_num_batched_tokens": 3}], ids=str
)
def test_warming_up_leaves_no_trace(make_driver: MakeDriver, config: dict[str, Any]) -> None:
    driver = make_driver(**config)
    driver.runner.warm_up()
    assert driver.runner.states.num_requests == 0
    assert driver.runner.states.num_free_slots == driver.runner.states.max_num_reqs
    if "max_model_len" not in config:
        driver.add("r", PROMPT)
        assert driver.generate("r", 12, chunk=3) == generate_alone(make_driver, {"temperature": 0})


@pytest.mark.parametrize("pipeline", ["device", "graphs"], indirect=True)
def test_on_a_device_decodes_come_first_in_the_batch(make_driver: MakeDriver) -> None:
    """They are attended for in a launch of their own. Whom a row belongs to, the output says."""
    driver = make_driver(max_num_seqs=4)
    for i, req_id in enumerate("abcd"):
        driver.add(req_id, range(1 + i, 12 + i))
    driver.step({"b": 11, "d": 11})
    output = driver.step({"a": 5, "b": 1, "c": 11, "d": 1})
    assert output.req_ids == ["b", "d", "a", "c"]
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 1, 0, 1]
    alone = make_driver(max_num_seqs=4)
    for i, req_id in enumerate("abcd"):
        alone.add(req_id, range(1 + i, 12 + i))
    assert alone.generate("d", 2) == driver.outputs["d"]
    assert alone.generate("c", 1) == driver.outputs["c"]
