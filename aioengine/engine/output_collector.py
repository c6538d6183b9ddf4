"""One request's way out: where the engine puts what is new and its consumer takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aioengine.errors import EngineDeadError
from aioengine.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs


class OutputCollector:
    """Holds the latest state of one request and nothing else, so a slow consumer costs no memory.

    Whatever arrives between two calls of `take()` is merged into one `RequestOutput`: its `text_delta` spans all of it.
    Text, token ids and logprobs of an output are from the same step. One consumer a collector; writer and consumer are
    in the same event loop.

    final_only: `take()` waits for the end, so no intermediate output is built.
    """

    __slots__ = (
        "_error",
        "_final_only",
        "_finish_reason",
        "_finished_time",
        "_first_token_time",
        "_logprobs",
        "_num_cached_tokens",
        "_num_chars_taken",
        "_prompt",
        "_prompt_token_ids",
        "_queued_time",
        "_ready",
        "_stop_reason",
        "_text",
        "_token_ids",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        prompt: str | None,
        queued_time: float,
        with_logprobs: bool,
        final_only: bool = False,
    ) -> None:
        self.request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._prompt = prompt
        self._queued_time = queued_time
        self._final_only = final_only
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        self._text = ""
        self._num_chars_taken = 0
        self._num_cached_tokens = 0
        self._first_token_time: float | None = None
        self._finished_time: float | None = None
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    # ------------------------------------------------------------------ the engine's side
    def push(
        self,
        text: str,
        new_token_ids: Sequence[int],
        *,
        now: float,
        logprobs: Sequence[TokenLogprobs] | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Take in one step: `text` is the whole visible text so far."""
        if self._first_token_time is None and new_token_ids:
            self._first_token_time = now
        self._text = text
        self._token_ids += new_token_ids
        if self._logprobs is not None and logprobs is not None:
            self._logprobs += logprobs
        self._num_cached_tokens = num_cached_tokens
        if not self._final_only:
            self._ready.set()

    def finish(self, text: str, finish_reason: FinishReason, *, now: float, stop_reason: int | str | None = None) -> None:
        """Nothing follows."""
        self._text = text
        self._finish_reason = finish_reason
        self._stop_reason = stop_reason
        self._finished_time = now
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """The engine died or was shut down: the consumer gets an EngineDeadError, caused by `error`."""
        self._error = error
        self._ready.set()

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    # ------------------------------------------------------------------ the consumer's side
    async def take(self) -> RequestOutput:
        """Wait for something new and return everything so far; after the end, the end again. Raises EngineDeadError."""
        await self._ready.wait()
        if self._error is not None:
            raise _dead(self.request_id, self._error) from _cause(self._error)
        if self._finish_reason is None:
            self._ready.clear()
        text_delta = self._text[self._num_chars_taken :]
        self._num_chars_taken = len(self._text)
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=self._text,
                    token_ids=self._token_ids.copy(),
                    text_delta=text_delta,
                    logprobs=None if self._logprobs is None else self._logprobs.copy(),
                    finish_reason=self._finish_reason,
                    stop_reason=self._stop_reason,
                )
            ],
            metrics=RequestMetrics(self._queued_time, self._first_token_time, self._finished_time),
            num_cached_tokens=self._num_cached_tokens,
            prompt=self._prompt,
        )


def _dead(request_id: str, error: BaseException) -> EngineDeadError:
    # A new exception for each stream: a shared one would collect the tracebacks of all of them.
    if isinstance(error, EngineDeadError):
        return EngineDeadError(f"request {request_id!r} was cut off: {error}")
    return EngineDeadError(f"request {request_id!r} was cut off: the engine died of {type(error).__name__}: {error}")


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, EngineDeadError) else error
