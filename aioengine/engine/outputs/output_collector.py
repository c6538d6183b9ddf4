"""One request's way out: where the engine puts what is new and its consumer takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from aioengine.engine.loop.request_times import RequestSchedule
from aioengine.errors import EngineDeadError
from aioengine.outputs import CompletionHistory, CompletionOutput, FinishReason, RequestMetrics, RequestOutput, TokenLogprobs
from aioengine.sampling_params import RequestOutputKind


class _Completion:
    """One continuation: what it has produced, and how much of that the consumer has."""

    __slots__ = ("error", "finish_reason", "history", "num_pieces_taken", "stop_reason")

    def __init__(self, *, with_logprobs: bool) -> None:
        self.history = CompletionHistory(with_logprobs=with_logprobs)
        self.num_pieces_taken = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def take_text_delta(self) -> str:
        pieces, start = self.history.pieces, self.num_pieces_taken
        end = self.num_pieces_taken = len(pieces)
        return pieces[start] if end - start == 1 else "".join(pieces[start:])

    def read_all(self, index: int) -> CompletionOutput:
        """Everything so far; it stays here."""
        return CompletionOutput.from_history(index, self.history, self.take_text_delta(), self.finish_reason, self.stop_reason, self.error)

    def take_new(self, index: int) -> CompletionOutput:
        """What came since the last time; it is forgotten here."""
        history = self.history
        self.history = CompletionHistory(with_logprobs=history.logprobs is not None)
        text = "".join(history.pieces)
        return CompletionOutput(index, text, history.token_ids, text, history.logprobs, self.finish_reason, self.stop_reason, self.error)


class OutputCollector:
    """Holds what one request has produced until its consumer takes it; putting and taking cost the same at any length.

    Whatever arrives between two calls of `take()` is merged into one `RequestOutput`: a slow consumer gets fewer outputs
    and the same contents. One consumer a collector; writer and consumer are in the same event loop.

    num_completions: how many continuations there are; each has an index.
    output_kind: what `take()` returns. With FINAL_ONLY it waits for the end, so no intermediate output is built.
    """

    __slots__ = (
        "_completions",
        "_error",
        "_metrics",
        "_num_cached_tokens",
        "_num_running",
        "_on_ready",
        "_output_kind",
        "_prompt",
        "_prompt_logprobs",
        "_prompt_token_ids",
        "_waiter",
        "embedding",
        "is_ready",
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
        with_prompt_logprobs: bool = False,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        num_completions: int = 1,
    ) -> None:
        self.request_id = request_id
        self.embedding: list[float] | None = None  # of a request that wants one, when it has ended with "stop"
        self._prompt_token_ids = prompt_token_ids
        self._prompt = prompt
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if with_prompt_logprobs else None
        self._output_kind = output_kind
        self._completions = [_Completion(with_logprobs=with_logprobs) for _ in range(num_completions)]
        self._num_running = num_completions
        self._num_cached_tokens = 0
        self._metrics = RequestMetrics(queued_time)
        self._error: BaseException | None = None
        self.is_ready = False  # `take_now()` has something new to return, or the end, or an error
        self._waiter: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None

    # ------------------------------------------------------------------ the engine's side
    def push(self, index: int, piece: str, token_ids: Sequence[int], *, logprobs: Sequence[TokenLogprobs] | None = None) -> None:
        """Add to continuation `index` what became visible: text, and the token ids and logprobs that belong to it."""
        history = self._completions[index].history
        if piece:
            history.pieces.append(piece)
        history.token_ids += token_ids
        if history.logprobs is not None and logprobs is not None:
            history.logprobs += logprobs
        if self._output_kind is not RequestOutputKind.FINAL_ONLY:
            self._wake_up()

    def note_first_token(self, now: float) -> None:
        """A token was sampled, even if nothing of it may be shown yet."""
        if self._metrics.first_token_time is None:
            self._metrics = replace(self._metrics, first_token_time=now)

    def note_schedule(self, schedule: RequestSchedule | None) -> None:
        """When the first continuation was scheduled, what it waited for, and for how long it stood preempted."""
        if schedule is not None:
            self._metrics = replace(
                self._metrics,
                scheduled_time=schedule.scheduled_time,
                waits=schedule.waits,
                preemptions=schedule.preemptions,
            )

    def note_draft_tokens(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A step checked draft tokens for one of the continuations."""
        metrics = self._metrics
        self._metrics = replace(
            metrics,
            num_draft_tokens=metrics.num_draft_tokens + num_draft_tokens,
            num_accepted_tokens=metrics.num_accepted_tokens + num_accepted_tokens,
        )

    def note_cached_tokens(self, num_cached_tokens: int) -> None:
        """How many tokens of the prompt came from the prefix cache."""
        self._num_cached_tokens = num_cached_tokens

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add those of the prompt's next tokens."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += logprobs

    def finish(
        self, index: int, finish_reason: FinishReason, *, now: float, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """Nothing follows for continuation `index`. A continuation that has ended is left as it is."""
        completion = self._completions[index]
        if completion.finish_reason is not None:
            return
        completion.finish_reason, completion.stop_reason, completion.error = finish_reason, stop_reason, error
        self._num_running -= 1
        if self._num_running == 0:
            self._metrics = replace(self._metrics, finished_time=now)
        if self._num_running == 0 or self._output_kind is not RequestOutputKind.FINAL_ONLY:
            self._wake_up()

    def fail(self, error: BaseException) -> None:
        """The engine died or was shut down: the consumer gets an EngineDeadError, caused by `error`."""
        self._error = error
        with contextlib.suppress(RuntimeError):  # the consumer's event loop was closed: nobody waits there any more
            self._wake_up()

    @property
    def finished(self) -> bool:
        """All continuations have ended."""
        return self._num_running == 0

    def read_text(self) -> str:
        """What the first continuation says so far; it stays here. Not for DELTA, where what was taken is forgotten."""
        return "".join(self._completions[0].history.pieces)

    def _wake_up(self) -> None:
        if self._on_ready is not None and not self.is_ready:
            self.is_ready = True
            self._on_ready()
            return
        self.is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------------ the consumer's side
    async def take(self) -> RequestOutput:
        """Wait for something new and return the output with it; after the end, the end again. Raises EngineDeadError.

        Whoever is cancelled while it waits has taken nothing.
        """
        if not self.is_ready:
            await self.wait()
        return self.take_now()

    def wait(self) -> asyncio.Future[None]:
        """To be awaited until `is_ready`, by one consumer."""
        # A bare future: asyncio.Event would cost a coroutine and a queue more for every output.
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def call_when_ready(self, on_ready: Callable[[], None]) -> None:
        """Instead of `wait()`: call `on_ready` each time that `is_ready` becomes true, from within the engine's step."""
        self._on_ready = on_ready
        if self.is_ready:
            on_ready()

    def take_now(self) -> RequestOutput:
        """As `take()`, without waiting; what is there has to be ready."""
        if self._error is not None:
            raise _dead(self.request_id, self._error) from _cause(self._error)
        self.is_ready = self._num_running == 0
        if self._output_kind is RequestOutputKind.DELTA:
            outputs = [completion.take_new(index) for index, completion in enumerate(self._completions)]
        else:
            outputs = [completion.read_all(index) for index, completion in enumerate(self._completions)]
        return RequestOutput(
            self.request_id,
            self._prompt_token_ids,
            outputs,
            self._metrics,
            self._num_cached_tokens,
            self._prompt,
            self._complete_prompt_logprobs(),
        )

    def _complete_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        logprobs = self._prompt_logprobs
        return logprobs if logprobs is not None and len(logprobs) == len(self._prompt_token_ids) else None


def _dead(request_id: str, error: BaseException) -> EngineDeadError:
    # A new exception for each stream: a shared one would collect the tracebacks of all of them.
    if isinstance(error, EngineDeadError):
        return EngineDeadError(f"request {request_id!r} was cut off: {error}")
    return EngineDeadError(f"request {request_id!r} was cut off: the engine died of {type(error).__name__}: {error}")


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, EngineDeadError) else error
