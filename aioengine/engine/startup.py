"""What an engine is made of, found and built. The slow parts block, so they run in a thread beside the event loop."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.config import EngineConfig, ModelInfo, ResolvedConfig
from aioengine.engine.detokenizer import TextTokenizer
from aioengine.errors import ConfigError
from aioengine.executor.base import Executor

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All that is known before anything is loaded onto a device."""

    model_info: ModelInfo
    tokenizer: TextTokenizer | None
    config: ResolvedConfig
    executor: Executor


async def find_parts(config: EngineConfig, *, tokenizer: TextTokenizer | None) -> EngineParts:
    """Find (or fetch) the model and resolve the settings for it. Raises ModelError and ConfigError."""
    files, info, own_tokenizer, cuda_available = await asyncio.to_thread(_find_model, config, needs_tokenizer=tokenizer is None)
    resolved = config.resolve(info, cuda_available=cuda_available, free_memory_bytes=free_memory_bytes())
    executor = await asyncio.to_thread(_make_executor, resolved, files)
    return EngineParts(info, own_tokenizer if tokenizer is None else tokenizer, resolved, executor)


def parts_for_executor(
    config: EngineConfig, executor: Executor, *, tokenizer: TextTokenizer | None, model_info: ModelInfo | None
) -> EngineParts:
    """For an executor that the user brought: no model is looked up. Raises ConfigError."""
    info = model_info or getattr(executor, "model_info", None)
    if info is None:
        raise ConfigError(f"executor={type(executor).__name__} was given without model_info=")
    # What the device really is, only the executor knows.
    resolved = config.resolve(info, cuda_available=config.device.startswith("cuda"), free_memory_bytes=free_memory_bytes())
    return EngineParts(info, tokenizer, resolved, executor)


def _find_model(config: EngineConfig, *, needs_tokenizer: bool) -> tuple[ModelFiles, ModelInfo, TextTokenizer | None, bool]:
    """Imports torch, which takes seconds. needs_tokenizer: without one it cannot go on; else it may still name stop ids."""
    # Read when torch loads OpenMP; a program that has imported torch before sets it itself. Threads that spin at the end
    # of each operation take the core from the event loop, and from whatever else runs: a third of the speed was left.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.checkpoint.tokenizer_files import has_tokenizer
    from aioengine.models.info import read_model_info, resolve_model

    files = resolve_model(config.model)
    folder = files.folder
    if config.tokenizer is not None:
        local = Path(config.tokenizer)
        folder = local if local.is_dir() else resolve_model(config.tokenizer).folder

    import torch

    tokenizer = load_tokenizer(folder) if needs_tokenizer or has_tokenizer(folder) else None
    return files, read_model_info(files, tokenizer=tokenizer), tokenizer, torch.cuda.is_available()


def _make_executor(config: ResolvedConfig, files: ModelFiles) -> Executor:
    from aioengine.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config, files=files)


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
