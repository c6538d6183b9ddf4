"""Settings: what the user may say (`EngineConfig`). What follows from it is in `resolved_config`.

Resolve, then construct: `EngineConfig.resolve()` decides every "auto" once, from the model's facts. What is only known
later (the number of KV blocks) is an argument to whoever needs it and never written back.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Literal

from aioengine.checks.cores import check_cores, format_cores, read_cores
from aioengine.checks.engine_settings import (
    MAX_GPU_MEMORY_UTILIZATION,
    read_device,
    read_logits_processors,
    read_loras,
    read_seconds,
    read_share,
)
from aioengine.checks.settings import INT64_MAX, docstring, setting, settings_of
from aioengine.errors import ConfigError
from aioengine.kv_cache_groups import group_layers
from aioengine.printable import get_logger
from aioengine.resolved_config import (
    DEFAULT_CPU_KV_CACHE_BYTES,
    DEFAULT_KV_CACHE_DIR_BYTES,
    AdmissionConfig,
    CacheConfig,
    DeviceType,
    ExecutorBackend,
    LogprobsMode,
    ModelInfo,
    ParallelConfig,
    ResolvedConfig,
    SchedulerConfig,
    SchedulingPolicy,
    WorkerConfig,
)

logger = get_logger(__name__)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "dense", "exact", "fast"]
KvCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]

_DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# A chunk of this size keeps one step of a 135M model under a second on two cores, so that others keep streaming.
_DEFAULT_MAX_NUM_BATCHED_TOKENS_CPU = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str = setting("smollm2", 'built-in alias ("smollm2", "gemma3-270m"), folder, .gguf file or Hugging Face repository')
    tokenizer: str | None = setting(None, "folder or repository to take the tokenizer from", unset="the model's own")
    dtype: Dtype = setting(
        "auto",
        "of weights and activations",
        unset="auto, float32 on CPU, the checkpoint's own on CUDA",
        more="What is stored in float32 runs in bfloat16 on CUDA: it would take twice the memory and several times the time.",
    )
    device: str = setting("auto", "where the model runs: cpu, cuda or cuda:N", unset="auto, CUDA if there is one", read=read_device)
    weights: Weights = setting(
        "auto",
        "how the CPU multiplies: exact on the packed weights (some 1e-5 from float32); fast, with activations of mostly 8 bits; "
        "dense, the float32 reference",
        unset="auto, fast for a quantized model, exact for others, unless --dtype is given or the machine cannot",
        more="exact multiplies float32 weights in float32, quantized ones with activations of 16 bits. fast rounds those of the layers to "
        "8 bits, but for the groups that stand out of their row. dense takes dequantized weights and PyTorch's own kernels. CUDA is "
        "always dense.",
    )
    kv_cache_dtype: KvCacheDtype = setting(
        "auto",
        "of the stored keys and values; fp8 on GPUs",
        unset="auto, the dtype; float16 where the weights are fast",
        more="int8 is for the CPU. fp8 (e4m3, unscaled) takes half the memory of bfloat16, on GPUs of compute capability 8.9.",
    )
    max_model_len: int | Literal["auto"] | None = setting(
        "auto",
        "longest prompt and output together, in tokens",
        unset="auto, the model's limit or what the KV cache holds",
        more="The log says if the memory of the KV cache holds less of one request than the model's limit. A number that does not fit "
        "is an error.",
        least=2,  # one token in, one token out
    )
    max_num_seqs: int = setting(64, "requests that run at once", least=1, most=1 << 16)
    max_num_batched_tokens: int | None = setting(None, "tokens of one step", unset="512 on CPU, 2048 on CUDA", least=1)
    enable_chunked_prefill: bool = setting(True, "split prompts that do not fit into one step", unset="yes")
    long_prefill_token_threshold: int = setting(0, "most tokens of one step for one request while others run or wait; 0: no limit")
    scheduling_policy: SchedulingPolicy = setting(
        "fcfs",
        "order of waiting requests",
        more="fcfs: by arrival; priority: a lower number first, equals by arrival; sjf: short prompts first, with aging.",
    )
    async_scheduling: bool = setting(
        True, "schedule the next step while the current one runs", unset="yes", more="Off: one step at a time, with the same tokens."
    )
    block_size: int = setting(16, "tokens a KV-cache block", least=1, most=1 << 16)
    num_kv_cache_blocks: int | None = setting(
        None,
        "KV-cache blocks, the null block included",
        unset="as many as the memory allows",
        least=2,  # the null block and one more
        most=1 << 24,  # each takes memory of the host's too
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "most memory for the KV cache on CPU",
        unset="1GiB, or half of what is free if less",
        more="Of all ranks together, with tensor_parallel_size.",
        least=1,
        most=INT64_MAX,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        f"share of the GPU's memory to use, at most {MAX_GPU_MEMORY_UTILIZATION}",
        more="Weights, activations and KV cache together.",
        read=read_share,
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of equal prompt beginnings", unset="yes")
    prefix_caching_seed: str | None = setting(None, "fixes the block hashes", unset="random, other ones in each process", may_be_empty=True)
    kv_cache_dir: str | None = setting(
        None,
        "folder that keeps KV-cache blocks on disk, for this engine when it starts again and for others of the same model",
        unset="none",
        more="What leaves the KV cache is written there, and what it holds at shutdown; a prompt whose beginning is there is loaded "
        "instead of computed. It tells what was asked: it is made for its owner alone.",
    )
    kv_cache_dir_bytes: int = setting(
        DEFAULT_KV_CACHE_DIR_BYTES, "most bytes that kv_cache_dir takes: the longest unused blocks go first", least=1 << 20, most=INT64_MAX
    )
    zero_new_blocks: bool = setting(
        False,
        "clear KV-cache blocks before use",
        unset="no",
        more="No attention backend here needs it: none reads a slot that was not written.",
    )
    attention_backend: str = setting("auto", "attention implementation", unset="auto, the first that fits")
    enforce_eager: bool = setting(False, "no CUDA graphs", unset="no")
    num_threads: int | None = setting(
        None,
        "CPU threads of the model",
        unset="all cores",
        more="Of each rank, with tensor_parallel_size: by default the ranks of a machine share its cores.",
        least=1,
        most=4096,
    )
    cpu_affinity: tuple[int, ...] | None = setting(
        None,
        "the only cores for the CPU threads of the model, such as 0-3,8",
        unset="wherever the system puts them",
        more="A list, or that text. Linux only. As many threads as cores, if num_threads does not say less; ranks of tensor_parallel_size "
        "share them out, each has its own. The event loop and the tokenizer stay where they are.",
        read=read_cores,
    )
    tensor_parallel_size: int = setting(
        1,
        "ranks that share each layer, each a process with a part of the weights and of the KV cache",
        more="It must divide the model's attention heads, KV heads and MLP.",
        least=1,
        most=1024,
    )
    distributed_executor_backend: ExecutorBackend | None = setting(
        None,
        "where ranks run: uniproc, a thread of this process; multiproc, processes of this machine; ray, wherever Ray places them",
        unset="uniproc for one rank, else multiproc",
        more="ray needs the extra aioengine[ray].",
    )
    seed: int | None = setting(None, "where requests without a seed of their own get it from", unset="the operating system", most=2**64 - 1)
    check_invariants: bool | None = setting(None, "check the scheduler's books after every call, slow", unset="no, or AIOENGINE_CHECK=1")
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs",
        "what logprobs report: before (raw) or after (processed) penalties, masks and temperature",
        more="..._logprobs: log-probabilities; ..._logits: the logits themselves.",
    )
    logits_processors: tuple[str, ...] = setting(
        (),
        "a batch-level logits processor, MODULE:NAME",
        unset="none",
        more="A list of them; see aioengine/worker/sample/logits_processor.py.",
        read=read_logits_processors,
    )
    loras: tuple[tuple[str, str], ...] = setting(
        (),
        "a LoRA adapter to load at start, NAME=FOLDER in PEFT's form",
        unset="none",
        more="A mapping of names to folders; see docs/models.md.",
        read=read_loras,
    )
    num_speculative_tokens: int = setting(
        0,
        "draft N tokens ahead from n-grams and check them in one step; 0: off",
        most=1024,
        more="The output stays the same; it pays for text that repeats itself (see aioengine/core/ngram_proposer.py). On the CPU only, "
        "and steps do not overlap then.",
    )
    prompt_lookup_min: int = setting(2, "shortest n-gram that is looked up for a draft token", least=1, most=1024)
    prompt_lookup_max: int = setting(4, "longest n-gram that is looked up for a draft token", least=1, most=1024)
    max_num_queued_reqs: int | None = setting(
        None,
        "refuse requests while that many wait",
        unset="no limit",
        more="A new one gets EngineOverloadedError. A request counts n times, and waits at least until the next step is scheduled.",
        least=1,
        most=INT64_MAX,
    )
    max_num_queued_tokens: int | None = setting(
        None, "refuse requests while those that wait have that many prompt tokens", unset="no limit", least=1, most=INT64_MAX
    )
    step_timeout_s: float | None = setting(
        None,
        "end the engine if a step takes longer, in seconds",
        unset="no limit",
        more="A message says which step. Time counts while the worker has it, compiling kernels in the first steps included.",
        read=read_seconds,
    )

    def __post_init__(self) -> None:
        for item in SETTINGS:
            object.__setattr__(self, item.name, item.read(getattr(self, item.name)))
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max must be an integer >= {self.prompt_lookup_min} (prompt_lookup_min), got {self.prompt_lookup_max}"
            )

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
                kv_cache_dir=self._check_kv_cache_dir(model),
                kv_cache_dir_bytes=self.kv_cache_dir_bytes,
                has_kv_connector=self.kv_cache_dir is not None,
                kv_cache_groups=group_layers(model.windows),
            ),
            worker=self._resolve_worker(model, device, device_index=int(index) if index else None),
            admission=AdmissionConfig(
                max_num_queued_reqs=self.max_num_queued_reqs,
                max_num_queued_tokens=self.max_num_queued_tokens,
                step_timeout_s=self.step_timeout_s,
            ),
            seed=self.seed,
            check_invariants=_checks_by_environment() if self.check_invariants is None else self.check_invariants,
            parallel=self._resolve_parallel(),
        )

    def _check_kv_cache_dir(self, model: ModelInfo) -> str | None:
        if self.kv_cache_dir is None:
            return None
        if not self.enable_prefix_caching:
            raise ConfigError(f"kv_cache_dir ({self.kv_cache_dir}) keeps cached prefixes, which enable_prefix_caching=False forbids")
        if any(window is not None for window in model.windows):
            raise ConfigError(f"kv_cache_dir ({self.kv_cache_dir}) is for models without sliding windows: {model.name} has layers with one")
        backend = self._resolve_parallel().distributed_executor_backend
        if backend != "uniproc":
            raise ConfigError(f'kv_cache_dir ({self.kv_cache_dir}) is for one rank in this process, not for "{backend}"')
        return self.kv_cache_dir

    def _check_loras(self) -> tuple[tuple[str, str], ...]:
        if self.loras and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"LoRA adapters are for a model in one piece: tensor_parallel_size must be 1 with loras, got {self.tensor_parallel_size}"
            )
        return self.loras

    def _resolve_parallel(self) -> ParallelConfig:
        size, backend = self.tensor_parallel_size, self.distributed_executor_backend
        if backend == "uniproc" and size > 1:
            raise ConfigError(
                f'distributed_executor_backend="uniproc" is one rank, but tensor_parallel_size is {size}: take "multiproc" or "ray"'
            )
        return ParallelConfig(size, backend or ("uniproc" if size == 1 else "multiproc"))

    def _resolve_worker(self, model: ModelInfo, device: DeviceType, *, device_index: int | None) -> WorkerConfig:
        dtype = self._resolve_dtype(model, device)
        weights = self._resolve_weights(model, device)
        allow_dense = self.weights == "auto" and weights != "dense"
        kv_cache_dtype: str = self.kv_cache_dtype
        if kv_cache_dtype == "auto":
            kv_cache_dtype = "float16" if weights == "fast" else dtype
        cores = self._check_cores()
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
            # Nobody has captured NCCL's sums in a graph yet.
            enforce_eager=self.enforce_eager or (device == "cuda" and self.tensor_parallel_size > 1),
            num_threads=self.num_threads if cores is None else self.num_threads or len(cores) // self.tensor_parallel_size,
            cpu_affinity=cores,
            logprobs_mode=self.logprobs_mode,
            logits_processors=self.logits_processors,
            loras=self._check_loras(),
        )

    def _check_cores(self) -> tuple[int, ...] | None:
        """Those of `cpu_affinity`, if this process may use them and no thread of a rank goes without."""
        if self.cpu_affinity is None:
            return None
        if self._resolve_parallel().distributed_executor_backend == "ray":
            raise ConfigError(
                f'cpu_affinity ({format_cores(self.cpu_affinity)}) is of this machine, and "ray" runs ranks on others: leave it out'
            )
        check_cores("cpu_affinity", self.cpu_affinity, num_ranks=self.tensor_parallel_size, num_threads=self.num_threads or 1)
        return self.cpu_affinity

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
            # Draft tokens continue known tokens, so the step before has to be over.
            async_scheduling=self.async_scheduling and self.num_speculative_tokens == 0,
            num_speculative_tokens=self.num_speculative_tokens,
            prompt_lookup_min=self.prompt_lookup_min,
            prompt_lookup_max=self.prompt_lookup_max,
            fit_max_model_len=is_auto,
        )


def default_kv_cache_bytes(free_memory_bytes: int) -> int:
    """Most memory for the KV cache on a CPU if the user gives no number."""
    return min(DEFAULT_CPU_KV_CACHE_BYTES, free_memory_bytes // 2)


SETTINGS = settings_of(EngineConfig)
"""All that the user may say, for the check of the values and for the command line."""
EngineConfig.__doc__ = docstring(
    'The settings of an engine; the names are vLLM\'s where vLLM has them. `None` and "auto" mean: decide for me.', SETTINGS
)


def _checks_by_environment() -> bool:
    given = os.environ.get("AIOENGINE_CHECK", "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"the environment variable AIOENGINE_CHECK must be 1 or 0, got {given!r}")
    return given == "1"
