"""Gives requests the KV blocks that their tokens need, and finds the ones that already hold them."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine.core.block_hash import BlockHash, HashMemo, in_group, names_in_group, root_hash, salt_bytes, short_hash
from aioengine.core.block_pool import NULL_BLOCK_ID, BlockPool
from aioengine.core.group_managers import make_group_managers
from aioengine.core.prefix_cache_stats import PrefixCacheStats
from aioengine.errors import ConfigError
from aioengine.kv_cache_groups import longest_request, num_blocks_of_request
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig


class KVCacheManager:
    """Block tables of all requests, one for each KV-cache group, over one pool.

    The tables themselves live on the requests (`Request.block_ids`); only this class writes to them. Those of one request are of
    one length; where a group's window has moved on, the null block stands in a table. (vLLM's hybrid KV cache manager does alike.)
    """

    def __init__(self, cache: CacheConfig, *, num_kv_cache_blocks: int, max_num_batched_tokens: int) -> None:
        """Raises ConfigError if the pool is too small for a block of each group. max_num_batched_tokens: the most of one step."""
        self.groups = cache.kv_cache_groups
        self.block_size = cache.block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = cache.enable_prefix_caching
        self.has_windows = any(group.sliding_window is not None for group in self.groups)
        self.block_pool = BlockPool(num_kv_cache_blocks, keeps_leaving=cache.has_kv_connector)
        if self.block_pool.num_total_blocks < len(self.groups):
            raise ConfigError(
                f"the KV cache has {self.block_pool.num_total_blocks} blocks, but the first token of a request takes {len(self.groups)}: "
                "one for each KV-cache group"
            )
        self.prefix_cache_stats = PrefixCacheStats()
        self._managers = make_group_managers(self.groups, block_pool=self.block_pool, block_size=self.block_size)
        by_window: dict[int, list[int]] = {}
        for group_id, group in enumerate(self.groups):
            if group.sliding_window is not None:
                by_window.setdefault(group.sliding_window, []).append(group_id)
        self._windowed = [(self.groups[group_ids[0]], group_ids) for group_ids in by_window.values()]  # a group of each window, and all
        self._hash_memo = HashMemo(self.block_size)
        self._root_hash = root_hash(cache.prefix_caching_seed)
        self._zero_new_blocks = cache.zero_new_blocks
        self._block_ids_to_zero: list[int] = []
        self._hashed: dict[str, tuple[Request, int]] = {}  # request_id -> who got hashes since the last report, and how many it had

    def make_tables(self) -> tuple[list[int], ...]:
        """Those of a request that holds nothing."""
        return tuple([] for _ in self.groups)

    def longest_request(self, limit: int) -> int:
        """How many tokens, `limit` at most, one request can have in the cache if all blocks are its own."""
        return longest_request(
            self.groups,
            self.block_pool.num_total_blocks,
            block_size=self.block_size,
            max_step_tokens=self.max_num_batched_tokens,
            limit=limit,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that so many tokens of a request hold at once, in all groups together."""
        return num_blocks_of_request(self.groups, num_tokens, block_size=self.block_size, max_step_tokens=self.max_num_batched_tokens)

    def num_new_blocks(self, request: Request, num_tokens: int) -> int:
        """How many blocks a running request takes to have `num_tokens` computed."""
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids[0])
        return num_missing * len(self.groups) if num_missing > 0 else 0

    def get_computed_blocks(self, request: Request) -> tuple[list[int], ...]:
        """The cached blocks that serve the longest known prefix of a request without blocks: its tables, to begin with.

        Never the whole of its tokens: at least one must go through the model to give logits. And none of a request that
        wants log-probabilities of its prompt, until it has them all, with its first output token: they come from logits too.
        """
        if not self._may_look_up(request):
            return self.make_tables()
        length = (request.num_tokens - 1) // self.block_size
        self._extend_block_hashes(request, length)
        return self.find_hits(request.block_hashes, length)

    def find_hits(self, block_hashes: Sequence[BlockHash], length: int) -> tuple[list[int], ...]:
        """The tables of the longest prefix, of at most `length` blocks, that every group can serve."""
        if len(self._managers) == 1:
            return tuple(self._managers[0].find_hits(block_hashes, length))
        while True:
            tables: list[list[int]] = []
            for manager in self._managers:
                tables += manager.find_hits(block_hashes, length)
                length = len(tables[-1])
            if all(len(table) == length for table in tables):
                return tuple(tables)

    def _may_look_up(self, request: Request) -> bool:
        if not self.enable_prefix_caching:
            return False
        if request.pooling_params is not None:
            return not request.pooling_params.needs_all_tokens
        return request.sampling_params.prompt_logprobs is None or bool(request.num_output_tokens)

    def num_blocks_to_take(self, num_tokens: int, computed: Sequence[Sequence[int]]) -> int:
        """How many free blocks `num_tokens` of a request without blocks use up: new ones, and cache hits that nobody holds.

        Where a window moves on while they are computed, the most at any time.
        """
        num_computed_tokens = len(computed[0]) * self.block_size
        hits = self._held(computed)
        if self.has_windows:
            num_blocks = sum(
                group.max_num_blocks(
                    num_tokens,
                    block_size=self.block_size,
                    max_step_tokens=self.max_num_batched_tokens,
                    num_computed_tokens=num_computed_tokens,
                )
                for group in self.groups
            )
        else:
            num_blocks = -(-num_tokens // self.block_size) * len(self.groups)
        return num_blocks - len(hits) + self._num_free_among(hits)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *, computed: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int], ...] | None:
        """Blocks for the next `num_new_tokens` tokens of a request, after its computed ones.

        `computed` are cache hits to take over first (for a request without blocks). Returns the ids of the blocks added after
        those, a list for each group, or () where none was needed; None, with nothing changed, if there are not enough free ones.
        """
        num_tokens = request.num_computed_tokens + num_new_tokens
        new_block_ids: tuple[list[int], ...] | None = ()
        if computed:
            num_tokens += len(computed[0]) * self.block_size
        if computed or num_tokens > len(request.block_ids[0]) * self.block_size:
            new_block_ids = self._add_blocks(request, -(-num_tokens // self.block_size), computed)
            if new_block_ids is None:
                return None
        if num_tokens >= (request.num_cached_blocks + 1) * self.block_size:  # else no block has become full
            # Registered before the forward has run: the worker runs steps in order, so whoever finds a block here reads
            # it in this step, after the writes of every layer, or in a later one.
            self.cache_blocks(request, num_tokens)
        request.num_settled_tokens = len(request.block_ids[0]) * self.block_size
        if self.enable_prefix_caching:
            request.num_settled_tokens = min(request.num_settled_tokens, (request.num_cached_blocks + 1) * self.block_size - 1)
        return new_block_ids

    def allocate_for_load(self, request: Request, computed: Sequence[Sequence[int]]) -> list[int]:
        """Blocks for what a KV connector has of a request without blocks, behind the cache hits that it takes over.

        The pool must have them: see `num_blocks_to_take`. Only where there is one group, which sees everything.
        """
        added = self._add_blocks(request, self.num_external_blocks(request), computed)
        assert added is not None, "it was counted that the blocks are there"
        (block_ids,) = added
        return block_ids

    def num_external_blocks(self, request: Request) -> int:
        """The blocks that a KV connector has of a request, from its first one on; never all: a token is left to compute."""
        if not request.num_external_blocks or not self._may_look_up(request):
            return 0
        return min(request.num_external_blocks, (request.num_tokens - 1) // self.block_size)

    def settle_load(self, request: Request, *, num_loaded: int) -> None:
        """So many of the blocks of `allocate_for_load` have got their content: let it be found, and let go of all of them.

        The request finds them when it is admitted, like anybody's.
        """
        if num_loaded:
            self.cache_blocks(request, (request.num_cached_blocks + num_loaded) * self.block_size)
        self.free(request)

    def _add_blocks(self, request: Request, length: int, computed: Sequence[Sequence[int]]) -> tuple[list[int], ...] | None:
        """Make the tables `length` blocks long: by cache hits, and by new blocks, which are returned; None: there are not enough."""
        pool, tables = self.block_pool, request.block_ids
        num_new_blocks, num_wanted = length - len(tables[0]), 0
        if computed:
            hits = self._held(computed)
            num_new_blocks -= len(computed[0])
            num_wanted = self._num_free_among(hits)
        if num_wanted + num_new_blocks * len(tables) > pool.num_free_blocks:
            return None
        if computed:
            pool.touch(hits)
            for table, found in zip(tables, computed, strict=True):
                table += found
            request.num_cached_blocks += len(computed[0])
        new_block_ids = []
        for table in tables:
            added = pool.allocate(num_new_blocks)
            table += added
            new_block_ids.append(added)
            if self._zero_new_blocks:
                self._block_ids_to_zero += added
        return tuple(new_block_ids)

    def free_behind_windows(self, request: Request) -> None:
        """Let go of the blocks that nothing sees which is computed after what has been scheduled.

        To be called whenever `num_computed_tokens` has moved. Steps in flight still read these blocks: the worker runs steps in
        order, so whoever takes them writes to them later. It needs not be told: it never reads behind a window.
        """
        num_computed_tokens = request.num_computed_tokens - len(request.spec_token_ids)  # draft tokens may turn out wrong
        for group, group_ids in self._windowed:
            end = start = group.first_block_in_sight(num_computed_tokens, block_size=self.block_size)
            table = request.block_ids[group_ids[0]]  # the null block stands at the same places in all groups of a window
            while start and table[start - 1] != NULL_BLOCK_ID:
                start -= 1
            if start < end:
                for group_id in group_ids:
                    table = request.block_ids[group_id]
                    self.block_pool.free(table[start:end])
                    table[start:end] = [NULL_BLOCK_ID] * (end - start)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let later requests find the blocks that are full of known, computed tokens."""
        if not self.enable_prefix_caching:
            return
        num_full_blocks = min(num_computed_tokens, request.num_tokens) // self.block_size
        if num_full_blocks <= request.num_cached_blocks:
            return
        self._extend_block_hashes(request, num_full_blocks)
        start, hashes = request.num_cached_blocks, request.block_hashes
        for group_id, table in enumerate(request.block_ids):
            for index in range(start, num_full_blocks):
                block_id = table[index]
                if block_id != NULL_BLOCK_ID:  # a window can leave a block behind before its tokens are known
                    name = in_group(hashes[index], group_id) if group_id else hashes[index]
                    self.block_pool.register(block_id, name, parent_hash=hashes[index - 1] if index else None)
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
        tables = request.block_ids
        # Side by side: what comes first in a prefix is worth more than what comes later, in whichever group.
        self.block_pool.free(self._held(tables if len(tables) == 1 else list(zip(*tables, strict=True))))
        request.block_ids = self.make_tables()
        request.num_cached_blocks = request.num_settled_tokens = 0

    def forget_blocks(self, request: Request) -> None:
        """Let nobody find the content that a request had in blocks any more; it and other owners keep the blocks themselves.

        Also that of blocks it shares: they may be where its trouble came from. And that of blocks it has let go of, when it
        was preempted while its trouble was not known yet. So they are found by their content.
        """
        for group_id in range(len(self.groups)):
            self.block_pool.forget(names_in_group(request.block_hashes, group_id))
        request.num_cached_blocks = request.num_settled_tokens = 0

    def take_block_ids_to_zero(self) -> list[int]:
        block_ids, self._block_ids_to_zero = self._block_ids_to_zero, []
        return block_ids

    def _held(self, tables: Sequence[Sequence[int]]) -> Sequence[int]:
        """The blocks of tables, without the null block."""
        if len(tables) == 1 and not self.has_windows:
            return tables[0]
        return [block_id for table in tables for block_id in table if block_id != NULL_BLOCK_ID]

    def _num_free_among(self, block_ids: Sequence[int]) -> int:
        return list(map(self.block_pool.ref_cnt.__getitem__, block_ids)).count(0)

    def _extend_block_hashes(self, request: Request, num_blocks: int) -> None:
        num_known = len(request.block_hashes)
        if num_known < num_blocks:
            self.note_hashes(request, num_known)
            self.extend_hashes(
                request.block_hashes, request.all_token_ids, num_blocks, cache_salt=request.cache_salt, lora_key=request.lora_key
            )

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

    def extend_hashes(
        self, hashes: list[BlockHash], token_ids: Sequence[int], num_blocks: int, *, cache_salt: str | None, lora_key: str | None = None
    ) -> None:
        """Append the hashes of the next blocks of `token_ids` until there are `num_blocks`. Takes about 0.5 us a block,
        of a prompt that begins like a recent one a fifth of it.
        """
        parent, extra = (hashes[-1], b"") if hashes else (self._root_hash, salt_bytes(cache_salt, lora_key))
        new = token_ids[len(hashes) * self.block_size : num_blocks * self.block_size]
        hashes += self._hash_memo.hash_blocks(parent, new, extra=extra)
