"""An engine without a model, and what every test wants to know afterwards: has it left anything behind?"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from aioengine.core.invariants import check_idle
from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer
from tests.waiting import until

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "check_invariants": True, "seed": 0}


@dataclass(frozen=True, slots=True)
class Rig:
    engine: AsyncEngine
    executor: FakeExecutor

    async def settle(self) -> None:
        """Wait until nothing is left to do, the worker's clean-up included; then nothing may be left over."""
        core = self.engine._life.started().core
        await until(lambda: core.is_idle)
        assert self.executor.req_ids == set(), "the worker still holds requests"
        assert self.executor.num_used_slots == 0
        check_idle(core.scheduler)
        assert self.engine._life.started().output.num_live == 0


StartRig = Callable[..., AbstractAsyncContextManager[Rig]]


@contextlib.asynccontextmanager
async def _start_rig(executor: FakeExecutor | None = None, *, tokenizer: Any = "fake", **options: Any) -> AsyncIterator[Rig]:
    settings = {**OPTIONS, **options}
    executor = executor or FakeExecutor(num_blocks=129, block_size=settings["block_size"], max_num_seqs=settings["max_num_seqs"])
    engine = AsyncEngine(executor=executor, tokenizer=FakeTokenizer() if tokenizer == "fake" else tokenizer, **settings)
    async with engine:
        yield Rig(engine, executor)
    assert executor.is_shut_down


@pytest.fixture
def start_rig() -> StartRig:
    return _start_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """An engine with the default options; checked for leaks at the end."""
    async with _start_rig() as rig:
        yield rig
        await rig.settle()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    return until
