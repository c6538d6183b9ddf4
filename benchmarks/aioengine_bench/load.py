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
from aioengine_bench.stops import Stops
from aioengine_bench.timeline import Outcome, RequestRecord


@dataclass(frozen=True, slots=True)
class LoadResult:
    """records: in the order in which requests ended. duration: seconds from the start to the last content, or to where it was ended.

    stop_reason: why it ended before its last request, in words.
    """

    records: list[RequestRecord]
    start_time: float
    duration: float
    interrupted: bool = False
    stop_reason: str | None = None


@dataclass(slots=True)
class _Progress:
    """What is known of a request that is out."""

    send_time: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    queue_time: float | None = None


class LoadGenerator:
    """Runs one load against one client.

    max_concurrency: requests out at once; those due meanwhile wait here, which no latency includes. stops: what ends the run early:
    requests that are out then are aborted, others never sent.
    on_done: called with each record as its request ends.
    """

    def __init__(
        self,
        client: Client,
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[RequestRecord], object] | None = None,
        request_id_prefix: str = "bench-",
        stops: Stops | None = None,
    ) -> None:
        self._client = client
        self._limit: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        )
        self._on_done = on_done or (lambda record: None)
        self._request_id_prefix = request_id_prefix
        self._records: list[RequestRecord] = []
        self._engine_error: EngineDeadError | None = None
        self._stops = stops or Stops()
        self._timer: asyncio.Timeout | None = None
        self._stop_reason: str | None = None
        self._num_failed = 0
        self._num_waiting = 0

    async def run(self, requests: Sequence[BenchRequest], due_times: Sequence[float]) -> LoadResult:
        """Send `requests[i]` `due_times[i]` seconds from now. Cancelling ends the run and still returns what there is.

        Raises EngineDeadError if the engine died before any request was completed.
        """
        start = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        interrupted = False
        try:
            async with asyncio.timeout(self._stops.max_duration) as self._timer:
                for index, (request, due) in enumerate(zip(requests, due_times, strict=True)):
                    delay = start + due - time.perf_counter()
                    if delay > 0:
                        await asyncio.sleep(delay)
                    if self._engine_error is not None:
                        break
                    tasks.append(asyncio.create_task(self._send(index, request, start + due)))
                await asyncio.gather(*tasks)
        except TimeoutError:
            self._stop_reason = self._stop_reason or self._stops.time_is_up
            await _cancel(tasks)
        except asyncio.CancelledError:
            interrupted = True
            await _cancel(tasks)
        if self._engine_error is not None and not any(record.outcome == "completed" for record in self._records):
            raise self._engine_error
        ended_early = interrupted or self._stop_reason is not None
        end = time.perf_counter() if ended_early else max((record.end_time for record in self._records), default=start)
        return LoadResult(self._records, start, max(0.0, end - start), interrupted, self._stop_reason)

    def _look_whether_to_stop(self) -> None:
        """After each request that was sent or has ended."""
        if self._stop_reason is not None or self._timer is None:
            return
        self._stop_reason = self._stops.why(num_ended=len(self._records), num_failed=self._num_failed, num_waiting=self._num_waiting)
        if self._stop_reason is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def _send(self, index: int, request: BenchRequest, due_time: float) -> None:
        progress: _Progress | None = None
        outcome, error = "completed", ""
        try:
            async with self._limit:
                progress = _Progress(time.perf_counter())
                self._num_waiting += 1
                self._look_whether_to_stop()
                await self._receive(index, request, progress)
        except asyncio.CancelledError:
            outcome, error = "aborted", "interrupted" if self._timer is None or not self._timer.expired() else "the run was stopped"
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
                progress.finish_reason = chunk.finish_reason
                progress.queue_time = chunk.queue_time
                if not chunk.has_content:
                    continue
                self._num_waiting -= not progress.chunk_times
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
            max_tokens=request.max_tokens,
            finish_reason=progress.finish_reason,
            queue_time=progress.queue_time,
        )
        self._num_waiting -= not progress.chunk_times
        self._num_failed += kind == "failed"
        self._records.append(record)
        self._on_done(record)
        self._look_whether_to_stop()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
