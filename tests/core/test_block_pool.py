from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aioengine.core.block_hash import HashMemo, hash_block, hash_blocks, root_hash, salt_bytes
from aioengine.core.block_pool import BlockPool, FreeBlockQueue
from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.core.request_queue import RequestQueue
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig
from aioengine.sampling_params import SamplingParams


def test_the_free_queue_gives_up_any_block_without_a_scan() -> None:
    queue = FreeBlockQueue(6)
    for block_id in range(6):
        queue.append(block_id)
    queue.remove(3)
    queue.remove(0)
    queue.prepend(3)
    assert list(queue) == [3, 1, 2, 4, 5]
    assert [queue.popleft() for _ in range(5)] == [3, 1, 2, 4, 5]
    assert queue.num_blocks == 0
    with pytest.raises(AssertionError, match="empty"):
        queue.popleft()
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(2)


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_total_blocks == pool.num_free_blocks == 4
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_cached_block_is_found_until_it_is_allocated_anew() -> None:
    pool = BlockPool(4)
    (first, second) = pool.allocate(2)
    pool.register(first, b"h1")
    pool.free([first, second])
    assert pool.find(b"h1") == first
    pool.touch([first])
    assert pool.ref_cnt[first] == 1
    assert first not in pool.free_block_queue
    pool.free([first])
    assert pool.allocate(3)[-1] == first, "what caches something is taken last"
    assert pool.find(b"h1") is None
    assert pool.take_changes().evicted == [first]


def test_equal_content_in_two_blocks_is_cached_once() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"h")
    pool.register(second, b"h")
    assert pool.find(b"h") == first
    assert pool.block_hash[second] is None
    pool.free([second, first])
    assert pool.num_cached_blocks == 1


def test_a_hash_depends_on_the_tokens_and_on_all_that_precede_them() -> None:
    root = root_hash("seed")
    first = hash_block(root, [1, 2])
    assert first == hash_block(root, [1, 2])
    assert first != hash_block(root, [2, 1])
    assert first != hash_block(root, [1, 2], extra=b"salt")
    assert hash_block(first, [3, 4]) != hash_block(root, [3, 4])


def test_every_pair_of_salt_and_adapter_has_bytes_of_its_own() -> None:
    names = (None, "", "a", "lora:a", "salt:a", "asalt:a", "\0\0\0\1a")
    pairs = [(salt, lora) for salt in names for lora in names]
    assert len({salt_bytes(salt, lora) for salt, lora in pairs}) == len(pairs)
    assert salt_bytes("a") == b"salt:a", "stores of before there were adapters keep their hashes"


def test_blocks_hashed_together_have_the_hashes_of_each_alone() -> None:
    root = root_hash("seed")
    first = hash_block(root, [1, 2], extra=b"salt")
    second = hash_block(first, [3, 2**40])
    assert hash_blocks(root, [1, 2, 3, 2**40, 5], block_size=2, extra=b"salt") == [first, second]
    assert hash_blocks(first, [3], block_size=2) == []


def test_the_root_is_random_in_each_process_unless_it_is_configured() -> None:
    code = "from aioengine.core.block_hash import root_hash; print(root_hash(None).hex(), root_hash('s').hex())"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.split() for _ in range(2)
    ]
    assert runs[0][0] != runs[1][0]
    assert runs[0][1] == runs[1][1]


def request(request_id: str, index: int, *, priority: int = 0, num_tokens: int = 4) -> Request:
    made = Request(request_id, list(range(num_tokens)), sampling_params=SamplingParams(max_tokens=4), priority=priority)
    made.arrival_index = index
    return made


def test_slots_that_do_not_fit_change_nothing() -> None:
    kv = KVCacheManager(CacheConfig(block_size=4), num_kv_cache_blocks=3, max_num_batched_tokens=64)
    big = request("a", 0, num_tokens=12)
    assert kv.allocate_slots(big, 12) is None
    assert (kv.block_pool.num_free_blocks, big.block_ids) == (2, ([],))
    assert kv.allocate_slots(big, 8) == ([1, 2],)
    kv.free(big)
    assert kv.block_pool.num_free_blocks == 2


def test_hits_on_free_blocks_count_against_the_free_blocks() -> None:
    kv = KVCacheManager(CacheConfig(block_size=4), num_kv_cache_blocks=4, max_num_batched_tokens=64)  # 3 usable
    first = request("a", 0, num_tokens=8)
    kv.allocate_slots(first, 8)
    kv.free(first)
    second = request("b", 1, num_tokens=16)
    hits = kv.get_computed_blocks(second)
    assert hits == ([1, 2],)
    assert kv.num_blocks_to_take(16, hits) > kv.block_pool.num_free_blocks >= kv.num_blocks_to_take(12, hits)
    assert kv.allocate_slots(second, 8, computed=hits) is None


@pytest.mark.parametrize(("policy", "order"), [("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"])])
def test_the_queue_admits_in_the_order_of_its_policy(policy: str, order: list[str]) -> None:
    queue = RequestQueue(policy)  # type: ignore[arg-type]
    requests = [request("b", 1, priority=3), request("c", 2, priority=0), request("a", 0, priority=3)]
    for item in requests:
        queue.add(item)
    assert [item.request_id for item in queue] == order
    assert queue.peek().request_id == order[0]
    assert [queue.pop().request_id for _ in range(3)] == order
    assert not queue


def test_removed_requests_leave_no_trace_in_the_queue() -> None:
    queue = RequestQueue("fcfs")
    requests = [request(f"r{i}", i) for i in range(200)]
    for item in requests:
        queue.add(item)
    for item in requests[1:]:
        queue.remove(item)
    assert len(queue) == 1
    assert len(queue._heap) < 40, "entries of removed requests are dropped"
    queue.remove(requests[0])
    queue.add(requests[0])
    assert queue.pop() is requests[0]


def test_a_name_that_is_used_again_stands_for_the_newcomer() -> None:
    queue = RequestQueue("fcfs")
    queue.add(first := request("a", 0))
    queue.remove(first)
    queue.add(second := request("a", 1))
    assert list(queue) == [second]
    assert queue.peek() is second
    assert queue.pop() is second
    assert not queue


def test_changes_tell_which_blocks_became_findable_and_still_are() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.register(first, b"aaaaaa1")
    pool.register(second, b"aaaaaa1")  # the same content: the first block stays the one
    changes = pool.take_changes()
    assert changes.cached == [first]
    assert changes.cached_hashes == [b"aaaaaa".hex()]
    pool.register(second, b"bbbbbb2")
    pool.free([second, first])
    pool.allocate(3)  # takes all, so what was registered above is gone again
    changes = pool.take_changes()
    assert changes.cached == []
    assert sorted(changes.evicted) == sorted([first, second])
    assert pool.take_changes().cached == []


def test_the_memo_gives_the_hashes_that_a_prompt_has_whatever_came_before() -> None:
    memo, root = HashMemo(2, max_blocks=40), root_hash("a")
    common = list(range(30))
    for prompt in (common, [*common, 7], [*common[:21], 99, *common[22:]], common[:19], [5, *common], [*common, *common], common):
        for parent, extra in ((root, b""), (root, b"salt"), (b"another", b"")):
            for _ in range(2):
                hashes = memo.hash_blocks(parent, prompt, extra=extra)
                assert hashes == hash_blocks(parent, prompt, block_size=2, extra=extra)
                hashes.append(b"a request goes on")
