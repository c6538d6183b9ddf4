"""The load generator: sends requests when they are due, stamps what comes back, and never loses a record.

Send times are absolute, so a late wake-up delays one request and does not shift those after it. A record exists for
every request that was sent, whatever became of it, also when the run is interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from aioengine.errors import EngineDeadError
from aioengine_bench.client import Client, RequestAborted
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.timeline import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class LoadResult:
    """records: in the order in which requests ended. duration: seconds from the start to the last content, or to the interruption."""

    records: list[RequestRecord]
    start_time: float
    duration: float
    interrupted: bool = False


@dataclass(slots=True)
class _Progress:
    """What is known of a request that is out."""

    send_time: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0


class LoadGenerator:
    """Runs one load against one client.

    max_concurrency: requests out at once; those due meanwhile wait here, which no latency includes.
    on_done: called with each record as its request ends.
    """

    def __init__(
        self,
        client: Client,
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[RequestRecord], object] | None = None,
        request_id_prefix: str = "bench-",
    ) -> None:
        self._client = client
        self._limit: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._on_done = on_done or (lambda record: None)
        self._request_id_prefix = request_id_prefix
        self._records: list[RequestRecord] = []
        self._engine_error: EngineDeadError | None = None

    async def run(self, requests: Sequence[BenchRequest], due_times: Sequence[float]) -> LoadResult:
        """Send `requests[i]` `due_times[i]` seconds from now. Cancelling ends the run and still returns what there is.

        Raises EngineDeadError if the engine died before any request was completed.
        """
        start = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        interrupted = False
        try:
            for index, (request, due) in enumerate(zip(requests, due_times, strict=True)):
                delay = start + due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                if self._engine_error is not None:
                    break
                tasks.append(asyncio.create_task(self._send(index, request, start + due)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine_error is not None and not any(record.outcome == "completed" for record in self._records):
            raise self._engine_error
        end = time.perf_counter() if interrupted else max((record.end_time for record in self._records), default=start)
        return LoadResult(self._records, start, max(0.0, end - start), interrupted)

    async def _send(self, index: int, request: BenchRequest, due_time: float) -> None:
        progress: _Progress | None = None
        outcome, error = "completed", ""
        try:
            async with self._limit:
                progress = _Progress(time.perf_counter())
                await self._receive(index, request, progress)
        except asyncio.CancelledError:
            outcome, error = "aborted", "interrupted"
            raise
        except RequestAborted as exc:
            outcome, error = "aborted", str(exc)
        except Exception as exc:  # a failed request is a result, not the end of the run
            outcome, error = "failed", f"{type(exc).__name__}: {exc}"
            if isinstance(exc, EngineDeadError):
                self._engine_error = exc
        finally:
            if progress is not None:  # else it never left the client
                self._finish(index, request, due_time, progress, outcome, error)

    async def _receive(self, index: int, request: BenchRequest, progress: _Progress) -> None:
        chunks = self._client.send(request, request_id=f"{self._request_id_prefix}{index}")
        try:
            async for chunk in chunks:
                progress.chunk_times.append(time.perf_counter() if chunk.time is None else chunk.time)
                progress.chunk_sizes.append(chunk.num_tokens)
                progress.text.append(chunk.text)
                progress.num_cached_tokens = chunk.num_cached_tokens
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()  # an interrupted stream is ended here, not whenever it is collected

    def _finish(self, index: int, request: BenchRequest, due_time: float, progress: _Progress, outcome: str, error: str) -> None:
        if outcome == "completed" and not progress.chunk_times:
            outcome, error = "failed", "the answer has no content"
        kind: Outcome = "completed" if outcome == "completed" else "aborted" if outcome == "aborted" else "failed"
        record = RequestRecord(
            index=index,
            prompt_len=request.prompt_len,
            due_time=due_time,
            send_time=progress.send_time,
            chunk_times=tuple(progress.chunk_times),
            chunk_sizes=tuple(progress.chunk_sizes),
            outcome=kind,
            error=error,
            text="".join(progress.text),
            num_cached_tokens=progress.num_cached_tokens,
        )
        self._records.append(record)
        self._on_done(record)
