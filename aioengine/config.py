"""Settings: what the user may say (`EngineConfig`), and what follows from it (`ResolvedConfig`).

Resolve, then construct: `EngineConfig.resolve()` decides every "auto" once, from the model's facts. What is only known
later (the number of KV blocks) is an argument to whoever needs it and never written back.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from aioengine.errors import ConfigError
from aioengine.values import flag, listed, number, shorten, surrogate_at, text, whole

logger = logging.getLogger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DeviceType = Literal["cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
Weights = Literal["auto", "dense", "exact", "fast"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_POLICIES = ("fcfs", "priority")
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
_WEIGHTS = ("auto", "dense", "exact", "fast")
_KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
_MAX_GPU_MEMORY_UTILIZATION = 0.97  # the driver, libraries and the allocator's gaps need the rest while serving
_DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# A chunk of this size keeps one step of a 135M model under a second on two cores, so that others keep streaming.
_DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU = 512
_DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
GIB = 1 << 30


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
    sliding_window: int | None = None
    is_quantized: bool = False  # its matrices are stored in blocks of few bits


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # 0: no limit on one request's share of a step
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    # Guess up to num_speculative_tokens by n-gram look-up; 0: none. The n-gram's length is in [min, max].
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
    kv_cache_memory_bytes: int = _DEFAULT_CPU_KV_CACHE_BYTES
    gpu_memory_utilization: float = 0.9
    zero_new_blocks: bool = False


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
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: tuple[str, ...] = ()  # "module:name" of batch-level processors


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

    def fitted(self, num_kv_cache_blocks: int) -> ResolvedConfig:
        """With max_model_len="auto" as long as a request can be in a cache of that many blocks, the null block included.

        A length or a number of blocks that the user gave stays as it is.
        """
        scheduler, cache = self.scheduler, self.cache
        num_tokens = (num_kv_cache_blocks - 1) * cache.block_size
        if not scheduler.fit_max_model_len or cache.num_kv_cache_blocks is not None or num_tokens >= scheduler.max_model_len:
            return self
        return dataclasses.replace(self, scheduler=dataclasses.replace(scheduler, max_model_len=num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine; the names are vLLM's where vLLM has them. `None` and "auto" mean: decide for me.

    model: a built-in alias ("smollm2"), a local folder, a `.gguf` file, or a Hugging Face repository id.
    tokenizer: a folder or repository to take the tokenizer from, when it is not the model's own.
    dtype: of weights and activations. auto: float32 on CPU; on CUDA the checkpoint's own, but bfloat16 for float32 ones, which
        would take twice the memory and several times the time.
    device: "cpu", "cuda" or, of several GPUs, "cuda:1"; auto takes CUDA if there is one.
    weights: how the CPU multiplies. exact: on weights as packed in the checkpoint: float32 ones in float32, quantized ones
        with activations of 16 bits (some 1e-5 from float32). fast: with those of the layers rounded to 8 bits, but for the
        groups that stand out of their row. dense: dequantized, with PyTorch's own kernels: the reference. auto, if `dtype`
        was left to the engine: fast for a quantized model, exact for others, dense where neither is possible. CUDA is
        always dense.
    kv_cache_dtype: of the stored keys and values. auto: the dtype, but float16 with fast weights. int8: on the CPU. fp8 (e4m3,
        unscaled): half the memory of bfloat16, on GPUs of compute capability 8.9.
    max_model_len: prompt and output together, in tokens. auto: the model's own limit, or what the memory of the KV cache holds
        of one request if that is less; the log says so. A number that does not fit is an error.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step.
    enable_chunked_prefill: split prompts that do not fit into a step's budget.
    long_prefill_token_threshold: while others run or wait, no request takes more tokens of one step than this; 0: no limit.
    scheduling_policy: "fcfs", or "priority" (a lower number first, then by arrival).
    async_scheduling: schedule the next step while the current one runs. False: one step at a time, same tokens.
    block_size: tokens a KV block. num_kv_cache_blocks: how many, the null block included; auto: from memory.
    kv_cache_memory_bytes: most memory the KV cache may take on CPU (auto: 1 GiB, or half of what is free if less).
    gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache together, at most 0.97.
    enable_prefix_caching: reuse the KV blocks of equal prompt prefixes. prefix_caching_seed: fixes the block hashes.
    zero_new_blocks: clear KV blocks before use. No attention backend here needs it: none reads a slot that was not written.
    attention_backend: a registered backend's name; auto takes the first that fits.
    enforce_eager: no CUDA graphs. num_threads: CPU threads of the model; auto: all cores.
    seed: where requests without a seed get theirs from; None: the operating system.
    check_invariants: check the scheduler's books after every call (slow). auto: if AIOENGINE_CHECK=1.
    logprobs_mode: what `logprobs` report. raw: before penalties, masks and temperature; processed: after them.
        ..._logprobs: log-probabilities; ..._logits: the logits themselves.
    logits_processors: "module:name" of batch-level logits processors (see aioengine/worker/sample/logits_processor.py).
    num_speculative_tokens: guess up to that many tokens ahead by n-gram look-up, and check them in one step; 0: off. The output
        stays the same; it pays for text that repeats itself (see aioengine/core/ngram_proposer.py). On the CPU only, and steps
        do not overlap then. prompt_lookup_min, prompt_lookup_max: the shortest and the longest n-gram that is looked up.
    max_num_queued_reqs, max_num_queued_tokens: more than that may not wait; a new request that would gets
        EngineOverloadedError. A request counts n times, and waits at least until the next step is scheduled. None: no limit.
    step_timeout_s: a step that takes longer ends the engine, with a message that says which. Time counts while the worker
        has the step, compiling kernels in the first steps included. None: wait for ever.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    weights: Weights = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    max_model_len: int | Literal["auto"] | None = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    block_size: int = 16
    num_kv_cache_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    prefix_caching_seed: str | None = None
    zero_new_blocks: bool = False
    attention_backend: str = "auto"
    enforce_eager: bool = False
    num_threads: int | None = None
    seed: int | None = None
    check_invariants: bool | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    step_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        _check_device(self.device)
        for name in _FLAGS:
            object.__setattr__(self, name, _flag(name, getattr(self, name)))
        for name, (least, most, optional) in _WHOLE_RANGES.items():
            value = getattr(self, name)
            if name == "max_model_len" and value == "auto":
                continue
            object.__setattr__(self, name, None if optional and value is None else _whole(name, value, least=least, most=most))
        for name, optional in _TEXTS.items():
            value = getattr(self, name)
            object.__setattr__(self, name, None if optional and value is None else _text(name, value))
        names = listed(self.logits_processors, most=_MAX_LOGITS_PROCESSORS)
        if names is None or len(names) > _MAX_LOGITS_PROCESSORS:
            raise ConfigError(
                f'logits_processors must be a list of at most {_MAX_LOGITS_PROCESSORS} "module:name" strings, got {shorten(names)}'
            )
        object.__setattr__(self, "logits_processors", tuple(_text("logits_processors", name) for name in names))
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max must be an integer >= {self.prompt_lookup_min} (prompt_lookup_min), got {self.prompt_lookup_max}"
            )
        if self.check_invariants is not None:
            object.__setattr__(self, "check_invariants", _flag("check_invariants", self.check_invariants))
        if self.step_timeout_s is not None:
            seconds = number(self.step_timeout_s)
            if seconds is None or seconds <= 0:
                raise ConfigError(f"step_timeout_s must be > 0 and finite, or None, got {shorten(self.step_timeout_s)}")
            object.__setattr__(self, "step_timeout_s", seconds)
        share = number(self.gpu_memory_utilization)
        if share is None or not 0 < share <= _MAX_GPU_MEMORY_UTILIZATION:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, {_MAX_GPU_MEMORY_UTILIZATION}], got {shorten(self.gpu_memory_utilization)}: "
                "the driver and libraries take memory while serving"
            )
        object.__setattr__(self, "gpu_memory_utilization", share)

    @classmethod
    def from_options(cls, model: str | EngineConfig, options: dict[str, Any]) -> EngineConfig:
        """`AsyncEngine("name", max_num_seqs=8)`: build a config, or change one. Unknown options raise ConfigError."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown engine option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if isinstance(model, EngineConfig):
            return dataclasses.replace(model, **options)
        return cls(**{**options, "model": model})

    def resolve(self, model: ModelInfo, *, cuda_available: bool, free_memory_bytes: int) -> ResolvedConfig:
        """Decide every "auto" for `model` on this machine.

        Raises ConfigError where settings contradict each other or the model.
        """
        name, _, index = self.device.partition(":")
        device: DeviceType = "cuda" if name == "cuda" or (name == "auto" and cuda_available) else "cpu"
        if device == "cuda" and not cuda_available:
            raise ConfigError(f'device="{self.device}" was asked for, but PyTorch finds no CUDA device')
        if device == "cuda" and self.num_speculative_tokens:
            raise ConfigError(f"num_speculative_tokens ({self.num_speculative_tokens}) is for the CPU; on cuda leave it at 0")
        return ResolvedConfig(
            model=model,
            scheduler=self._resolve_scheduler(model, device),
            cache=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                prefix_caching_seed=self.prefix_caching_seed,
                num_kv_cache_blocks=self.num_kv_cache_blocks,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes or default_kv_cache_bytes(free_memory_bytes),
                gpu_memory_utilization=self.gpu_memory_utilization,
                zero_new_blocks=self.zero_new_blocks,
            ),
            worker=self._resolve_worker(model, device, device_index=int(index) if index else None),
            admission=AdmissionConfig(
                max_num_queued_reqs=self.max_num_queued_reqs,
                max_num_queued_tokens=self.max_num_queued_tokens,
                step_timeout_s=self.step_timeout_s,
            ),
            seed=self.seed,
            check_invariants=_checks_by_environment() if self.check_invariants is None else self.check_invariants,
        )

    def _resolve_worker(self, model: ModelInfo, device: DeviceType, *, device_index: int | None) -> WorkerConfig:
        dtype = self._resolve_dtype(model, device)
        weights = self._resolve_weights(model, device)
        allow_dense = self.weights == "auto" and weights != "dense"
        kv_cache_dtype: str = self.kv_cache_dtype
        if kv_cache_dtype == "auto":
            kv_cache_dtype = "float16" if weights == "fast" else dtype
        attention_backend = self.attention_backend
        if attention_backend == "auto" and device == "cpu" and not allow_dense:
            # The reference, all of it; or what packed weights need, so that it says itself why it does not fit.
            attention_backend = "torch_paged" if weights == "dense" else "cpu_paged"
        return WorkerConfig(
            device=device,
            device_index=device_index,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            weights=weights,
            allow_dense=allow_dense,
            attention_backend=attention_backend,
            enforce_eager=self.enforce_eager,
            num_threads=self.num_threads,
            logprobs_mode=self.logprobs_mode,
            logits_processors=self.logits_processors,
        )

    def _resolve_weights(self, model: ModelInfo, device: DeviceType) -> Literal["dense", "exact", "fast"]:
        if self.weights == "exact" or self.weights == "fast":
            if device != "cpu":
                raise ConfigError(f'weights="{self.weights}" is for the CPU; on {device} use weights="dense"')
            if self.dtype not in ("auto", "float32"):
                raise ConfigError(f'weights="{self.weights}" computes in float32, but dtype="{self.dtype}" was asked for')
        if self.weights != "auto":
            return self.weights
        if device != "cpu" or self.dtype != "auto":
            return "dense"
        return "fast" if model.is_quantized else "exact"

    def _resolve_dtype(self, model: ModelInfo, device: DeviceType) -> str:
        if self.dtype != "auto":
            return self.dtype
        if device == "cpu":
            return "float32"
        if model.dtype == "float32":
            logger.warning('%s is stored in float32 and runs in bfloat16 on CUDA; dtype="float32" keeps it', model.name)
            return "bfloat16"
        return model.dtype

    def _resolve_scheduler(self, model: ModelInfo, device: DeviceType) -> SchedulerConfig:
        limit = model.max_position_embeddings
        is_auto = self.max_model_len is None or self.max_model_len == "auto"
        max_model_len = limit if self.max_model_len is None or self.max_model_len == "auto" else self.max_model_len
        if max_model_len > limit:
            raise ConfigError(f"max_model_len {max_model_len} exceeds the {limit} positions of {model.name}")
        default = _DEFAULT_MAX_NUM_BATCHED_TOKENS if device == "cuda" else _DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(default, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                budget = max(budget, max_model_len)
        if budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "each running request takes a token a step"
            )
        if not self.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}), "
                "or long prompts could never run"
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) splits prompts, "
                "which enable_chunked_prefill=False forbids"
            )
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            # Guesses continue known tokens, so the step before has to be over.
            async_scheduling=self.async_scheduling and self.num_speculative_tokens == 0,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            fit_max_model_len=is_auto,
        )


def default_kv_cache_bytes(free_memory_bytes: int) -> int:
    """Most memory for the KV cache on a CPU if the user gives no number."""
    return min(_DEFAULT_CPU_KV_CACHE_BYTES, free_memory_bytes // 2)


_CHOICES = {
    "dtype": _DTYPES,
    "weights": _WEIGHTS,
    "kv_cache_dtype": _KV_CACHE_DTYPES,
    "scheduling_policy": _POLICIES,
    "logprobs_mode": _LOGPROBS_MODES,
}
_FLAGS = ("enable_chunked_prefill", "async_scheduling", "enable_prefix_caching", "zero_new_blocks", "enforce_eager")
_TEXTS = {"model": False, "tokenizer": True, "prefix_caching_seed": True, "attention_backend": False}  # whether None may be said
_MAX_LOGITS_PROCESSORS = 64
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_WHOLE_RANGES: dict[str, tuple[int, int, bool]] = {  # from, to, whether None may be said
    "max_num_seqs": (1, 1 << 16, False),
    "block_size": (1, 1 << 16, False),
    "prompt_lookup_min": (1, 1024, False),
    "prompt_lookup_max": (1, 1024, False),
    "long_prefill_token_threshold": (0, _INT32, False),
    "num_speculative_tokens": (0, 1024, False),
    "max_model_len": (2, _INT32, True),  # one token in, one token out
    "max_num_batched_tokens": (1, _INT32, True),
    "num_kv_cache_blocks": (2, 1 << 24, True),  # the null block and one more; each takes memory of the host's too
    "kv_cache_memory_bytes": (1, _INT64, True),
    "num_threads": (1, 4096, True),
    "seed": (0, 2**64 - 1, True),
    "max_num_queued_reqs": (1, _INT64, True),
    "max_num_queued_tokens": (1, _INT64, True),
}


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {shorten(value)}")


def _whole(name: str, value: object, *, least: int, most: int) -> int:
    plain = whole(value)
    if plain is None or plain < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shorten(value)}")
    if plain > most:
        raise ConfigError(f"{name} must be an integer <= {most}, got {shorten(value)}")
    return plain


def _flag(name: str, value: object) -> bool:
    plain = flag(value)
    if plain is None:
        raise ConfigError(f"{name} must be True or False, got {shorten(value)}")
    return plain


def _text(name: str, value: object) -> str:
    """What is a name, or a path, or is hashed: with a UTF-8 form, as it is written into recordings too."""
    plain = text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if plain is None or (not plain and name != "prefix_caching_seed"):
        raise ConfigError(f"{name} must be a non-empty string, got {shorten(value)}")
    if surrogate_at(plain) is not None or "\0" in plain:
        raise ConfigError(f"{name} must be valid Unicode without NUL, got {shorten(plain)}")
    return plain


def _checks_by_environment() -> bool:
    given = os.environ.get("AIOENGINE_CHECK", "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"the environment variable AIOENGINE_CHECK must be 1 or 0, got {given!r}")
    return given == "1"


def _check_device(device: object) -> None:
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", device):
        raise ConfigError(f'device must be auto, cpu, cuda or one of several GPUs, such as "cuda:1"; got {shorten(device)}')
