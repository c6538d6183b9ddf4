"""`SchedulerOutput`: the plan of one step, and the only thing that the worker learns from the scheduler.

The worker caches what it has been told, so a request travels in full once (`NewRequestData`) and as a difference after
that (`CachedRequestData`). Everything here is frozen, and no list is written to after the output is built: it can be
handed to the worker and to any number of observers by reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aioengine.pooling_params import PoolingParams
from aioengine.sampling_params import SamplingParams

AdmissionStop = Literal["queue_empty", "budget", "max_num_seqs", "no_blocks", "preempted", "in_flight"]
"""Why a step admitted no further waiting request:

queue_empty: none is waiting. budget: `max_num_batched_tokens` is used up (or the rest is too small for a prompt that
may not be split). max_num_seqs: that many requests run. no_blocks: its tokens do not fit into the free KV blocks.
preempted: this step had to preempt for blocks, so it admits nobody; or the next one has just given way to a more urgent
one. in_flight: the next one was preempted while a step in flight still samples a token for it; it is admitted when that
token is known.
"""


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that is scheduled for the first time: everything the worker needs to know of it."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]  # one list a KV-cache group
    num_computed_tokens: int  # where this step starts: more than 0 on a prefix-cache hit
    pooling_params: PoolingParams | None = None  # the request wants an embedding: nothing is sampled for it
    lora_name: str | None = None  # of the adapter that its tokens go through


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Requests that the worker knows: parallel lists by `req_ids`."""

    req_ids: list[str] = field(default_factory=list)
    # Ids that come back after a preemption: their new_block_ids replace the block table, otherwise they are appended.
    resumed_req_ids: frozenset[str] = frozenset()
    # The whole history (prompt and output) of the requests that were not scheduled in the previous step.
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)  # None: no block was added
    num_computed_tokens: list[int] = field(default_factory=list)  # where this step starts
    num_output_tokens: list[int] = field(default_factory=list)  # known ones and those still being sampled


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Blocks that a KV connector fills before their request may run."""

    req_id: str
    block_ids: list[int]
    computed_block_ids: list[int]  # those before them, which the cache had already


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """What goes between the KV cache and its connector around a step."""

    loads: list[KVLoad] = field(default_factory=list)  # begin now; none of their requests is in this step
    saves: list[int] = field(default_factory=list)  # blocks that this step overwrites: their content is read before it runs


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: who runs, from which position, how many tokens, in which blocks, and who is gone."""

    step_id: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # every value > 0; the order is the order of the batch
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str] = frozenset()  # ended since the previous step: the worker forgets them
    preempted_req_ids: frozenset[str] = frozenset()  # the worker frees their slots and keeps their parameters
    new_block_ids_to_zero: list[int] = field(default_factory=list)  # only where the cache needs it
    # Draft tokens that this step checks, by request: counted in num_scheduled_tokens, after the one known token.
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    structured_output_request_ids: frozenset[str] = frozenset()  # those that sample in this step and need a mask for it

    kv_connector_metadata: KVConnectorMetadata | None = None  # None: nothing is loaded or saved

    @property
    def is_cleanup_only(self) -> bool:
        """No token is scheduled; the output only tells the worker what to forget."""
        return self.total_num_scheduled_tokens == 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Absolute gauges and running totals, as they stand after a call of the scheduler."""

    num_waiting_reqs: int
    num_running_reqs: int
    num_preempted_reqs: int  # of the waiting ones, those that ran before
    num_total_blocks: int  # without the null block
    num_free_blocks: int  # allocatable: never used, or cached and owned by nobody
    num_cached_blocks: int  # blocks whose content the prefix cache can serve, owned or not
    num_preemptions: int  # total
    prefix_cache_queries: int  # total, in tokens: each request counts once, when it is first admitted
    prefix_cache_hits: int  # total, in tokens
    num_aborted_reqs: int = 0  # total: by their consumer, by a time-out, at shutdown
    num_rejected_reqs: int = 0  # total: refused because the queue was full
    num_draft_tokens: int = 0  # total: draft tokens that were checked
    num_accepted_tokens: int = 0  # total: those that were right
    # The same of the last 1000 requests since the cache was reset; None: a recording of before these were kept.
    recent_prefix_cache_queries: int | None = None
    recent_prefix_cache_hits: int | None = None
    # What preempted requests looked up and found of their own when they came back: no part of the figures above.
    num_resumed_reqs: int = 0  # total: each time that one came back
    num_preempted_queries: int = 0  # total, in tokens
    num_preempted_hits: int = 0  # total, in tokens
    # More totals since the engine started; None: a recording of before these were kept (schema 2).
    num_arrived_reqs: int | None = None
    num_finished_reqs: int | None = None  # however they ended, aborts and errors included
    num_error_reqs: int | None = None
    num_output_tokens: int | None = None  # sampled and accepted
    num_prompt_tokens_computed: int | None = None  # for the first time: without what the prefix cache served
    num_recomputed_tokens: int | None = None  # prompt and output tokens that were computed again after a preemption
    num_evicted_blocks: int | None = None  # lost the content that they cached
    # Totals in tokens, of prompts that the prefix cache did not hold: what was looked up in the KV connector, and what came from it.
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    num_loading_reqs: int = 0  # of the waiting ones, those whose blocks are being loaded

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """The share of looked-up tokens that were found, of the last 1000 requests; None before the first.

        Where the last requests are not told apart (old recordings), of all of them.
        """
        queries, hits = self.recent_prefix_cache_queries, self.recent_prefix_cache_hits
        if queries is None or hits is None:
            queries, hits = self.prefix_cache_queries, self.prefix_cache_hits
        return hits / queries if queries else None

    @property
    def num_used_blocks(self) -> int:
        return self.num_total_blocks - self.num_free_blocks

    @property
    def kv_cache_usage(self) -> float:
        return self.num_used_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """The share of draft tokens that were accepted; None before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What happened to KV blocks since the previous report, in order within each list."""

    allocated: list[int] = field(default_factory=list)  # taken from the free queue, by a new owner or by a cache hit
    freed: list[int] = field(default_factory=list)  # back in the free queue: their last owner let go
    evicted: list[int] = field(default_factory=list)  # lost their cached content: they were allocated anew, or the cache was reset
    # Became findable by content, and still are: applied after `evicted`, the set of cached blocks is right.
    cached: list[int] = field(default_factory=list)
    cached_hashes: list[str] = field(default_factory=list)  # of `cached`: the first hex digits of their content's hash
    cached_parent_hashes: list[str] = field(default_factory=list)  # of the blocks before them in their prefix; "": they are first
    # Of `freed`, for the order of the free queue: how many of `allocated` were taken before, and whether the block went to the
    # front of the queue, to be taken next, as it caches nothing.
    freed_after: list[int] = field(default_factory=list)
    freed_to_front: list[bool] = field(default_factory=list)
