"""What a request holds in each KV-cache group, which prefixes serve all groups, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.config import EngineConfig
from aioengine.core.block_hash import in_group
from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import ConfigError, InvalidRequestError
from aioengine.kv_cache_groups import KVCacheGroup, group_layers, longest_request, num_blocks_of_request
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.testing import make_model_info, make_request

GEMMA = tuple(None if layer % 6 == 5 else 512 for layer in range(18))
FULL_AND_WINDOW = (KVCacheGroup((0,)), KVCacheGroup((1,), 8))


def make(groups: tuple[KVCacheGroup, ...], *, num_blocks: int, block_size: int = 4, **options: Any) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **options}
    return Scheduler(
        SchedulerConfig(**settings),
        cache=CacheConfig(block_size=block_size, prefix_caching_seed="test", kv_cache_groups=groups),
        num_kv_cache_blocks=num_blocks + 1,
        check_invariants=True,
    )


def step(scheduler: Scheduler, token: int = 7) -> SchedulerOutput:
    """Schedule a step and answer it: every request that has all its tokens computed then gets one more."""
    out = scheduler.schedule()
    assert out is not None
    ids = list(out.num_scheduled_tokens)
    sampled = [[token] if (r := scheduler.requests[i]).num_computed_tokens >= r.num_tokens else [] for i in ids]
    scheduler.update_from_output(out, ModelRunnerOutput(ids, {req_id: index for index, req_id in enumerate(ids)}, sampled))
    return out


def run_until(scheduler: Scheduler, request: Request, num_tokens: int) -> int:
    """Returns the most blocks that were in use after a step."""
    most = 0
    while request.num_tokens < num_tokens:
        step(scheduler)
        most = max(most, scheduler.make_stats().num_used_blocks)
    return most


# ---------------------------------------------------------------------------------------------------- what is held
def test_a_window_moves_on_and_leaves_blocks_behind() -> None:
    scheduler = make(FULL_AND_WINDOW, num_blocks=30)
    request = make_request(9, max_tokens=20)
    scheduler.add_request(request)
    assert scheduler.schedule() is not None
    # The next token is at position 9 and sees 2 to 9; block 0 holds 0 to 3.
    assert request.block_ids == ([1, 2, 3], [4, 5, 6])
    scheduler.finish_requests([request.request_id], request.status.FINISHED_ABORTED)

    request = make_request(11, max_tokens=20)
    scheduler.add_request(request)
    out = scheduler.schedule()
    assert out is not None
    told = out.scheduled_new_reqs[0].block_ids
    assert all(told[0] + told[1]), "the step that is planned sees all of its own tokens"
    assert request.block_ids == (told[0], [0, *told[1][1:]]), "the next one, at position 11, sees 4 to 11"


def test_what_is_left_behind_can_be_taken_in_the_next_step() -> None:
    scheduler = make((KVCacheGroup((0,), 4),), num_blocks=5, max_num_batched_tokens=8)
    long, short = make_request(24, max_tokens=2), make_request(4, max_tokens=1)
    scheduler.add_request(long)
    scheduler.add_request(short)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert first.scheduled_new_reqs[0].block_ids == ([1, 2],)
    assert second.scheduled_cached_reqs.new_block_ids == [([3, 4],)]
    third = scheduler.schedule()
    assert third is not None
    ((taken,),) = (added for added in third.scheduled_cached_reqs.new_block_ids if added is not None)
    assert set(taken) <= {1, 2, 5}, "the step before has left blocks 1 and 2 behind"


@pytest.mark.parametrize(("num_tokens", "held"), [(4096, 257 + 5 * 33), (8192, 513 + 5 * 33)])
def test_gemma_3_270m_holds_about_a_fifth_of_what_one_group_would(num_tokens: int, held: int) -> None:
    groups = group_layers(GEMMA)
    scheduler = make(groups, num_blocks=4000, block_size=16, max_num_batched_tokens=512, max_model_len=9000)
    request = make_request(num_tokens, max_tokens=100)
    scheduler.add_request(request)
    peak = run_until(scheduler, request, num_tokens + 2)
    assert scheduler.make_stats().num_used_blocks == held
    assert peak <= num_blocks_of_request(groups, num_tokens + 2, block_size=16, max_step_tokens=512)
    one_group = 6 * -(-(num_tokens + 1) // 16)  # a block of all 18 layers is as large as six of 3
    assert held / one_group < (0.28 if num_tokens == 4096 else 0.23)


def test_a_model_whose_layers_all_have_a_window_holds_the_window_whatever_the_length() -> None:
    scheduler = make((KVCacheGroup((0, 1), 32),), num_blocks=24, max_num_batched_tokens=32, max_model_len=4000)
    assert scheduler.max_tokens_limit(10) == 3990, "24 blocks of 4 hold a window of 32 and a step of 32, and so any length"
    request = make_request(600, max_tokens=400)
    scheduler.add_request(request)
    assert run_until(scheduler, request, 700) <= 17
    assert scheduler.make_stats().num_used_blocks == 8, "position 699 sees 668 to 699"
    assert scheduler.totals.num_preemptions == 0


@given(
    windows=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    chunk=st.integers(1, 40),
    num_tokens=st.integers(1, 80),
)
@settings(max_examples=60, deadline=None)
def test_no_way_of_chunking_takes_more_than_the_most(windows: list[int | None], block_size: int, chunk: int, num_tokens: int) -> None:
    groups = tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))
    most = num_blocks_of_request(groups, num_tokens, block_size=block_size, max_step_tokens=chunk)
    by_chunks = []
    for offset in range(chunk):  # a first step of any length, whole ones after it
        start, end = 0, min(offset + 1, num_tokens)
        while start < num_tokens:
            seen = [{p // block_size for p in range(end) if window is None or p > start - window} for window in windows]
            by_chunks.append(sum(map(len, seen)))
            start, end = end, min(end + chunk, num_tokens)
    assert max(by_chunks) <= most
    assert longest_request(groups, most, block_size=block_size, max_step_tokens=chunk, limit=num_tokens) == num_tokens
    assert longest_request(groups, most - 1, block_size=block_size, max_step_tokens=chunk, limit=num_tokens) < num_tokens


# ---------------------------------------------------------------------------------------------------- the prefix cache
@given(
    windows=st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=6),
    block_size=st.integers(1, 3),
    cached=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=6, max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_a_hit_is_the_longest_prefix_that_serves_every_group(windows: list[int | None], block_size: int, cached: list[list[int]]) -> None:
    windows = sorted(windows, key=lambda window: window or 0)
    groups = tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))
    kv = KVCacheManager(CacheConfig(block_size=block_size, kv_cache_groups=groups), num_kv_cache_blocks=100, max_num_batched_tokens=64)
    request = Request("a", [1] * (12 * block_size + 1), sampling_params=make_request(1, max_tokens=1).sampling_params)
    kv.extend_hashes(request.block_hashes, request.all_token_ids, 12, cache_salt=None)
    held: dict[tuple[int, int], int] = {}
    for group_id in range(len(groups)):
        for index in range(12):
            if cached[group_id][index]:  # three of four
                (held[group_id, index],) = kv.block_pool.allocate(1)
                kv.block_pool.register(held[group_id, index], in_group(request.block_hashes[index], group_id))

    def needed(group: KVCacheGroup, length: int) -> set[int]:
        first = 0 if group.sliding_window is None else length * block_size - group.sliding_window + 1
        return {position // block_size for position in range(max(0, first), length * block_size)}

    serves = [
        length
        for length in range(13)
        if all((group_id, index) in held for group_id, group in enumerate(groups) for index in needed(group, length))
    ]
    tables = kv.get_computed_blocks(request)
    assert {len(table) for table in tables} == {max(serves)}
    for group_id, (group, table) in enumerate(zip(groups, tables, strict=True)):
        expected = [held[group_id, index] if index in needed(group, len(table)) else 0 for index in range(len(table))]
        assert table == expected


def test_who_comes_back_takes_only_what_its_window_sees() -> None:
    scheduler = make(FULL_AND_WINDOW, num_blocks=40)
    first = make_request(range(30), max_tokens=1)
    scheduler.add_request(first)
    step(scheduler)
    assert first.is_finished
    second = make_request(range(31), max_tokens=4)
    scheduler.add_request(second)
    out = step(scheduler)
    full, windowed = out.scheduled_new_reqs[0].block_ids
    assert out.scheduled_new_reqs[0].num_computed_tokens == 28
    assert len(full) == len(windowed) == 8
    assert all(full)
    assert [index for index, block_id in enumerate(windowed) if block_id] == [5, 6, 7], "position 28 sees 21 to 28"


def test_what_a_failed_request_computed_is_found_in_no_group() -> None:
    scheduler = make(FULL_AND_WINDOW, num_blocks=40)
    request = make_request(range(30), max_tokens=4)
    scheduler.add_request(request)
    out = scheduler.schedule()
    assert out is not None
    assert scheduler.make_stats().num_cached_blocks == 14
    ids = [request.request_id]
    scheduler.update_from_output(out, ModelRunnerOutput(ids, {ids[0]: 0}, [[]], failed_req_ids={ids[0]: "NaN"}))
    assert scheduler.make_stats().num_cached_blocks == 0


# ---------------------------------------------------------------------------------------------------- what does not fit
def test_a_pool_without_a_block_for_each_group_is_refused_in_a_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^the KV cache has 5 blocks, but the first token of a request takes 6: one for each KV-cache group$"
    ):
        make(group_layers(GEMMA), num_blocks=5)


def test_a_request_that_does_not_fit_is_refused_with_the_groups_counted() -> None:
    scheduler = make(FULL_AND_WINDOW, num_blocks=20, max_num_batched_tokens=8)
    assert scheduler.max_tokens_limit(10) == 15 * 4 + 1 - 10, "15 blocks of the full group, and the 5 that the other holds at most"
    with pytest.raises(
        InvalidRequestError,
        match=r"needs 22 KV blocks \(60 prompt tokens and up to 8 more, 4 a block, in 2 KV-cache groups\), but the cache has 20",
    ):
        scheduler.add_request(make_request(60, max_tokens=8))
    fits = make_request(56, max_tokens=5)
    scheduler.add_request(fits)
    assert run_until(scheduler, fits, 60) <= 20
    assert scheduler.totals.num_preemptions == 0


def test_the_length_that_follows_from_the_cache_counts_the_groups() -> None:
    config = EngineConfig(model="fake", block_size=16, max_num_batched_tokens=512).resolve(
        make_model_info(layer_windows=GEMMA, max_position_embeddings=32768), cuda_available=False, free_memory_bytes=1 << 30
    )
    # Five groups hold 65 blocks at most: a window of 512 and a step of 512.
    assert config.fitted(1 + 100 + 5 * 65).scheduler.max_model_len == 1600
    assert config.fitted(1 + 6 * 10).scheduler.max_model_len == 160, "windows that are longer than all there is"
