"""How many KV blocks a GPU holds, by arithmetic on readings that a GPU would give."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.attention.base import AttentionConfig
from aioengine.attention.triton_paged import TritonPagedBackend
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.resolved_config import GIB, CacheConfig, SchedulerConfig
from aioengine.worker.block_table import BlockTables
from aioengine.worker.input_batch import StepPlan
from aioengine.worker.largest_step import largest_step, run_largest_sampling, run_largest_step
from aioengine.worker.memory_profile import (
    MemoryProfile,
    Reservation,
    kv_cache_bytes,
    reserve,
)
from aioengine.worker.pipeline import device as device_pipeline
from aioengine.worker.pipeline.device import DevicePipeline, pipeline_bytes
from aioengine.worker.pipeline.transfers import HostTransfers
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample import device_sampler
from aioengine_kernels.flash_decoding import DecodeSplit, max_num_segments

# Weights of 16 GiB, 2 more at the peak; the allocator kept 19; context and libraries take 1.
PROFILE = MemoryProfile(total=140 * GIB, free=120 * GIB, allocator_before=16 * GIB, allocator_peak=18 * GIB, allocator_reserved=19 * GIB)
NOTHING = Reservation()


def test_what_is_left_of_the_share_at_the_peak() -> None:
    assert kv_cache_bytes(PROFILE, utilization=0.9, reserved=NOTHING) == int(0.9 * 140 * GIB) - 18 * GIB - 1 * GIB


def test_what_is_allocated_behind_the_cache_counts() -> None:
    """Tables, what the driver keeps for graphs, and a pool for a quarter of the largest step's activations."""
    reserved = Reservation(tables=3 * GIB, graphs=1 * GIB, activation_share=0.25)
    left = kv_cache_bytes(PROFILE, utilization=0.9, reserved=NOTHING)
    assert left - kv_cache_bytes(PROFILE, utilization=0.9, reserved=reserved) == 4 * GIB + GIB // 2


def test_graphs_are_reserved_for_if_they_will_be_captured() -> None:
    scheduler = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096)
    assert reserve(scheduler, tables=5, has_graphs=False) == Reservation(tables=5)
    reserved = reserve(scheduler, tables=5, has_graphs=True)
    assert (reserved.tables, reserved.activation_share) == (5, 256 / 2048)
    assert reserved.graphs == 35 * (12 << 20), "35 sizes"


def test_other_processes_count() -> None:
    busy = replace(PROFILE, free=PROFILE.free - 50 * GIB)
    assert kv_cache_bytes(PROFILE, utilization=0.9, reserved=NOTHING) - kv_cache_bytes(busy, utilization=0.9, reserved=NOTHING) == 50 * GIB


def test_a_share_below_the_peak_leaves_nothing() -> None:
    assert kv_cache_bytes(PROFILE, utilization=0.1, reserved=NOTHING) == 0


@given(peak=st.integers(0, 140), slack=st.integers(0, 20), outside=st.integers(0, 20), utilization=st.floats(0.01, 1.0))
def test_the_peak_of_a_step_stays_within_the_share(peak: int, slack: int, outside: int, utilization: float) -> None:
    profile = MemoryProfile(
        total=200 * GIB,
        free=(200 - peak - slack - outside) * GIB,
        allocator_before=0,
        allocator_peak=peak * GIB,
        allocator_reserved=(peak + slack) * GIB,
    )
    num_bytes = kv_cache_bytes(profile, utilization=utilization, reserved=NOTHING)
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


@pytest.mark.parametrize(
    ("num_slots", "max_model_len", "vocab_size", "num_groups"),
    [(1, 64, 300, 1), (64, 4096, 49152, 1), (64, 4096, 49152, 6), (7, 100, 151936, 2)],
)
def test_the_memory_of_the_tables_is_what_they_take(num_slots: int, max_model_len: int, vocab_size: int, num_groups: int) -> None:
    taken: list[int] = []

    class Counting(HostTransfers):
        """Host memory has a twin on the device."""

        def allocate_host(self, num_bytes: int) -> torch.Tensor:
            taken.append(num_bytes)
            return super().allocate_host(num_bytes)

    scheduler = SchedulerConfig(max_num_seqs=num_slots, max_num_batched_tokens=512, max_model_len=max_model_len)
    states = RequestStates(max_num_reqs=num_slots, max_model_len=max_model_len, vocab_size=vocab_size, eos_token_ids=frozenset())
    groups = tuple(KVCacheGroup((i,), 8 if i else None) for i in range(num_groups))
    tables = BlockTables(groups, max_num_reqs=num_slots, max_model_len=max_model_len, block_size=16)
    pipeline = DevicePipeline(
        states=states, block_tables=tables, transfers=Counting(), max_num_tokens=512, vocab_size=vocab_size, num_kv_heads=2
    )
    holders = [pipeline._tables, pipeline._inputs]
    tensors = [getattr(holder, field.name) for holder in holders for field in fields(holder)]  # type: ignore[arg-type]
    tensors.append(pipeline._one_token_each)
    actual = sum(tensor.nbytes for tensor in tensors) + sum(taken)
    counted = pipeline_bytes(scheduler, CacheConfig(block_size=16, kv_cache_groups=groups), vocab_size=vocab_size)
    assert actual <= counted <= actual + 16 * num_slots + 64 * num_groups


def test_the_largest_step_samples_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("_mask_forbidden", "apply_masks", "apply_bias", "apply_penalties", "top_k_top_p", "draw_tokens", "_rank"):
        original = getattr(device_sampler, name)

        def noted(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            used.append(name)
            return original(*args, **options)

        monkeypatch.setattr(device_sampler, name, noted)
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=32)
    run_largest_sampling(torch.randn(3, 61), scheduler=scheduler, vocab_size=61, logprobs_mode="raw_logprobs")
    assert used == ["_mask_forbidden", "apply_masks", "apply_bias", "apply_penalties", "top_k_top_p", "draw_tokens", "_rank"]


def test_the_largest_step_runs_the_model_and_scores_every_token(tiny_model_class: Any) -> None:
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, kv_cache_dtype=torch.float32)
    backend = TritonPagedBackend(config)
    model = tiny_model_class(backend)
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=32)
    cache = CacheConfig(block_size=4, kv_cache_groups=(KVCacheGroup((0, 1)),))
    run_largest_step(model, backend=backend, scheduler=scheduler, cache=cache, vocab_size=61, device=torch.device("cpu"))
    assert model.num_forwards == 1
    assert model.num_logits_rows == 16 + 3


@given(
    num_scheduled=st.lists(st.sampled_from([1, 1, 1, 5, 40]), min_size=1, max_size=40),
    num_kv_heads=st.integers(1, 16),
    max_visible=st.sampled_from([100, 4096, 200_000]),
    data=st.data(),
)
def test_a_step_of_decodes_and_chunks_is_cut_by_its_decodes(
    num_scheduled: list[int], num_kv_heads: int, max_visible: int, data: st.DataObject
) -> None:
    num_scheduled = sorted(num_scheduled, key=lambda count: count != 1)
    seq_lens = np.array([data.draw(st.integers(count, 150_000)) for count in num_scheduled], dtype=np.int32)
    empty = np.zeros(0, dtype=np.int64)
    plan = StepPlan([], empty, np.array(num_scheduled, dtype=np.int32), seq_lens, seq_lens, seq_lens, empty, empty)
    cut = device_pipeline.cut_decodes(plan, num_kv_heads=num_kv_heads, max_visible=max_visible)
    assert cut.num_decodes == num_scheduled.count(1)
    lengths = np.minimum(seq_lens[: cut.num_decodes], max_visible).tolist()
    expected = DecodeSplit.of_lengths(lengths, num_kv_heads=num_kv_heads, device=torch.device("cpu"))
    assert cut.kv_start_loc[: cut.num_decodes + 1].tolist() == expected.kv_start_loc.tolist()
    assert (cut.segment_len, cut.num_segments, cut.is_split) == (int(expected.segment_len), expected.num_segments, expected.is_split)
    bound = max_num_segments(num_reqs=cut.num_decodes, num_kv_heads=num_kv_heads)
    assert cut.num_segments <= bound, "a captured graph's grid holds every step"
