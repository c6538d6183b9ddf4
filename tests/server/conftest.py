"""An app over an engine without a model, asked through ASGI: no socket, no thread but the worker's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from aioengine.core.invariants import check_idle
from aioengine.engine.async_engine import AsyncEngine
from aioengine.server import ServerSettings, create_app
from aioengine.testing import FakeExecutor, FakeTokenizer, NextToken, default_next_token
from tests.waiting import until

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 2048,
    "block_size": 4,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Served:
    engine: AsyncEngine
    executor: FakeExecutor
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def chat(self, body: dict[str, Any] | None = None, *, status: int = 200, **fields: Any) -> Any:
        messages = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
        return await self.post("/v1/chat/completions", {**messages, **(body or {}), **fields}, status=status)

    async def complete(self, prompt: Any, *, status: int = 200, **fields: Any) -> Any:
        return await self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields}, status=status)

    async def events(self, path: str, body: dict[str, Any]) -> list[tuple[str | None, Any]]:
        """(name, data) of every event; data is None for [DONE]."""
        async with self.client.stream("POST", path, json={"temperature": 0, **body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = (await response.aread()).decode()
        found: list[tuple[str | None, Any]] = []
        for block in text.strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            found.append((lines.get("event"), None if lines["data"] == "[DONE]" else json.loads(lines["data"])))
        return found

    async def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The chunks of OpenAI's stream, which has to end with [DONE]."""
        body: dict[str, Any] = {"max_tokens": 8, **fields}
        if path.endswith("chat/completions"):
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        found = [data for _, data in await self.events(path, body)]
        assert found[-1] is None
        return found[:-1]

    @property
    def num_used_blocks(self) -> int:
        parts = self.engine._life.parts
        assert parts is not None
        pool = parts.core.scheduler.kv_cache_manager.block_pool
        return pool.num_blocks - 1 - pool.num_free_blocks


StartServed = Callable[..., AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def _serve(
    next_token: NextToken = default_next_token,
    *,
    executor: FakeExecutor | None = None,
    tokenizer: Any = "fake",
    settings: ServerSettings | None = None,
    raise_app_exceptions: bool = True,
    **options: Any,
) -> AsyncIterator[Served]:
    given = {**OPTIONS, **options}
    executor = executor or FakeExecutor(
        num_blocks=1025, block_size=given["block_size"], max_num_seqs=given["max_num_seqs"], next_token=next_token
    )
    engine = AsyncEngine(executor=executor, tokenizer=FakeTokenizer() if tokenizer == "fake" else tokenizer, **given)
    app = create_app(engine, settings or ServerSettings(served_model_names=["fake"]))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=raise_app_exceptions)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
        yield Served(engine, executor, client)


@pytest.fixture
def wait_for() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
def serve() -> StartServed:
    return _serve


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """With the default options; nothing may be left over at the end."""
    async with _serve() as served:
        yield served
        parts = served.engine._life.parts
        assert parts is not None
        core = parts.core
        await until(lambda: core.is_idle)
        check_idle(core.scheduler)
        assert served.executor.req_ids == set()
