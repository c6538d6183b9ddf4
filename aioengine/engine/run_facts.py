"""What the bits of an engine's tokens depend on beside its settings: written into the header of a recording."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioengine.engine.startup import EngineSetup


@dataclass(frozen=True, slots=True)
class RunFacts:
    """None: it does not concern this run (a fake executor has no weights), or nobody asked (only recordings hash the model)."""

    model_sha256: str | None = None  # of the weight files, in the order of their names
    weights: str | None = None  # as they were loaded: dense, exact or fast
    isa: str | None = None  # of the native kernels, where they run
    torch: str | None = None
    num_threads: int | None = None


async def find_run_facts(setup: EngineSetup, *, with_digest: bool) -> RunFacts:
    """Of an engine whose weights are loaded. with_digest: also hash the model's files, about a second a gigabyte, in a thread."""
    if setup.files is None:
        return RunFacts()
    is_native, *_ = await asyncio.wrap_future(setup.executor.collective_rpc("runs_native_kernels"))
    worker = setup.config.worker
    return RunFacts(
        model_sha256=await asyncio.to_thread(hash_files, setup.files.weights) if with_digest else None,
        weights=worker.weights if is_native or worker.device != "cpu" else "dense",
        isa=_isa() if is_native else None,
        torch=_version("torch"),
        num_threads=worker.num_threads or max(_num_cores() // setup.config.parallel.tensor_parallel_size, 1),
    )


def hash_files(paths: Iterable[Path]) -> str:
    """sha256 of the contents, in the order of the files' names."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _isa() -> str:
    from aioengine_kernels.cpu.library import choose_isa

    return choose_isa()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
