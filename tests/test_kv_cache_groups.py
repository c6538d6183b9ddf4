"""How layers fall into groups of equal size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.events.wire import WireHeader, decode_header, encode_header
from aioengine.kv_cache_groups import KVCacheGroup, group_layers, num_layer_caches
from aioengine.replay.recording import read_cache_config
from aioengine.resolved_config import ResolvedConfig
from aioengine.testing import make_model_info


def test_layers_that_are_alike_are_one_group() -> None:
    assert group_layers([None] * 4) == (KVCacheGroup((0, 1, 2, 3)),)
    assert group_layers([64] * 3) == (KVCacheGroup((0, 1, 2), 64),)


def test_gemma_3_270m_has_one_full_group_and_five_windowed_ones_of_three_layers() -> None:
    groups = group_layers([None if layer % 6 == 5 else 512 for layer in range(18)])
    assert groups[0] == KVCacheGroup((5, 11, 17))
    assert [len(group.layers) for group in groups] == [3] * 6
    assert num_layer_caches(groups) == 3


@given(st.lists(st.sampled_from([None, 16, 64, 512]), min_size=1, max_size=40))
def test_each_layer_is_in_one_group_with_its_own_window(windows: list[int | None]) -> None:
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.sliding_window for group in groups for layer in group.layers)
    size = num_layer_caches(groups)
    for window in set(windows):
        sizes = [len(group.layers) for group in groups if group.sliding_window == window]
        assert sizes[:-1] == [size] * (len(sizes) - 1), "only the last group of a kind may have fewer layers"


def resolve(**facts: Any) -> ResolvedConfig:
    model = dataclasses.replace(make_model_info(), **facts)
    return EngineConfig(model="fake").resolve(model, cuda_available=False, free_memory_bytes=1 << 30)


def test_the_groups_follow_from_the_windows_of_the_model() -> None:
    assert resolve(num_layers=3, layer_windows=()).cache.kv_cache_groups == (KVCacheGroup((0, 1, 2)),)
    assert resolve(num_layers=2, layer_windows=(), sliding_window=64).cache.kv_cache_groups == (KVCacheGroup((0, 1), 64),)
    mixed = resolve(num_layers=3, layer_windows=(64, None, 64)).cache.kv_cache_groups
    assert mixed == (KVCacheGroup((1,)), KVCacheGroup((0,), 64), KVCacheGroup((2,), 64))


def test_a_recording_tells_the_groups_and_an_old_one_had_one_for_all_layers() -> None:
    config = resolve(num_layers=3, layer_windows=(64, None, 64))
    header = decode_header(encode_header(WireHeader.create("fake", config)))
    assert read_cache_config(header).kv_cache_groups == config.cache.kv_cache_groups

    del header.config["cache"]["kv_cache_groups"]
    assert read_cache_config(header).kv_cache_groups == (KVCacheGroup((0, 1, 2)),)

    header.config["cache"]["kv_cache_groups"] = [{"layers": 5}]
    with pytest.raises(ConfigError, match="kv_cache_groups are not layers and a window"):
        read_cache_config(header)
