"""From sampled token ids to what users see: text, stop strings, reasons, times; one collector a request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aioengine.engine.detokenizer import Detokenizer, TextTokenizer
from aioengine.engine.engine_core import RequestEnd
from aioengine.engine.input_processor import ProcessedInput
from aioengine.engine.output_collector import OutputCollector
from aioengine.outputs import EngineCoreOutput
from aioengine.request import RequestStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LiveRequest:
    user_id: str
    collector: OutputCollector
    prompt: str | None
    detokenizer: Detokenizer | None  # None: there is no tokenizer, only token ids

    @property
    def text(self) -> str:
        return "" if self.detokenizer is None else self.detokenizer.text


class OutputProcessor:
    """Owns the live requests' text and collectors. Called by the core after each step, in the loop, without waiting.

    Requests are known here by the id that the scheduler uses, which differs from the user's while an older request of
    the same name is still being cleaned up. `clock` gives seconds of `time.perf_counter()`.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, *, clock: Callable[[], float] = time.perf_counter, publish_text: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._publish_text = publish_text
        self._new_text: dict[str, str] = {}  # for observers, of the step at hand
        self._live: dict[str, _LiveRequest] = {}
        self._internal_ids: dict[str, str] = {}  # user's id -> scheduler's id, of live requests

    # ------------------------------------------------------------------ requests in and out
    def add_request(self, internal_id: str, user_id: str, processed: ProcessedInput, *, now: float, final_only: bool) -> OutputCollector:
        """Open the way out of a request that is about to be scheduled."""
        params = processed.sampling_params
        collector = OutputCollector(
            user_id,
            processed.prompt_token_ids,
            prompt=processed.prompt,
            queued_time=now,
            with_logprobs=params.logprobs is not None,
            final_only=final_only,
        )
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, prompt_token_ids=processed.prompt_token_ids, sampling_params=params)
        self._live[internal_id] = _LiveRequest(user_id, collector, processed.prompt, detokenizer)
        self._internal_ids[user_id] = internal_id
        return collector

    def discard(self, internal_id: str) -> None:
        """Forget a request that the scheduler refused."""
        self._remove(internal_id)

    def internal_id(self, user_id: str) -> str | None:
        """The scheduler's id of a live request; None: there is none of that name."""
        return self._internal_ids.get(user_id)

    def is_live(self, internal_id: str) -> bool:
        return internal_id in self._live

    @property
    def num_live(self) -> int:
        return len(self._live)

    def abort(self, internal_ids: Iterable[str]) -> None:
        """End streams with the reason "abort" and all the text there is; unknown ids are ignored."""
        for internal_id in internal_ids:
            live = self._remove(internal_id)
            if live is None:
                continue
            if live.detokenizer is not None:
                live.detokenizer.finish()
            live.collector.finish(live.text, "abort", now=self._clock())

    def fail_all(self, error: BaseException) -> None:
        """The engine is gone: every stream ends with an EngineDeadError."""
        for live in self._live.values():
            live.collector.fail(error)
        self._live.clear()
        self._internal_ids.clear()

    def _remove(self, internal_id: str) -> _LiveRequest | None:
        live = self._live.pop(internal_id, None)
        if live is not None:
            del self._internal_ids[live.user_id]
        return live

    # ------------------------------------------------------------------ what observers may read (a TextSource)
    def take_new_text(self) -> dict[str, str]:
        new_text, self._new_text = self._new_text, {}
        return new_text

    def text_of(self, request_id: str) -> tuple[str | None, str | None]:
        live = self._live.get(request_id)
        return (None, None) if live is None else (live.prompt, live.text)

    # ------------------------------------------------------------------ one step
    def process_outputs(self, outputs: list[EngineCoreOutput]) -> list[RequestEnd]:
        """Take in a step; returns the requests that end because of their text.

        What goes wrong with one request's output (a tokenizer that fails) ends that request alone, with "error".
        """
        now = self._clock()
        ends: list[RequestEnd] = []
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            try:
                end = self._process(live, output, now)
            except Exception as exc:
                logger.exception("the output of request %r could not be processed", live.user_id)
                end = RequestEnd(output.request_id, RequestStatus.FINISHED_ERROR, f"{type(exc).__name__}: {exc}")
                live.collector.finish(live.text, "error", now=now, stop_reason=end.stop_reason)
            if end is not None:
                ends.append(end)
            if live.collector.finished:
                self._remove(output.request_id)
        return ends

    def _process(self, live: _LiveRequest, output: EngineCoreOutput, now: float) -> RequestEnd | None:
        token_ids = output.new_token_ids
        stop_string = None
        num_tokens = len(token_ids)
        num_chars_before = len(live.text) if self._publish_text else 0
        if live.detokenizer is not None:
            # A stop token ends the text but is no part of it.
            num_text_tokens = num_tokens - 1 if output.finish_reason == "stop" else num_tokens
            for index in range(num_text_tokens):
                stop_string = live.detokenizer.push(token_ids[index])
                if stop_string is not None:
                    num_tokens = index + 1
                    break
            else:
                if output.finish_reason is not None:
                    stop_string = live.detokenizer.finish()
        if self._publish_text:
            self._new_text[output.request_id] = live.text[num_chars_before:]
        live.collector.push(
            live.text,
            token_ids[:num_tokens],
            now=now,
            logprobs=None if output.logprobs is None else output.logprobs[:num_tokens],
            num_cached_tokens=output.num_cached_tokens,
        )
        if stop_string is not None:
            live.collector.finish(live.text, "stop", now=now, stop_reason=stop_string)
            return RequestEnd(output.request_id, RequestStatus.FINISHED_STOPPED, stop_string)
        if output.finish_reason is not None:
            live.collector.finish(live.text, output.finish_reason, now=now, stop_reason=output.stop_reason)
        return None
