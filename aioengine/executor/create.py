"""Which executor the settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles
    from aioengine.executor.base import Executor


def create_executor(config: ResolvedConfig, files: ModelFiles) -> Executor:
    """Cheap: threads, processes and actors start with its first call. Raises ConfigError if it is not possible here."""
    backend = config.parallel.distributed_executor_backend
    if backend == "multiproc":
        from aioengine.executor.multiproc import create_multiproc_executor

        return create_multiproc_executor(config, files=files)
    if backend == "ray":
        from aioengine.executor.ray import create_ray_executor

        return create_ray_executor(config, files=files)
    from aioengine.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config, files=files)
