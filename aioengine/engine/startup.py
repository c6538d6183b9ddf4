"""What an engine is made of, found and built. The slow parts block, so they run in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.config import EngineConfig
from aioengine.core.scheduler import Scheduler
from aioengine.engine.adapters import LoraAdapters
from aioengine.engine.inputs.admission import Admission
from aioengine.engine.inputs.input_processor import InputProcessor
from aioengine.engine.inputs.submission import Submitter
from aioengine.engine.loop.engine_core import EngineCore
from aioengine.engine.loop.request_times import RequestTimes
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.engine.outputs.output_processor import OutputProcessor
from aioengine.engine.parts import EngineParts
from aioengine.errors import ConfigError
from aioengine.events.bus import StepBus
from aioengine.executor.base import Executor
from aioengine.kv_connector.base import KVConnector
from aioengine.kv_connector.folder import open_folder, read_seed
from aioengine.resolved_config import ModelInfo, ResolvedConfig
from aioengine.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """All that is known before anything is loaded onto a device."""

    model_info: ModelInfo
    tokenizer: TextTokenizer | None
    config: ResolvedConfig
    executor: Executor
    files: ModelFiles | None = None  # None: the user brought the executor


async def find_setup(config: EngineConfig, *, tokenizer: TextTokenizer | None) -> EngineSetup:
    """Find (or fetch) the model and resolve the settings for it. Raises ModelError and ConfigError."""
    files, info, own_tokenizer, cuda_available = await asyncio.to_thread(_find_model, config, needs_tokenizer=tokenizer is None)
    resolved = config.resolve(info, cuda_available=cuda_available, free_memory_bytes=free_memory_bytes())
    executor = await asyncio.to_thread(_make_executor, resolved, files)
    return EngineSetup(info, own_tokenizer if tokenizer is None else tokenizer, resolved, executor, files)


def setup_for_executor(
    config: EngineConfig, executor: Executor, *, tokenizer: TextTokenizer | None, model_info: ModelInfo | None
) -> EngineSetup:
    """For an executor that the user brought: no model is looked up. Raises ConfigError."""
    info = model_info or getattr(executor, "model_info", None)
    if info is None:
        raise ConfigError(f"executor={type(executor).__name__} was given without model_info=")
    # What the device really is, only the executor knows.
    resolved = config.resolve(info, cuda_available=config.device.startswith("cuda"), free_memory_bytes=free_memory_bytes())
    return EngineSetup(info, tokenizer, resolved, executor)


async def load_model(setup: EngineSetup) -> tuple[EngineSetup, int]:
    """Load the weights and measure how many KV blocks fit; the settings then hold what that decides."""
    executor, config = setup.executor, setup.config
    await asyncio.wrap_future(executor.load_model())
    num_blocks = config.cache.num_kv_cache_blocks
    if num_blocks is None:
        num_blocks = await asyncio.wrap_future(executor.determine_num_kv_cache_blocks())
    seed = secrets.token_hex(16) if config.cache.kv_cache_dir is None else read_seed(open_folder(config.cache.kv_cache_dir))
    return replace(setup, config=config.fitted(num_blocks).with_prefix_caching_seed(seed)), num_blocks


def build_parts(
    setup: EngineSetup,
    *,
    num_kv_cache_blocks: int,
    bus: StepBus,
    publish_text: bool,
    on_failure: Callable[[BaseException], None],
    kv_connector: KVConnector | None = None,
) -> EngineParts:
    """Put together what runs in the event loop, which is the running one. The core is not started yet."""
    config, tokenizer = setup.config, setup.tokenizer
    model = config.model
    scheduler = Scheduler(
        config.scheduler,
        cache=config.cache,
        num_kv_cache_blocks=num_kv_cache_blocks,
        eos_token_ids=model.eos_token_ids,
        check_invariants=config.check_invariants,
    )
    structured_output = StructuredOutputManager(tokenizer, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
    times = RequestTimes()
    output = OutputProcessor(tokenizer, publish_text=publish_text, times=times)
    core = EngineCore(
        scheduler,
        setup.executor,
        bus=bus,
        on_outputs=output.process_outputs,
        on_failure=on_failure,
        check_invariants=config.check_invariants,
        step_timeout_s=config.admission.step_timeout_s,
        text_source=output if publish_text else None,
        structured_output=structured_output,
        times=times,
        kv_connector=kv_connector,
    )
    return EngineParts(
        loop=asyncio.get_running_loop(),
        model_info=setup.model_info,
        tokenizer=tokenizer,
        config=config,
        structured_output=structured_output,
        admission=Admission(config.admission, scheduler),
        input=InputProcessor(
            model,
            tokenizer,
            max_model_len=config.scheduler.max_model_len,
            max_tokens_limit=scheduler.max_tokens_limit,
            seed=config.seed,
            structured_output=structured_output,
        ),
        output=output,
        core=core,
        submitter=Submitter(core, output, publish_text=publish_text),
        loras=LoraAdapters(setup.executor, config=config, live_requests=lambda: scheduler.requests),
    )


def _find_model(config: EngineConfig, *, needs_tokenizer: bool) -> tuple[ModelFiles, ModelInfo, TextTokenizer | None, bool]:
    """Imports torch, which takes seconds. needs_tokenizer: without one it cannot go on; else it may still name stop ids."""
    # Read when torch loads OpenMP; a program that has imported torch before sets it itself. Threads that spin at the end
    # of each operation take the core from the event loop, and from whatever else runs: a third of the speed was left.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.checkpoint.tokenizer_files import has_tokenizer
    from aioengine.models.info import check_config, read_model_info, resolve_model
    from aioengine.models.tensor_parallel import check_divides

    files = resolve_model(config.model)
    folder = files.folder
    if config.tokenizer is not None:
        local = Path(config.tokenizer)
        folder = local if local.is_dir() else resolve_model(config.tokenizer).folder

    if config.tensor_parallel_size > 1:  # what does not divide is said before anything is started
        check_divides(check_config(files.folder)[1], config.tensor_parallel_size, name=files.name)

    import torch

    tokenizer = load_tokenizer(folder) if needs_tokenizer or has_tokenizer(folder) else None
    return files, read_model_info(files, tokenizer=tokenizer), tokenizer, torch.cuda.is_available()


def _make_executor(config: ResolvedConfig, files: ModelFiles) -> Executor:
    from aioengine.executor.create import create_executor

    return create_executor(config, files)


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping: MemAvailable where Linux tells it, else the free pages."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # macOS and Windows do not know one of them
        return 2 << 30
