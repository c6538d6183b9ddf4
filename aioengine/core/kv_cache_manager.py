"""Gives requests the KV blocks that their tokens need, and finds the ones that already hold them."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine.config import CacheConfig
from aioengine.core.block_hash import BlockHash, hash_blocks, root_hash, salt_bytes, short_hash
from aioengine.core.block_pool import BlockPool
from aioengine.core.prefix_cache_stats import PrefixCacheStats
from aioengine.request import Request


class KVCacheManager:
    """Block tables of all requests, over one pool.

    The tables themselves live on the requests (`Request.block_ids`); only this class writes to them.
    """

    def __init__(self, cache: CacheConfig, *, num_kv_cache_blocks: int) -> None:
        self.block_size = cache.block_size
        self.enable_prefix_caching = cache.enable_prefix_caching
        self.block_pool = BlockPool(num_kv_cache_blocks)
        self.prefix_cache_stats = PrefixCacheStats()
        self._root_hash = root_hash(cache.prefix_caching_seed)
        self._zero_new_blocks = cache.zero_new_blocks
        self._block_ids_to_zero: list[int] = []
        self._hashed: dict[str, tuple[Request, int]] = {}  # request_id -> who got hashes since the last report, and how many it had

    @property
    def num_token_slots(self) -> int:
        """Tokens that fit if one request had all blocks."""
        return self.block_pool.num_total_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest known prefix of a request without blocks.

        Never the whole of its tokens: at least one must go through the model to give logits. And none of a request that
        wants log-probabilities of its prompt, until it has them all, with its first output token: they come from logits too.
        """
        if not self._may_look_up(request):
            return []
        max_num_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_block_hashes(request, max_num_blocks)
        block_ids: list[int] = []
        for block_hash in request.block_hashes[:max_num_blocks]:
            block_id = self.block_pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _may_look_up(self, request: Request) -> bool:
        wants_prompt_logprobs = request.sampling_params.prompt_logprobs is not None and not request.num_output_tokens
        return self.enable_prefix_caching and not wants_prompt_logprobs

    def num_blocks_to_take(self, num_tokens: int, computed_block_ids: Sequence[int]) -> int:
        """How many free blocks `num_tokens` of a request without blocks use up: new ones, and cache hits that nobody holds."""
        return self.num_blocks_for(num_tokens) - len(computed_block_ids) + self._num_free_among(computed_block_ids)

    def allocate_slots(self, request: Request, num_new_tokens: int, *, computed_block_ids: Sequence[int] = ()) -> list[int] | None:
        """Blocks for the next `num_new_tokens` tokens of a request, after its computed ones.

        `computed_block_ids` are cache hits to take over first (for a request without blocks). Returns the ids of the
        blocks added after those, or None, with nothing changed, if there are not enough free ones.
        """
        (table,) = request.block_ids
        num_tokens = request.num_computed_tokens + len(computed_block_ids) * self.block_size + num_new_tokens
        new_block_ids: list[int] = []
        if computed_block_ids or num_tokens > len(table) * self.block_size:
            num_new_blocks = self.num_blocks_for(num_tokens) - len(table) - len(computed_block_ids)
            if num_new_blocks + self._num_free_among(computed_block_ids) > self.block_pool.num_free_blocks:
                return None
            self.block_pool.touch(computed_block_ids)
            new_block_ids = self.block_pool.allocate(num_new_blocks)
            table += computed_block_ids
            table += new_block_ids
            request.num_cached_blocks += len(computed_block_ids)
            if self._zero_new_blocks:
                self._block_ids_to_zero += new_block_ids
        if num_tokens >= (request.num_cached_blocks + 1) * self.block_size:  # else no block has become full
            # Registered before the forward has run: the worker runs steps in order, so whoever finds a block here reads
            # it in this step, after the writes of every layer, or in a later one.
            self.cache_blocks(request, num_tokens)
        return new_block_ids

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let later requests find the blocks that are full of known, computed tokens."""
        if not self.enable_prefix_caching:
            return
        num_full_blocks = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full_blocks <= request.num_cached_blocks:
            return
        self._extend_block_hashes(request, num_full_blocks)
        (table,) = request.block_ids
        hashes = request.block_hashes
        for index in range(request.num_cached_blocks, num_full_blocks):
            self.block_pool.register(table[index], hashes[index], parent_hash=hashes[index - 1] if index else None)
        request.num_cached_blocks = num_full_blocks

    def record_prefix_cache_lookup(self, request: Request, *, num_hits: int) -> None:
        """Count one admitted request. Look-ups of requests that could not be admitted would count every step anew."""
        if self._may_look_up(request):
            self.prefix_cache_stats.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while a request holds blocks: it may share them."""
        if self.block_pool.num_free_blocks != self.block_pool.num_total_blocks:
            return False
        self.block_pool.reset_cache()
        self.prefix_cache_stats.forget_recent()
        return True

    def free(self, request: Request) -> None:
        """Let go of all blocks of a request. Their content stays findable until they are allocated anew."""
        (table,) = request.block_ids
        self.block_pool.free(table)
        request.block_ids = ([],)
        request.num_cached_blocks = 0

    def forget_blocks(self, request: Request) -> None:
        """Let nobody find the content that a request had in blocks any more; it and other owners keep the blocks themselves.

        Also that of blocks it shares: they may be where its trouble came from. And that of blocks it has let go of, when it
        was preempted while its trouble was not known yet. So they are found by their content.
        """
        self.block_pool.forget(request.block_hashes)
        request.num_cached_blocks = 0

    def take_block_ids_to_zero(self) -> list[int]:
        block_ids, self._block_ids_to_zero = self._block_ids_to_zero, []
        return block_ids

    def _num_free_among(self, block_ids: Sequence[int]) -> int:
        ref_cnt = self.block_pool.ref_cnt
        return sum(ref_cnt[block_id] == 0 for block_id in block_ids)

    def _extend_block_hashes(self, request: Request, num_blocks: int) -> None:
        num_known = len(request.block_hashes)
        if num_known < num_blocks:
            self.note_hashes(request, num_known)
            self.extend_hashes(request.block_hashes, request.all_token_ids, num_blocks, cache_salt=request.cache_salt)

    def note_hashes(self, request: Request, num_told: int) -> None:
        """A request has, or is about to get, further block hashes than the `num_told` that a report has told of."""
        entry = self._hashed.get(request.request_id)
        if entry is None or entry[0] is not request:  # an id may come again; who had it before is gone without having run
            self._hashed[request.request_id] = (request, num_told)

    def take_new_hashes(self) -> dict[str, list[str]]:
        """The block hashes that requests got since the last call, in the form of `short_hash`."""
        if not self._hashed:
            return {}
        hashed, self._hashed = self._hashed, {}
        return {
            req_id: [short_hash(block_hash) for block_hash in request.block_hashes[num_told:]]
            for req_id, (request, num_told) in hashed.items()
        }

    def drop_new_hashes(self) -> None:
        """Nobody asks for them."""
        self._hashed = {}

    def extend_hashes(self, hashes: list[BlockHash], token_ids: Sequence[int], num_blocks: int, *, cache_salt: str | None) -> None:
        """Append the hashes of the next blocks of `token_ids` until there are `num_blocks`. Takes about 1 us a block."""
        parent, extra = (hashes[-1], b"") if hashes else (self._root_hash, salt_bytes(cache_salt))
        new = token_ids[len(hashes) * self.block_size : num_blocks * self.block_size]
        hashes += hash_blocks(parent, new, block_size=self.block_size, extra=extra)
