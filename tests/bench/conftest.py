"""Benchmarks on an engine without a model, and records made by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.testing import FakeExecutor, FakeTokenizer
from aioengine_bench.host import Host
from aioengine_bench.timeline import Outcome, RequestRecord

MakeRecord = Callable[..., RequestRecord]


@pytest.fixture
def make_record() -> MakeRecord:
    """A record: when it was sent, when its chunks came (one token each unless `sizes` says more)."""

    def make(
        send: float,
        chunks: Sequence[float],
        *,
        sizes: Sequence[int] | None = None,
        index: int = 0,
        prompt_len: int = 4,
        due: float | None = None,
        outcome: Outcome = "completed",
    ) -> RequestRecord:
        return RequestRecord(
            index=index,
            prompt_len=prompt_len,
            due_time=send if due is None else due,
            send_time=send,
            chunk_times=tuple(chunks),
            chunk_sizes=tuple(sizes or [1] * len(chunks)),
            outcome=outcome,
        )

    return make


class FakeHost:
    """Hands out engines on a `FakeExecutor`; remembers them."""

    def __init__(self, **executor_options: Any) -> None:
        self.engines: list[AsyncEngine] = []
        self._options: dict[str, Any] = {"num_blocks": 1025, **executor_options}

    @contextlib.asynccontextmanager
    async def started_engine(self, config: EngineConfig, publish: PublishOptions) -> AsyncIterator[AsyncEngine]:
        executor = FakeExecutor(block_size=config.block_size, **self._options)
        engine = AsyncEngine(config, executor=executor, tokenizer=FakeTokenizer(), record=publish.record)
        self.engines.append(engine)
        async with engine:
            yield engine

    def host(self) -> Host:
        def nothing(parser: argparse.ArgumentParser) -> None:
            """These options are the command line's."""

        def run(main: Coroutine[Any, Any, bool]) -> None:
            asyncio.run(main)

        return Host(
            add_engine_options=nothing,
            add_model_option=nothing,
            add_log_option=nothing,
            engine_config=lambda args: EngineConfig(seed=0),
            publish_options=lambda args: PublishOptions(),
            run=run,
            started_engine=self.started_engine,
        )


@pytest.fixture
def make_host() -> Callable[..., FakeHost]:
    return FakeHost
