"""How many KV blocks a GPU holds, by arithmetic on readings that a GPU would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.config import GIB, SchedulerConfig
from aioengine.worker.memory_profile import MemoryProfile, kv_cache_bytes, largest_step

# Weights of 16 GiB, 2 more at the peak; the allocator kept 19; context and libraries take 1.
PROFILE = MemoryProfile(total=140 * GIB, free=120 * GIB, allocator_peak=18 * GIB, allocator_reserved=19 * GIB)


def test_what_is_left_of_the_share_at_the_peak() -> None:
    assert kv_cache_bytes(PROFILE, utilization=0.9) == int(0.9 * 140 * GIB) - 18 * GIB - 1 * GIB


def test_other_processes_count() -> None:
    busy = replace(PROFILE, free=PROFILE.free - 50 * GIB)
    assert kv_cache_bytes(PROFILE, utilization=0.9) - kv_cache_bytes(busy, utilization=0.9) == 50 * GIB


def test_a_share_below_the_peak_leaves_nothing() -> None:
    assert kv_cache_bytes(PROFILE, utilization=0.1) == 0


@given(peak=st.integers(0, 140), slack=st.integers(0, 20), outside=st.integers(0, 20), utilization=st.floats(0.01, 1.0))
def test_the_peak_of_a_step_stays_within_the_share(peak: int, slack: int, outside: int, utilization: float) -> None:
    profile = MemoryProfile(
        total=200 * GIB,
        free=(200 - peak - slack - outside) * GIB,
        allocator_peak=peak * GIB,
        allocator_reserved=(peak + slack) * GIB,
    )
    num_bytes = kv_cache_bytes(profile, utilization=utilization)
    assert num_bytes >= 0
    if num_bytes:
        assert num_bytes + (peak + outside) * GIB <= utilization * 200 * GIB + 1


@pytest.mark.parametrize(
    ("budget", "max_model_len", "lengths"), [(2048, 8192, [2048]), (2048, 1000, [1000, 1000, 48]), (512, 256, [256, 256])]
)
def test_the_largest_step_uses_the_whole_budget(budget: int, max_model_len: int, lengths: list[int]) -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=max_model_len)
    batch = largest_step(scheduler, block_size=16, device=torch.device("cpu"))
    assert batch.seq_lens_np.tolist() == lengths
    assert batch.query_start_loc_np.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert batch.num_tokens == budget == len(batch.slot_mapping)
    assert batch.max_query_len == batch.max_seq_len == max(lengths)
    assert batch.block_table.shape == (len(lengths), -(-max(lengths) // 16))
    assert int(batch.slot_mapping.max()) < 16
