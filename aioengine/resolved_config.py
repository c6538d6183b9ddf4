"""Every setting decided: what a model says, and what the parts of an engine are told. Made by `EngineConfig.resolve()`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from aioengine.kv_cache_groups import KVCacheGroup, longest_request

DeviceType = Literal["cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority", "sjf"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
ExecutorBackend = Literal["uniproc", "multiproc", "ray"]

GIB = 1 << 30
DEFAULT_CPU_KV_CACHE_BYTES = GIB
DEFAULT_KV_CACHE_DIR_BYTES = 10 * GIB


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a model that settings are resolved against. Read from its files, never guessed."""

    name: str
    path: str
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the weights as stored or dequantized: float32, bfloat16, float16
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None
    sliding_window: int | None = None  # of all layers, unless `layer_windows` tells them apart
    layer_windows: tuple[int | None, ...] = ()  # of each layer, where they differ; None: it sees everything
    is_quantized: bool = False  # its matrices are stored in blocks of few bits

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it sees everything."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: no limit on one request's share of a step
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    # Up to num_speculative_tokens draft tokens from n-grams; 0: none. The n-gram's length is in [min, max].
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    fit_max_model_len: bool = False  # the user left max_model_len open: it becomes what the KV cache holds, if that is less

    @property
    def max_concurrent_batches(self) -> int:
        """Steps in flight at once: two overlap the host's work with the device's."""
        return 2 if self.async_scheduling else 1


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """What the engine takes in, and how long it waits; None: no limit."""

    max_num_queued_reqs: int | None = None  # waiting ones, not those that run
    max_num_queued_tokens: int | None = None  # prompt tokens of the waiting ones
    step_timeout_s: float | None = None  # a step that takes longer ends the engine


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int
    enable_prefix_caching: bool = True
    prefix_caching_seed: str | None = None  # None: a random one a process, so that hashes cannot be predicted
    num_kv_cache_blocks: int | None = None  # None: as many as the memory below allows
    kv_cache_memory_bytes: int = DEFAULT_CPU_KV_CACHE_BYTES
    gpu_memory_utilization: float = 0.9
    zero_new_blocks: bool = False
    kv_cache_dir: str | None = None  # where blocks are kept that leave the cache; None: nowhere
    kv_cache_dir_bytes: int = DEFAULT_KV_CACHE_DIR_BYTES
    has_kv_connector: bool = False  # blocks that leave the cache are told of, and may be loaded again
    kv_cache_groups: tuple[KVCacheGroup, ...] = (KVCacheGroup((0,)),)  # what each entry of a request's `block_ids` is for


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    device: DeviceType
    dtype: str
    device_index: int | None = None  # of several GPUs; None: the current one
    kv_cache_dtype: str = "float32"
    weights: Literal["dense", "exact", "fast"] = "dense"
    allow_dense: bool = False  # the user left `weights` open: dense if the machine or the model does not allow the others
    attention_backend: str = "auto"
    enforce_eager: bool = False
    num_threads: int | None = None
    cpu_affinity: tuple[int, ...] | None = None  # the only cores that the worker's threads run on; of several ranks each has its share
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: tuple[str, ...] = ()  # "module:name" of batch-level processors
    loras: tuple[tuple[str, str], ...] = ()  # names and folders of adapters that are loaded at start


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Where the model runs: in a thread of this process, or in ranks, each a process with a part of it."""

    tensor_parallel_size: int = 1
    distributed_executor_backend: ExecutorBackend = "uniproc"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every setting decided. Each part goes to whom it concerns."""

    model: ModelInfo
    scheduler: SchedulerConfig
    cache: CacheConfig
    worker: WorkerConfig
    admission: AdmissionConfig
    seed: int | None
    check_invariants: bool
    parallel: ParallelConfig = ParallelConfig()

    def with_prefix_caching_seed(self, seed: str) -> ResolvedConfig:
        """With that seed of the block hashes where the user gave none: a run can then be repeated with the same hashes."""
        if self.cache.prefix_caching_seed is not None:
            return self
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, prefix_caching_seed=seed))

    def fitted(self, num_kv_cache_blocks: int) -> ResolvedConfig:
        """With max_model_len="auto" as long as a request can be in a cache of that many blocks, the null block included.

        A length or a number of blocks that the user gave stays as it is.
        """
        scheduler, cache = self.scheduler, self.cache
        num_tokens = longest_request(
            cache.kv_cache_groups,
            num_kv_cache_blocks - 1,
            block_size=cache.block_size,
            max_step_tokens=scheduler.max_num_batched_tokens,
            limit=scheduler.max_model_len,
        )
        if not scheduler.fit_max_model_len or cache.num_kv_cache_blocks is not None or num_tokens >= scheduler.max_model_len:
            return self
        return dataclasses.replace(self, scheduler=dataclasses.replace(scheduler, max_model_len=num_tokens))
