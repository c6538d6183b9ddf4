from __future__ import annotations

import pytest
import torch

from aioengine.errors import ConfigError
from aioengine.resolved_config import WorkerConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.block_table import BlockTable
from aioengine.worker.device import CpuDevice, create_device
from aioengine.worker.request_state import RequestStates

PARAMS = SamplingParams(temperature=0.5, seed=4)


def make_states(max_num_reqs: int = 2) -> RequestStates:
    return RequestStates(max_num_reqs=max_num_reqs, max_model_len=8, vocab_size=10, eos_token_ids=frozenset())


def test_slots_are_taken_from_the_lowest_and_reused() -> None:
    states = make_states(3)
    assert [states.add(r, [1], PARAMS) for r in "abc"] == [0, 1, 2]
    states.remove("b")
    assert states.slot_of("b") is None
    assert states.add("d", [1], PARAMS) == 1
    assert states.num_free_slots == 0


def test_a_preempted_request_keeps_its_parameters_only() -> None:
    states = make_states()
    slot = states.add("a", [1, 2, 3], PARAMS)
    states.preempt("a")
    states.preempt("a")
    assert states.num_free_slots == 2
    states.add("b", [9, 9, 9, 9, 9], SamplingParams(temperature=0, seed=0))
    assert states.slot_of("b") == slot
    resumed = states.resume("a", [1, 2, 3, 4])
    assert resumed != slot
    assert states.num_known_tokens[resumed] == 4
    assert states.num_prompt_tokens[resumed] == 3
    assert states.token_ids[resumed, :4].tolist() == [1, 2, 3, 4]
    assert states.sampling.temperature[resumed] == 0.5
    assert states.sampling.seeds[resumed] == 4


def test_table_and_tensor_are_the_same_memory() -> None:
    states = make_states()
    states.add("a", [1, 2, 3], PARAMS)
    assert states.token_ids_tensor[0, :3].tolist() == [1, 2, 3]
    block_table = BlockTable(max_num_reqs=2, max_model_len=10, block_size=4)
    block_table.replace_row(1, [7, 8])
    assert block_table.tensor.tolist() == [[0, 0, 0], [7, 8, 0]]


def test_block_rows_append_and_replace() -> None:
    block_table = BlockTable(max_num_reqs=2, max_model_len=16, block_size=4)
    block_table.replace_row(0, [3])
    block_table.append_row(0, [5, 6])
    block_table.append_row(0, [])
    assert block_table.array[0, : block_table.num_blocks[0]].tolist() == [3, 5, 6]
    block_table.replace_row(0, [9])
    assert block_table.array[0, : block_table.num_blocks[0]].tolist() == [9]
    assert block_table.num_blocks.tolist() == [1, 0]


def test_a_row_does_not_spill_into_the_next() -> None:
    block_table = BlockTable(max_num_reqs=2, max_model_len=8, block_size=4)
    with pytest.raises(AssertionError, match="3 blocks in a row of 2"):
        block_table.replace_row(0, [1, 2, 3])


def test_cpu_device() -> None:
    assert isinstance(create_device(WorkerConfig(device="cpu", dtype="float32")), CpuDevice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'device="cuda" was asked for, but PyTorch .* finds no CUDA device'):
        create_device(WorkerConfig(device="cuda", dtype="float32"))
