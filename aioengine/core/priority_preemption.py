"""Policy "priority": how many running requests give way to a more urgent one that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from aioengine.core.kv_cache_manager import KVCacheManager
from aioengine.request import Request
from aioengine.resolved_config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Claim:
    """What a run of requests takes of a step."""

    num_tokens: int
    num_blocks: int  # new ones


def num_to_preempt(
    request: Request, *, running: Sequence[Request], claims: Sequence[Claim], config: SchedulerConfig, kv_cache_manager: KVCacheManager
) -> int:
    """How many from the end of `running` have to go so that `request`, the next of the queue, is admitted in this step.

    claims: entry i is what the first i of `running` take of the step, which come before anybody is admitted.
    0 if nobody has to go, and if it would not help: then those that run go on. Only requests of strictly lower priority
    go, the lowest first, and only for a slot of `max_num_seqs` or for KV blocks: a lack of token budget passes by itself.
    """
    kv = kv_cache_manager
    computed = kv.get_computed_blocks(request)
    num_wanted = kv.num_blocks_to_take(request.num_tokens, computed)
    num_free = kv.block_pool.num_free_blocks
    kept_by_request = frozenset(chain(*computed))
    released: Counter[int] = Counter()
    keep = len(running)
    while keep >= config.max_num_seqs or num_wanted + claims[keep].num_blocks > num_free:
        if keep == 0 or running[keep - 1].priority <= request.priority:
            return 0
        keep -= 1
        for block_id in chain(*running[keep].block_ids):
            released[block_id] += 1
            # A block that the request takes over was not counted as wanted, so it gains nothing by becoming free.
            if released[block_id] == kv.block_pool.ref_cnt[block_id] and block_id not in kept_by_request:
                num_free += 1
    num_missing_tokens = request.num_tokens - len(computed[0]) * kv.block_size
    num_needed_tokens = 1 if config.enable_chunked_prefill else num_missing_tokens
    if claims[keep].num_tokens + num_needed_tokens > config.max_num_batched_tokens:
        return 0
    return len(running) - keep
