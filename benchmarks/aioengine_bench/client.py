"""The way to the engine under test: one call a request, chunks back. The load generator knows nothing else of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from aioengine.engine.async_engine import AsyncEngine
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.specs import SamplingSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """Content that arrived together. `num_tokens` may be 0 when only text came (what was held back at the end).

    time: when it arrived, in seconds of `time.perf_counter()`, where the client knows better than who receives this.
    finish_reason: of the last one. queue_time: seconds that the request waited in the engine before its first step, if known.
    """

    num_tokens: int
    text: str = ""
    num_cached_tokens: int = 0
    time: float | None = None
    finish_reason: str | None = None
    queue_time: float | None = None

    @property
    def has_content(self) -> bool:
        """False for an end marker, which is no part of any latency."""
        return self.num_tokens > 0 or self.text != ""


class RequestAborted(Exception):
    """The engine ended the request before its answer was complete."""


class RequestFailed(Exception):
    """The engine could not answer; the message says why."""


class Client(Protocol):
    def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
        """Ask, and yield the answer as it comes. Raises RequestAborted, RequestFailed, or whatever the transport raises."""


def sampling_params(sampling: SamplingSpec, request: BenchRequest) -> SamplingParams:
    """Raises InvalidRequestError for values that cannot be."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
    )


@dataclass(frozen=True, slots=True)
class EngineClient:
    """Streams from an `AsyncEngine` in this process.

    final_only: one chunk with everything at the end, which costs the engine no intermediate outputs.
    """

    engine: AsyncEngine
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    final_only: bool = False

    async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
        params = sampling_params(self.sampling, request)
        if self.final_only:
            (output,) = await self.engine.generate_batch([request.prompt_token_ids], params, progress=False)
            yield _chunk(output, len(output.token_ids), output.text)
            check_complete(output, request.max_tokens, ignore_eos=request.ignore_eos)
            return
        num_tokens = 0
        async for output in self.engine.generate(request.prompt_token_ids, params, request_id=request_id):
            num_new = len(output.token_ids) - num_tokens
            num_tokens += num_new
            if num_new or output.text_delta or output.finish_reason is not None:
                yield _chunk(output, num_new, output.text_delta)
            if output.finish_reason is not None:
                check_complete(output, request.max_tokens, ignore_eos=request.ignore_eos)


def _chunk(output: RequestOutput, num_tokens: int, text: str) -> Chunk:
    return Chunk(num_tokens, text, output.num_cached_tokens, finish_reason=output.finish_reason, queue_time=output.metrics.queue_s)


def check_complete(output: RequestOutput, max_tokens: int, *, ignore_eos: bool) -> None:
    """Raise RequestAborted or RequestFailed unless the answer is what was asked for: a shorter one is another measurement."""
    completion = output.outputs[0]
    if output.finish_reason == "abort":
        raise RequestAborted("aborted by the engine")
    if output.finish_reason == "error":
        raise RequestFailed(completion.error or "the engine gave no reason")
    cut = output.finish_reason == "length" or ignore_eos
    if cut and len(completion.token_ids) < max_tokens:
        raise RequestFailed(f"cut off: {len(completion.token_ids)} of {max_tokens} tokens, finish_reason {output.finish_reason!r}")
