"""What a load is sent to: an engine in this process or a server behind OpenAI's API, opened and closed as one thing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import ConfigError
from aioengine_bench.client import Client, EngineClient
from aioengine_bench.datasets import BenchRequest, check_lengths, load_dataset
from aioengine_bench.host import Host
from aioengine_bench.http_client import HttpClient, list_models
from aioengine_bench.results import environment
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import DatasetSpec, RemoteSpec


@dataclass(frozen=True, slots=True)
class Target:
    """facts: what a result says of it, asked for after the run. reset: forget cached prompts; None: that is not in our power."""

    client: Client
    tokenizer: TextTokenizer
    vocab_size: int
    max_model_len: int | None
    facts: Callable[[], dict[str, Any]]
    reset: Callable[[], object] | None

    def requests(self, dataset: DatasetSpec) -> list[BenchRequest]:
        """Raises ConfigError, also for those that it cannot take."""
        requests = load_dataset(dataset, self.tokenizer, vocab_size=self.vocab_size)
        if self.max_model_len is not None:
            check_lengths(requests, self.max_model_len)
        return requests


def opened_target(settings: ServeSettings, host: Host) -> contextlib.AbstractAsyncContextManager[Target]:
    """Raises ConfigError."""
    return _engine_target(settings, host) if settings.remote is None else _remote_target(settings, settings.remote)


@contextlib.asynccontextmanager
async def _engine_target(settings: ServeSettings, host: Host) -> AsyncIterator[Target]:
    async with host.started_engine(settings.config, settings.publish) as engine:

        def facts() -> dict[str, Any]:
            preemptions = engine.stats().num_preemptions
            return {"num_preemptions": preemptions, "engine": engine_settings(engine), "environment": environment()}

        yield Target(
            EngineClient(engine, settings.sampling),
            engine.tokenizer,
            engine.model_info.vocab_size,
            engine.resolved_config.scheduler.max_model_len,
            facts,
            engine.reset_prefix_cache,
        )


@contextlib.asynccontextmanager
async def _remote_target(settings: ServeSettings, remote: RemoteSpec) -> AsyncIterator[Target]:
    card = choose_model(await list_models(remote), remote)
    tokenizer, vocab_size = await asyncio.to_thread(load_tokenizer_of, settings.config)
    limit = card.get("max_model_len")
    client = HttpClient(remote, model=card["id"], sampling=settings.sampling, tokenizer=tokenizer)

    def facts() -> dict[str, Any]:
        known = {"model_id": card["id"], "num_preemptions": None, "engine": {}, "environment": environment()}
        return known | {"base_url": remote.base_url, "endpoint": remote.path}

    try:
        yield Target(client, tokenizer, vocab_size, limit if isinstance(limit, int) else None, facts, None)
    finally:
        await client.close()


def engine_settings(engine: AsyncEngine) -> dict[str, Any]:
    """What of the engine's settings a figure depends on."""
    resolved = engine.resolved_config
    stats = engine.stats()
    return {
        **dataclasses.asdict(resolved.worker),
        "max_num_seqs": resolved.scheduler.max_num_seqs,
        "max_num_batched_tokens": resolved.scheduler.max_num_batched_tokens,
        "max_model_len": resolved.scheduler.max_model_len,
        "async_scheduling": resolved.scheduler.async_scheduling,
        "enable_prefix_caching": resolved.cache.enable_prefix_caching,
        "block_size": resolved.cache.block_size,
        "num_kv_cache_blocks": stats.num_total_blocks + 1,
    }


def choose_model(cards: Sequence[dict[str, Any]], remote: RemoteSpec) -> dict[str, Any]:
    """The entry of `/v1/models` that is asked for. Raises ConfigError naming those there are."""
    for card in cards:
        if isinstance(card.get("id"), str) and remote.model in ("", card["id"]):
            return card
    names = ", ".join(str(card.get("id")) for card in cards) or "none"
    raise ConfigError(f"{remote.base_url} does not serve {remote.model!r}; it serves {names}")


def load_tokenizer_of(config: EngineConfig) -> tuple[TextTokenizer, int]:
    """And the size of its vocabulary. The model "fake" is that of `aioengine serve --fake`. Raises ModelError."""
    if config.model == "fake":
        from aioengine.testing import FakeTokenizer

        return FakeTokenizer(), FakeTokenizer.vocab_size
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.models.info import read_model_info, resolve_model

    files = resolve_model(config.tokenizer or config.model)
    return load_tokenizer(files.folder), read_model_info(files).vocab_size
