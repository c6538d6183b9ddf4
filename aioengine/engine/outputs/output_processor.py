"""From sampled token ids to what users see: text, stop strings, reasons, times; one collector a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from aioengine.engine.loop.engine_core import RequestEnd
from aioengine.engine.loop.request_times import RequestTimes
from aioengine.engine.outputs.detokenizer import Detokenizer, TextTokenizer
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.token_text import TokenTexts
from aioengine.engine.processed_input import ProcessedInput
from aioengine.errors import InvalidRequestError
from aioengine.outputs import EngineCoreOutput, FinishReason, TokenLogprobs
from aioengine.printable import get_logger
from aioengine.request import RequestStatus
from aioengine.sampling_params import RequestOutputKind

logger = get_logger(__name__)


class _Stream:
    """What a user asked for: one request, or the n continuations of one prompt."""

    __slots__ = ("collector", "live_ids", "prompt", "user_id")

    def __init__(self, user_id: str, collector: OutputCollector, *, prompt: str | None, scheduled_ids: Sequence[str]) -> None:
        self.user_id = user_id
        self.collector = collector
        self.prompt = prompt
        self.live_ids = dict.fromkeys(scheduled_ids)  # of the continuations that have not ended; a set that keeps the order


class _LiveRequest:
    """One continuation, which is one request to the scheduler, until it ends."""

    __slots__ = ("collector", "detokenizer", "has_output", "has_token", "held_logprobs", "held_token_ids", "index", "shown", "stream")

    def __init__(self, stream: _Stream, index: int, *, detokenizer: Detokenizer | None, keep_text: bool) -> None:
        self.stream = stream
        self.collector = stream.collector
        self.index = index
        self.detokenizer = detokenizer  # None: there is no tokenizer, or the user wants no text
        self.has_output = False
        self.has_token = False
        self.shown: list[str] | None = [] if keep_text else None  # the text so far, in pieces, for observers
        # Sampled, but their text is not visible yet; the logprobs are empty or as many.
        self.held_token_ids: list[int] = []
        self.held_logprobs: list[TokenLogprobs] = []

    @property
    def text(self) -> str:
        return "".join(self.shown or ())

    def release(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, num_visible: int | None
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Put `token_ids` behind those that are held, and take the first ones out again; None: all of them."""
        self.held_token_ids += token_ids
        token_ids, self.held_token_ids = self.held_token_ids[:num_visible], [] if num_visible is None else self.held_token_ids[num_visible:]
        if logprobs is not None:
            self.held_logprobs += logprobs
        elif not self.held_logprobs:
            return token_ids, None
        logprobs, self.held_logprobs = self.held_logprobs[:num_visible], [] if num_visible is None else self.held_logprobs[num_visible:]
        return token_ids, logprobs


class OutputProcessor:
    """Owns the live requests' text and collectors. Called by the core after each step, in the loop, without waiting.

    Requests are known here by the id that the scheduler uses, which differs from the user's while an older request of
    the same name is still being cleaned up, and for the n > 1 continuations of one prompt. `clock` gives seconds of
    `time.perf_counter()`.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        publish_text: bool = False,
        times: RequestTimes | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_texts: TokenTexts | None = None  # from the first request on that wants logprobs
        self._clock = clock
        self._publish_text = publish_text
        self._times = times if times is not None else RequestTimes()
        self._new_text: dict[str, str] = {}  # for observers, of the step at hand
        self._live: dict[str, _LiveRequest] = {}
        self._streams: dict[str, _Stream] = {}  # by the user's id; one stays until all of its continuations have ended

    # ------------------------------------------------------------------ requests in and out
    def add_request(
        self,
        scheduled_id: str,
        user_id: str,
        processed: ProcessedInput,
        *,
        now: float,
        final_only: bool,
        sibling_ids: Sequence[str] = (),
    ) -> OutputCollector:
        """Open the way out of a request that is about to be scheduled. sibling_ids: of its second and further continuations.

        Raises InvalidRequestError if the tokenizer cannot decode the prompt; nothing of the request is kept then.
        """
        params = processed.sampling_params
        scheduled_ids = (scheduled_id, *sibling_ids)
        # First, because it may fail: it decodes the end of the prompt.
        detokenizers = [self._make_detokenizer(processed) for _ in scheduled_ids]
        collector = OutputCollector(
            user_id,
            processed.prompt_token_ids,
            prompt=processed.prompt,
            queued_time=now,
            with_logprobs=params.logprobs is not None,
            with_prompt_logprobs=params.prompt_logprobs is not None,
            output_kind=RequestOutputKind.FINAL_ONLY if final_only else params.output_kind,
            num_completions=len(scheduled_ids),
        )
        stream = self._streams[user_id] = _Stream(user_id, collector, prompt=processed.prompt, scheduled_ids=scheduled_ids)
        for index, live_id in enumerate(scheduled_ids):
            self._live[live_id] = _LiveRequest(stream, index, detokenizer=detokenizers[index], keep_text=self._publish_text)
        return collector

    def _make_detokenizer(self, processed: ProcessedInput) -> Detokenizer | None:
        params = processed.sampling_params
        if self._tokenizer is None or not params.detokenize:
            return None
        try:
            return Detokenizer(self._tokenizer, prompt_token_ids=processed.prompt_token_ids, sampling_params=params)
        except BaseException as exc:
            _raise_what_is_not_the_requests(exc)
            raise InvalidRequestError(f"the tokenizer cannot decode the end of the prompt: {type(exc).__name__}: {exc}") from exc

    def discard(self, user_id: str) -> None:
        """Forget a request that the scheduler refused."""
        for scheduled_id in self.scheduled_ids(user_id):
            self._remove(scheduled_id)

    def scheduled_ids(self, user_id: str) -> tuple[str, ...]:
        """The scheduler's ids of what is live of a request; empty: there is none of that name."""
        stream = self._streams.get(user_id)
        return () if stream is None else tuple(stream.live_ids)

    def is_live(self, scheduled_id: str) -> bool:
        return scheduled_id in self._live

    @property
    def num_live(self) -> int:
        """Continuations that have not ended."""
        return len(self._live)

    def abort(self, scheduled_ids: Iterable[str]) -> None:
        """End continuations with the reason "abort" and all the text there is; unknown ids are ignored."""
        for scheduled_id in scheduled_ids:
            live = self._remove(scheduled_id)
            if live is not None:
                self._close(live, "abort", now=self._clock())

    def fail_all(self, error: BaseException) -> None:
        """The engine is gone: every stream ends with an EngineDeadError."""
        for stream in self._streams.values():
            stream.collector.fail(error)
        self._live.clear()
        self._streams.clear()
        self._times.clear()

    def _remove(self, scheduled_id: str) -> _LiveRequest | None:
        live = self._live.pop(scheduled_id, None)
        if live is not None:
            schedule = self._times.take(scheduled_id, now=self._clock())
            if live.index == 0:
                live.collector.note_schedule(schedule)
            stream = live.stream
            del stream.live_ids[scheduled_id]
            if not stream.live_ids:
                del self._streams[stream.user_id]
        return live

    def _close(self, live: _LiveRequest, finish_reason: FinishReason, *, now: float, error: str | None = None) -> None:
        """End a continuation from outside, with everything that was kept back."""
        try:
            self._show_rest(live)
        except BaseException as exc:  # a tokenizer that fails here must not keep a request from ending
            _raise_what_is_not_the_requests(exc)
            logger.warning("the last characters of request %r could not be decoded: %s", live.stream.user_id, exc)
        live.collector.finish(live.index, finish_reason, now=now, stop_reason=error, error=error)

    def _show_rest(self, live: _LiveRequest) -> None:
        piece = ""
        try:
            if live.detokenizer is not None:
                live.detokenizer.finish()
        finally:  # what was decoded before is shown in any case, and the tokens are
            if live.detokenizer is not None:
                piece, _ = live.detokenizer.take()
            token_ids, logprobs = live.release([], None, None)
            if piece or token_ids:
                live.collector.push(live.index, piece, token_ids, logprobs=logprobs)

    # ------------------------------------------------------------------ what observers may read (a TextSource)
    def take_new_text(self) -> dict[str, str]:
        new_text, self._new_text = self._new_text, {}
        return new_text

    def text_of(self, request_id: str) -> tuple[str | None, str | None]:
        live = self._live.get(request_id)
        return (None, None) if live is None else (live.stream.prompt, live.text)

    # ------------------------------------------------------------------ one step
    def process_outputs(self, outputs: list[EngineCoreOutput]) -> list[RequestEnd]:
        """Take in a step; returns the requests that end because of their text, or of a sibling's error.

        What goes wrong with one request's output (a tokenizer that fails, or panics) ends that request alone, with "error".
        """
        now = self._clock()
        ends: list[RequestEnd] = []
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            error = output.error
            try:
                end = self._process(live, output, now)
            except BaseException as exc:
                _raise_what_is_not_the_requests(exc)
                logger.exception("the output of request %r could not be processed", live.stream.user_id)
                error = f"{type(exc).__name__}: {exc}"
                end = RequestEnd(output.request_id, RequestStatus.FINISHED_ERROR, error)
                self._close(live, "error", now=now, error=error)
            if end is not None:
                ends.append(end)
            if end is not None or output.finish_reason is not None:
                self._remove(output.request_id)
                if error is not None:
                    ends += self._end_siblings(live, error, now)
        return ends

    def _end_siblings(self, live: _LiveRequest, error: str, now: float) -> list[RequestEnd]:
        """A user who asked for n continuations gets all of them or the error."""
        ends = [RequestEnd(scheduled_id, RequestStatus.FINISHED_ERROR, error) for scheduled_id in live.stream.live_ids]
        for end in ends:
            sibling = self._remove(end.request_id)
            assert sibling is not None
            self._close(sibling, "error", now=now, error=error)
        return ends

    def _process(self, live: _LiveRequest, output: EngineCoreOutput, now: float) -> RequestEnd | None:
        token_ids, logprobs = output.new_token_ids, output.logprobs
        if logprobs is not None and live.detokenizer is not None:
            self._texts().fill_in(logprobs)
        if not live.has_token:
            self._note_start(live, output, now)
        if output.num_draft_tokens:
            live.collector.note_draft_tokens(output.num_draft_tokens, output.num_accepted_tokens)
        piece, stop_string = "", None
        if live.detokenizer is not None:
            stop_string, num_tokens = _detokenize(live.detokenizer, token_ids, output.finish_reason)
            if num_tokens < len(token_ids):
                token_ids, logprobs = token_ids[:num_tokens], None if logprobs is None else logprobs[:num_tokens]
            piece, num_visible = live.detokenizer.take()
            if stop_string is not None or output.finish_reason is not None:
                token_ids, logprobs = live.release(token_ids, logprobs, None)
            elif live.held_token_ids or num_visible != len(token_ids):
                token_ids, logprobs = live.release(token_ids, logprobs, num_visible)
        if live.shown is not None:
            self._new_text[output.request_id] = piece
            live.shown.append(piece)
        if token_ids or piece:
            live.collector.push(live.index, piece, token_ids, logprobs=logprobs)
        if stop_string is not None:
            live.collector.finish(live.index, "stop", now=now, stop_reason=stop_string)
            return RequestEnd(output.request_id, RequestStatus.FINISHED_STOPPED, stop_string)
        if output.pooling_output is not None:
            live.collector.embedding = output.pooling_output
        if output.finish_reason is not None:
            stop_reason = output.stop_reason if output.error is None else output.error
            live.collector.finish(live.index, output.finish_reason, now=now, stop_reason=stop_reason, error=output.error)
        return None

    def _texts(self) -> TokenTexts:
        if self._token_texts is None:
            assert self._tokenizer is not None, "who has a detokenizer has a tokenizer"
            self._token_texts = TokenTexts(self._tokenizer)
        return self._token_texts

    def _note_start(self, live: _LiveRequest, output: EngineCoreOutput, now: float) -> None:
        """What comes with the prompt's chunks and with the first token."""
        if not live.has_output:
            live.has_output = True
            if live.index == 0:  # its siblings find what it has computed
                live.collector.note_cached_tokens(output.num_cached_tokens)
        if output.prompt_logprobs:
            if live.detokenizer is not None:
                self._texts().fill_in(output.prompt_logprobs)
            live.collector.push_prompt_logprobs(output.prompt_logprobs)
        if output.new_token_ids:
            live.has_token = True
            live.collector.note_first_token(now)
            if live.index == 0:
                live.collector.note_schedule(self._times.look_up(output.request_id, now=now))


def _detokenize(detokenizer: Detokenizer, token_ids: Sequence[int], finish_reason: FinishReason | None) -> tuple[str | None, int]:
    """Push the tokens of a step. Returns the stop string that they complete and how many tokens there are up to it."""
    # A stop token ends the text but is no part of it.
    for index in range(len(token_ids) - 1 if finish_reason == "stop" else len(token_ids)):
        stop_string = detokenizer.push(token_ids[index])
        if stop_string is not None:
            return stop_string, index + 1
    return detokenizer.finish() if finish_reason is not None else None, len(token_ids)


def _raise_what_is_not_the_requests(exc: BaseException) -> None:
    """Raise it if it is about the program and not about what was just done for a request. A panic of a library written in
    Rust, as `tokenizers` is, reaches Python as a BaseException.
    """
    if isinstance(exc, (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)):
        raise exc
