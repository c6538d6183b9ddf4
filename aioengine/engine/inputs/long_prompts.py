"""What has to be done with every token of a prompt, in slices: the loop has steps to schedule and tokens to hand out.

A prompt of 200,000 tokens takes 50 ms to check and to hash. A thread would not help: it would hold the interpreter's lock,
for which the loop then waits 5 ms each time it wakes up. Short prompts are done in one go and never give up their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aioengine.checks.values import whole
from aioengine.core.kv_cache_manager import KVCacheManager

_TOKENS_PER_SLICE = 8192  # a check of so many takes half a millisecond
_BLOCKS_PER_SLICE = 512  # and hashing so many a whole one


async def plain_token_ids(items: list[Any]) -> list[int] | None:
    """The same list if it holds plain integers only, a copy if some are integers of another kind (NumPy's), else None."""
    plain = items
    async for start in _starts(len(items), _TOKENS_PER_SLICE):
        part = items[start : start + _TOKENS_PER_SLICE]
        if set(map(type, part)) == {int}:
            continue
        converted = [whole(item) for item in part]
        if None in converted:
            return None
        if plain is items:
            plain = items.copy()
        plain[start : start + len(part)] = converted
    return plain


async def find_outside_vocabulary(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """The index of the first token id that is not in [0, vocab_size); None: there is none."""
    async for start in _starts(len(token_ids), _TOKENS_PER_SLICE):
        part = token_ids[start : start + _TOKENS_PER_SLICE]
        if min(part) < 0 or max(part) >= vocab_size:
            return start + next(index for index, token_id in enumerate(part) if not 0 <= token_id < vocab_size)
    return None


async def hash_long_prompt(
    kv_cache_manager: KVCacheManager,
    token_ids: list[int],
    *,
    cache_salt: str | None,
    lora_key: str | None = None,
    at_any_length: bool = False,
) -> list[bytes]:
    """The hashes of a prompt's full blocks; none if they are so few that the scheduler may as well do it itself.

    at_any_length: they are needed before the scheduler has the prompt.
    """
    hashes: list[bytes] = []
    num_blocks = len(token_ids) // kv_cache_manager.block_size
    if not kv_cache_manager.enable_prefix_caching or (num_blocks <= _BLOCKS_PER_SLICE and not at_any_length):
        return hashes
    async for start in _starts(num_blocks, _BLOCKS_PER_SLICE):
        end = min(start + _BLOCKS_PER_SLICE, num_blocks)
        kv_cache_manager.extend_hashes(hashes, token_ids, end, cache_salt=cache_salt, lora_key=lora_key)
    return hashes


async def _starts(length: int, step: int) -> AsyncIterator[int]:
    """0, step, 2 * step, ... below `length`, with a turn for the other coroutines in between."""
    for start in range(0, length, step):
        if start:
            await asyncio.sleep(0)
        yield start
