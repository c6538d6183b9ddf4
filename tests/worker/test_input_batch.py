"""The vectorised batch against one that is built token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.sampling_params import SamplingParams
from aioengine.worker.block_table import BlockTables
from aioengine.worker.device import CpuDevice
from aioengine.worker.input_batch import InputBatch, build_input_batch
from aioengine.worker.request_state import RequestStates

MAX_MODEL_LEN = 40
PARAMS = SamplingParams(temperature=0, seed=0)

GROUPS = (KVCacheGroup((0,)), KVCacheGroup((1,), 8))
OTHER_GROUP = 1000


@dataclass
class Plan:
    """What a step wants of one request."""

    tokens: list[int]  # known ones
    start: int
    num_scheduled: int
    blocks: list[int]  # of the first KV-cache group; the second one's ids are larger by OTHER_GROUP
    draft_token_ids: list[int] = field(default_factory=list)  # after the known ones; then the step starts at the last known one

    @property
    def end(self) -> int:
        return self.start + self.num_scheduled


def build(plans: dict[str, Plan], *, block_size: int, slots_in_use_before: int = 0) -> tuple[InputBatch, RequestStates]:
    states = RequestStates(max_num_reqs=8, max_model_len=MAX_MODEL_LEN, vocab_size=1000, eos_token_ids=frozenset())
    block_tables = BlockTables(GROUPS, max_num_reqs=8, max_model_len=MAX_MODEL_LEN, block_size=block_size)
    for i in range(slots_in_use_before):
        states.add(f"before{i}", [999] * MAX_MODEL_LEN, PARAMS)
    for req_id, plan in plans.items():
        slot = states.add(req_id, plan.tokens, PARAMS)
        states.num_computed_tokens[slot] = plan.start
        block_tables.replace_rows(slot, [plan.blocks, [block + OTHER_GROUP for block in plan.blocks]])
    out = SchedulerOutput(
        step_id=1,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens={req_id: plan.num_scheduled for req_id, plan in plans.items()},
        total_num_scheduled_tokens=sum(plan.num_scheduled for plan in plans.values()),
        scheduled_spec_decode_tokens={req_id: plan.draft_token_ids for req_id, plan in plans.items() if plan.draft_token_ids},
    )
    for req_id, draft_token_ids in out.scheduled_spec_decode_tokens.items():
        states.write_draft_tokens(req_id, draft_token_ids)
    return build_input_batch(out, states=states, block_tables=block_tables, device=CpuDevice(num_threads=None)), states


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, Plan], int]:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    ids = iter(draw(st.permutations(range(1, 400))))
    result: dict[str, Plan] = {}
    for i in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=MAX_MODEL_LEN))
        start = draw(st.integers(0, len(tokens) - 1))
        num_scheduled = draw(st.integers(1, len(tokens) - start))
        draft_token_ids = (
            draw(st.lists(st.integers(0, 999), max_size=min(3, MAX_MODEL_LEN - len(tokens)))) if start == len(tokens) - 1 else []
        )
        num_scheduled += len(draft_token_ids)
        num_blocks = -(-(start + num_scheduled) // block_size)
        result[f"r{i}"] = Plan(tokens, start, num_scheduled, [next(ids) for _ in range(num_blocks)], draft_token_ids)
    return result, block_size


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 3))
def test_against_a_slow_oracle(case: tuple[dict[str, Plan], int], slots_in_use_before: int) -> None:
    requests, block_size = case
    batch, states = build(requests, block_size=block_size, slots_in_use_before=slots_in_use_before)
    expected: dict[str, list[Any]] = {"ids": [], "positions": [], "slots": [], "starts": [0], "logits": [], "sampled": [], "before": []}
    for i, plan in enumerate(requests.values()):
        for position in range(plan.start, plan.end):
            expected["ids"].append((plan.tokens + plan.draft_token_ids)[position])
            expected["positions"].append(position)
            expected["slots"].append(plan.blocks[position // block_size] * block_size + position % block_size)
            if position + 1 >= len(plan.tokens):
                expected["logits"].append(len(expected["ids"]) - 1)
                expected["sampled"].append(i)
                expected["before"].append(position + 1)
        expected["starts"].append(len(expected["ids"]))
    assert batch.req_ids == list(requests)
    assert batch.num_reqs == len(requests)
    assert batch.num_tokens == len(expected["ids"])
    assert batch.idx_mapping_np.tolist() == [states.slot_of(req_id) for req_id in requests]
    assert batch.input_ids.tolist() == expected["ids"]
    assert batch.positions.tolist() == expected["positions"]
    assert batch.groups[0].slot_mapping.tolist() == expected["slots"]
    assert batch.groups[1].slot_mapping.tolist() == [slot + OTHER_GROUP * block_size for slot in expected["slots"]]
    assert [group.sliding_window for group in batch.groups] == [None, 8]
    assert batch.query_start_loc.tolist() == batch.query_start_loc_np.tolist() == expected["starts"]
    assert batch.seq_lens.tolist() == batch.seq_lens_np.tolist() == [plan.end for plan in requests.values()]
    assert batch.logits_indices.tolist() == expected["logits"]
    assert batch.sampled_np.tolist() == expected["sampled"]
    assert batch.row_seq_lens_np.tolist() == expected["before"]
    assert [states.num_known_tokens[states.slot_of(r)] for r in requests] == [len(plan.tokens) for plan in requests.values()]
    assert batch.max_query_len == max(plan.num_scheduled for plan in requests.values())
    assert batch.max_seq_len == max(plan.end for plan in requests.values())
    for group, offset in zip(batch.groups, (0, OTHER_GROUP), strict=True):
        for row, plan in zip(group.block_table, requests.values(), strict=True):
            assert (row[: len(plan.blocks)] - offset).tolist() == plan.blocks


def test_the_example_of_the_docstring() -> None:
    requests = {
        "a": Plan(list(range(100, 102)), 0, 2, [5]),
        "b": Plan(list(range(200, 209)), 3, 5, [6, 2, 8]),
        "c": Plan(list(range(300, 304)), 1, 3, [7]),
    }
    batch, _ = build(requests, block_size=4)
    assert batch.query_start_loc.tolist() == [0, 2, 7, 10]
    assert batch.positions.tolist() == [0, 1, 3, 4, 5, 6, 7, 1, 2, 3]
    assert batch.input_ids.tolist() == [100, 101, 203, 204, 205, 206, 207, 301, 302, 303]
    assert batch.groups[0].slot_mapping.tolist() == [20, 21, 27, 8, 9, 10, 11, 29, 30, 31]
    assert batch.logits_indices.tolist() == [1, 9]  # b stops one short of its ninth token


def test_dtypes() -> None:
    batch, _ = build({"a": Plan([1, 2, 3], 0, 3, [1])}, block_size=4)
    for tensor in (batch.input_ids, batch.positions, batch.groups[0].slot_mapping, batch.logits_indices):
        assert tensor.dtype == torch.int64
    for tensor in (batch.query_start_loc, batch.seq_lens, batch.groups[0].block_table):
        assert tensor.dtype == torch.int32


def test_the_batch_does_not_change_with_the_tables() -> None:
    batch, states = build({"a": Plan([1, 2, 3], 0, 3, [1])}, block_size=4)
    states.token_ids[:] = 77
    states.num_computed_tokens[:] = 77
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert batch.seq_lens.tolist() == [3]


def test_a_request_without_a_slot_is_named() -> None:
    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=10, eos_token_ids=frozenset())
    out = SchedulerOutput(1, [], CachedRequestData(), {"ghost": 1}, 1)
    with pytest.raises(RuntimeError, match="'ghost' is scheduled but the worker holds no slot"):
        build_input_batch(
            out,
            states=states,
            block_tables=BlockTables(GROUPS, max_num_reqs=1, max_model_len=8, block_size=4),
            device=CpuDevice(num_threads=None),
        )


@pytest.mark.parametrize(
    ("num_scheduled", "num_blocks", "message"),
    [(4, 2, "up to position 4, but 3 tokens are known and its blocks hold 8"), (3, 0, "up to position 3, but 3 .* blocks hold 0")],
    ids=["a token that is not known", "a position without a block"],
)
def test_a_step_that_reaches_too_far_is_refused(num_scheduled: int, num_blocks: int, message: str) -> None:
    plans = {"fits": Plan([1, 2], 0, 2, [1]), "far": Plan([1, 2, 3], 0, num_scheduled, list(range(2, 2 + num_blocks)))}
    with pytest.raises(RuntimeError, match=f"'far' is scheduled {message}"):
        build(plans, block_size=4)


def test_append_sampled_feeds_the_next_step() -> None:
    _, states = build({"a": Plan([1, 2, 3], 0, 3, [1]), "b": Plan([4, 5], 0, 2, [2])}, block_size=4)
    states.append_sampled(["b", "a"], np.array([1, 0]), np.array([50, 60]))
    assert states.token_ids[0, :4].tolist() == [1, 2, 3, 60]
    assert states.token_ids[1, :3].tolist() == [4, 5, 50]
    assert states.num_known_tokens[:2].tolist() == [4, 3]
