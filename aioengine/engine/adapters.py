"""The LoRA adapters that an engine has loaded: which names requests may give, and what their cached prefixes are kept under."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from aioengine.checks.engine_settings import MAX_LORAS, read_lora_name
from aioengine.errors import AioEngineError, ConfigError, InvalidRequestError
from aioengine.executor.base import Executor
from aioengine.request import Request
from aioengine.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class LoadedLora:
    name: str
    folder: str
    sha256: str

    @property
    def key(self) -> str:
        """What the block hashes of its requests hold: another content under the same name is another key."""
        return f"{self.sha256}:{self.name}"


class LoraAdapters:
    """Belongs to the engine's event loop. The worker takes its calls in order with the steps, so none is changed under a step."""

    def __init__(self, executor: Executor, *, config: ResolvedConfig, live_requests: Callable[[], Mapping[str, Request]]) -> None:
        self._executor = executor
        self._config = config
        self._live_requests = live_requests
        self._loaded: dict[str, LoadedLora] = {}
        self._busy: set[str] = set()  # names that are being loaded or unloaded

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def find(self, name: str) -> LoadedLora:
        """Raises InvalidRequestError for a name that nothing is loaded under."""
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            loaded = ", ".join(self._loaded) or "none"
            raise InvalidRequestError(f"no LoRA adapter is loaded as {name!r:.300}; loaded: {loaded:.1000}")
        return found

    def check_still(self, lora: LoadedLora) -> None:
        """Raise InvalidRequestError if what `find` gave has been unloaded since."""
        if self._loaded.get(lora.name) is not lora:
            raise InvalidRequestError(f"the LoRA adapter {lora.name!r} was unloaded before the request could start")

    async def load(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Raises ConfigError (a name in use, too many, a model that takes none) and ModelError (a folder that does not fit)."""
        name, path = read_lora_name(name), os.fspath(folder)
        if (size := self._config.parallel.tensor_parallel_size) > 1:
            raise ConfigError(f"LoRA adapters are for a model in one piece: tensor_parallel_size must be 1, got {size}")
        self._check_free(name)
        if name in self._loaded:
            raise ConfigError(f"a LoRA adapter is loaded as {name!r} already, from {self._loaded[name].folder}: unload it first")
        if len(self._loaded) + len(self._busy) >= MAX_LORAS:
            raise ConfigError(f"{MAX_LORAS} LoRA adapters are loaded, which is the limit: unload one before {name!r}")
        await self._undisturbed(name, self._load(name, path))

    async def unload(self, name: str) -> None:
        """Raises InvalidRequestError for an unknown name, AioEngineError while requests have it."""
        lora = self.find(name)
        self._check_free(name)
        num_live = sum(request.lora_name == name for request in self._live_requests().values())
        if num_live:
            raise AioEngineError(f"the LoRA adapter {name!r} is in use by {num_live} requests: let them end, or abort them, before it goes")
        del self._loaded[lora.name]  # from now on nobody gets it
        await self._undisturbed(name, self._unload(name))

    async def _load(self, name: str, path: str) -> None:
        (sha256,) = await asyncio.wrap_future(self._executor.collective_rpc("load_lora", name, path))
        self._loaded[name] = LoadedLora(name, path, sha256)

    async def _unload(self, name: str) -> None:
        await asyncio.wrap_future(self._executor.collective_rpc("unload_lora", name))

    async def _undisturbed(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """To its end, also if the caller is cancelled: the worker does it all the same, and the books must say so."""
        self._busy.add(name)
        task = asyncio.create_task(work, name="aioengine-lora")
        task.add_done_callback(lambda _: self._busy.discard(name))
        await asyncio.shield(task)

    def _check_free(self, name: str) -> None:
        if name in self._busy:
            raise ConfigError(f"the LoRA adapter {name!r} is just being loaded or unloaded: wait for that")
