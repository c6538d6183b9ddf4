"""One worker: a device, the model on it, its KV cache, and the runner."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.attention.registry import select_attention_backend
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.distributed.group import SINGLE_RANK, Group
from aioengine.errors import ConfigError, ModelError
from aioengine.kv_cache_groups import longest_request, num_blocks_of_request, num_layer_caches
from aioengine.outputs import ModelRunnerOutput
from aioengine.printable import get_logger
from aioengine.resolved_config import GIB, ResolvedConfig
from aioengine.worker.device import create_device, limit_torch_threads
from aioengine.worker.kv_blocks import block_bytes, read_blocks, write_blocks
from aioengine.worker.model_runner import ModelRunner
from aioengine.worker.pipeline.async_output import AsyncOutput
from aioengine.worker.rank_config import config_of_rank
from aioengine.worker.sample.logits_processor import find_logits_processors

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles
    from aioengine.executor.base import GrammarOutput
    from aioengine.models.base import CausalLM
    from aioengine.worker.memory_profile import Reservation

logger = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Worker:
    """Lives in one thread: construct it there, then call `load_model`, `determine_num_kv_cache_blocks`,
    `initialize_kv_cache`, and `execute_model` and `sample_tokens` in turns. Only `shutdown` may come from elsewhere,
    when that thread has ended."""

    def __init__(self, config: ResolvedConfig, *, files: ModelFiles, group: Group = SINGLE_RANK) -> None:
        """group: the ranks that share the model; `config` is that of all of them."""
        self.group = group
        config = self.config = config_of_rank(config, group)
        self._files = files
        self.device = create_device(config.worker)
        self.device.set_up_thread()
        # What is wrong with a name or with the environment is found before the weights are read.
        find_logits_processors(config.worker.logits_processors)
        if config.worker.device == "cpu":
            check_instruction_set()
        self._dtype = _DTYPES[config.worker.dtype]
        self._backend: AttentionBackend = select_attention_backend(
            config.worker.attention_backend, _attention_config(config, self._dtype), self.device.torch_device
        )
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None

    @property
    def runner(self) -> ModelRunner:
        """The runner; there is none before `initialize_kv_cache`."""
        if self._runner is None:
            raise RuntimeError("the worker has no KV cache yet: call load_model() and initialize_kv_cache() first")
        return self._runner

    def load_model(self) -> None:
        """Read the weights onto the device. Raises ModelError if they do not fit the model."""
        from aioengine.models.loader import load_model

        self._model = load_model(
            self._files,
            info=self.config.model,
            device=self.device.torch_device,
            dtype=self._dtype,
            attention_backend=self._backend,
            weights=self.config.worker.weights,
            allow_dense=self.config.worker.allow_dense,
            group=self.group,
        )
        if self._model.runs_own_threads:
            # What is left to PyTorch is small, and its threads would fight the model's for the cores.
            limit_torch_threads(1)

    def runs_native_kernels(self) -> bool:
        """The packed weights' own kernels run the model, not PyTorch's. After `load_model`."""
        assert self._model is not None, "load_model() comes first"
        return self._model.runs_own_threads

    def determine_num_kv_cache_blocks(self) -> int:
        """How many blocks, the null block included: what the settings say, else what fits into the allowed memory.

        Never more than all requests that may run at once could use. Raises ConfigError if the memory does not hold a
        single request of `max_model_len` tokens, unless that was left open.
        """
        cache, scheduler = self.config.cache, self.config.scheduler
        if cache.num_kv_cache_blocks is not None:
            return cache.num_kv_cache_blocks
        assert self._model is not None, "load_model() comes first: it takes its share of the memory"
        bytes_per_block = self._backend.kv_cache_bytes_per_block() * num_layer_caches(cache.kv_cache_groups)
        available = self.device.kv_cache_memory_bytes(cache, run_largest_step=self._run_largest_step, reserved=self._reserved())
        groups, step_tokens = cache.kv_cache_groups, scheduler.max_num_batched_tokens
        blocks_per_request = num_blocks_of_request(
            groups, scheduler.max_model_len, block_size=cache.block_size, max_step_tokens=step_tokens
        )
        num_blocks = min(available // bytes_per_block, scheduler.max_num_seqs * blocks_per_request + 1)
        if num_blocks < blocks_per_request + 1:
            tokens_that_fit = longest_request(
                groups, max(num_blocks - 1, 0), block_size=cache.block_size, max_step_tokens=step_tokens, limit=scheduler.max_model_len
            )
            need = f"{(blocks_per_request + 1) * bytes_per_block / GIB:.2f} GiB"
            if not scheduler.fit_max_model_len or tokens_that_fit < 2:
                raise ConfigError(
                    f"the KV cache of one request of max_model_len ({scheduler.max_model_len}) tokens takes "
                    f"{need}, but {available / GIB:.2f} GiB are allowed, "
                    f"which hold {tokens_that_fit} tokens; lower max_model_len or raise {self.device.kv_cache_memory_setting}"
                )
            logger.warning(
                "max_model_len is %d tokens, which %.2f GiB of KV cache hold; the %d of %s take %s (raise %s)",
                tokens_that_fit,
                available / GIB,
                scheduler.max_model_len,
                self.config.model.name,
                need,
                self.device.kv_cache_memory_setting,
            )
        logger.info("KV cache: %d blocks of %d tokens, %.2f GiB", num_blocks, cache.block_size, num_blocks * bytes_per_block / GIB)
        return num_blocks

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the layers' caches, of which layers at the same place of several groups share one; block 0 is the null block.

        Then capture the graphs of decode steps, on a GPU.
        """
        assert self._model is not None, "load_model() comes first"
        self.config = self.config.fitted(num_blocks)
        num_caches = num_layer_caches(self.config.cache.kv_cache_groups)
        kv_caches = [self._backend.allocate_kv_cache(num_blocks, self.device.torch_device) for _ in range(num_caches)]
        self._runner = ModelRunner(self.config, model=self._model, attention_backend=self._backend, kv_caches=kv_caches, device=self.device)
        if self.device.compiles_kernels:
            self._runner.warm_up()
        if self._captures_graphs:
            self._runner.capture_graphs()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the output to the state and run the forward."""
        self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[Any]:
        """Sample for the oldest executed step that has not been sampled. See `ModelRunner.sample_tokens`."""
        return self.runner.sample_tokens(grammar_output)

    def load_lora(self, name: str, folder: str) -> str:
        """Take an adapter in the form of PEFT's folders; returns the sha256 of its content.

        Raises ModelError if it is damaged or does not fit the model, ConfigError if the model takes none.
        """
        from aioengine.checkpoint.lora import read_adapter

        assert self._model is not None, "load_model() comes first"
        adapter = read_adapter(Path(folder))
        try:
            self._model.load_adapter(name, adapter)
        except ModelError as error:
            raise ModelError(f"{folder} does not fit {self.config.model.name}: {error}") from error
        return adapter.sha256

    def unload_lora(self, name: str) -> None:
        """Forget an adapter. No request may have it any more."""
        assert self._model is not None
        self._model.unload_adapter(name)

    def kv_block_layout(self) -> tuple[str, int]:
        """What the bytes of `read_kv_blocks` depend on, for people and for comparison, and how many a block has."""
        blocks = self.runner.kv_blocks
        shapes = ",".join("x".join(map(str, cache.shape[1:])) for cache in blocks[:1])
        return f"{self._backend.name}:{len(blocks)}*{shapes}:{blocks[0].dtype}", block_bytes(blocks)

    def read_kv_blocks(self, block_ids: list[int]) -> memoryview:
        """The content of blocks, one behind the other, all layers of each."""
        return memoryview(read_blocks(self.runner.kv_blocks, block_ids).numpy()).cast("B")  # type: ignore[arg-type]  # Python 3.11 has no Buffer

    def write_kv_blocks(self, block_ids: list[int], contents: list[bytes]) -> None:
        """Give blocks the content that `read_kv_blocks` read. Raises ValueError for another number of bytes."""
        content = torch.frombuffer(bytearray().join(contents), dtype=torch.uint8)
        write_blocks(self.runner.kv_blocks, block_ids, content.view(len(block_ids), -1))

    def _run_largest_step(self) -> None:
        from aioengine.worker.largest_step import run_largest_step

        assert self._model is not None
        run_largest_step(
            self._model,
            backend=self._backend,
            scheduler=self.config.scheduler,
            cache=self.config.cache,
            vocab_size=self.config.model.vocab_size,
            device=self.device.torch_device,
            logprobs_mode=self.config.worker.logprobs_mode,
        )

    @property
    def _captures_graphs(self) -> bool:
        assert self._model is not None, "load_model() comes first"
        supported = self.device.supports_graphs and self._backend.supports_graphs and self._model.supports_graphs
        return supported and not self.config.worker.enforce_eager

    def _reserved(self) -> Reservation:
        """What `initialize_kv_cache` allocates behind the cache, on a GPU."""
        from aioengine.worker.memory_profile import Reservation, reserve

        if not self.device.compiles_kernels:
            return Reservation()
        from aioengine.worker.pipeline.device import pipeline_bytes

        scheduler, model = self.config.scheduler, self.config.model
        tables = pipeline_bytes(scheduler, self.config.cache, vocab_size=model.vocab_size)
        return reserve(scheduler, tables=tables, has_graphs=self._captures_graphs)

    def shutdown(self) -> None:
        """Let go of the weights and the KV cache."""
        self._runner = None
        self._model = None
        self.device.release_memory()


def check_instruction_set() -> None:
    """Raise ConfigError if AIOENGINE_CPU_ISA names no instruction set that the native kernels have here."""
    from aioengine_kernels.cpu.library import ISA_VARIABLE, choose_isa, status

    if status() is not None:
        return  # nobody reads the variable then
    try:
        choose_isa()
    except ValueError as exc:
        raise ConfigError(f"the environment variable {ISA_VARIABLE} is wrong: {exc}") from None


def _attention_config(config: ResolvedConfig, dtype: torch.dtype) -> AttentionConfig:
    model = config.model
    return AttentionConfig(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        dtype=dtype,
        kv_cache_dtype=_DTYPES[config.worker.kv_cache_dtype],
    )
