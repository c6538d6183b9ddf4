"""aioengine itself, held to the same protocol as its peers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from protocol import Answer, Request, serve

from aioengine import AsyncEngine, SamplingParams, __version__


class AioEngine:
    """The engine in this process, its event loop driven from outside between runs."""

    name = "aioengine"
    tells_tokens = True
    version = __version__
    note = "AsyncEngine, one stream a request"

    def __init__(self, settings: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncEngine(
            settings["model"],
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=settings["max_model_len"],
            num_threads=settings["num_threads"],
            **settings.get("options", {}),
        )
        self._loop.run_until_complete(self._engine.start())
        worker = self._engine.resolved_config.worker
        self.precision = f"{worker.weights} weights, {worker.kv_cache_dtype} KV cache"

    def run(self, requests: list[Request]) -> list[Answer]:
        self._engine.reset_prefix_cache()
        return self._loop.run_until_complete(self._run(requests))

    async def _run(self, requests: list[Request]) -> list[Answer]:
        start = time.perf_counter()
        return list(await asyncio.gather(*(self._stream(request, start) for request in requests)))

    async def _stream(self, request: Request, start: float) -> Answer:
        answer = Answer()
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        async for output in self._engine.generate(request["prompt"], params):
            answer.add(time.perf_counter() - start, output.token_ids[len(answer.token_ids) :])
        return answer

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.shutdown())
        self._loop.close()


if __name__ == "__main__":
    serve(AioEngine)
