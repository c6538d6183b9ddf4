"""`/v1/completions`: text or token ids, one prompt or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from aioengine.engine.inputs.input_processor import TextPrompt
from aioengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.server.answers import Completion, CompletionChoice, Usage
from aioengine.server.choices import (
    UsageSoFar,
    check_error,
    completion_logprobs,
    finish_reason,
    prompt_logprobs,
    stop_reason,
    usage,
)
from aioengine.server.errors import RequestError, json_response
from aioengine.server.protocol import CompletionRequest
from aioengine.server.sampling import sampling_params
from aioengine.server.service import Service, new_id
from aioengine.server.sse import DONE, EventStream, OpenAIEvents, TextEvents, event
from aioengine.server.started import Started

DEFAULT_MAX_TOKENS = 16
MAX_NUM_PROMPTS = 1024
MAX_NUM_CHOICES = 1 << 14


class Completions:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: CompletionRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        prompts = read_prompts(request.prompt, add_special_tokens=request.add_special_tokens is not False)
        if request.suffix:
            raise RequestError(400, "suffix is not supported: these models continue a text, they do not fill a gap", param="suffix")
        n = 1 if request.n is None else request.n
        if request.best_of is not None and request.best_of != n:
            raise RequestError(400, f"best_of must be n ({n}) or absent, got {request.best_of}", param="best_of")
        params = _params(request)
        if len(prompts) * n > MAX_NUM_CHOICES:
            raise RequestError(400, f"{len(prompts)} prompts with n={n} are more than {MAX_NUM_CHOICES} texts", param="n")
        completion_id = new_id("cmpl")
        started = await self._service.start_all(
            [
                self._service.start(prompt, params, request, request_id=completion_id if len(prompts) == 1 else f"{completion_id}-{index}")
                for index, prompt in enumerate(prompts)
            ]
        )
        created = int(time.time())
        if request.stream:
            chunk = partial(Completion, id=completion_id, created=created, model=self._service.name_in_answer(request.model))
            return EventStream(self._service, started, _Events(self._service, request, n, chunk))
        outputs = await _last_of_all(started)
        choices = [
            _Text(self._service, request, output).choice(completion, index * n + completion.index)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        only_prompt = request.max_tokens == 0
        return json_response(
            Completion(
                id=completion_id,
                created=created,
                model=self._service.name_in_answer(request.model),
                choices=choices,
                usage=usage(outputs, with_output=not only_prompt),
            )
        )


class _Events(OpenAIEvents):
    """What a streamed answer says."""

    def __init__(self, service: Service, request: CompletionRequest, n: int, chunk: Callable[..., Completion]) -> None:
        self._service = service
        self._request = request
        self._n = n
        self._chunk = chunk
        options = request.stream_options
        self._is_continuous = bool(options and options.continuous_usage_stats)
        self._is_plain = not self._is_continuous and request.logprobs is None
        self._counts = UsageSoFar()
        self._ended: set[int] = set()
        self._texts: dict[int, _Text] = {}
        self._plain = TextEvents(lambda index, text: chunk(choices=[CompletionChoice(index=index, text=text)]))

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Raises RequestError for a failed request."""
        completion = output.outputs[0]
        if self._is_plain and completion.finish_reason is None and completion.text and self._n == 1 and index in self._texts:
            self._counts.num_output += len(completion.token_ids)  # as nearly all outputs are
            return self._plain.event(index, completion.text)
        check_error(output)
        self._counts.add(output)
        parts: list[bytes] = []
        for completion in output.outputs:
            number = index * self._n + completion.index
            if number in self._ended or not (completion.text or completion.token_ids or completion.finished):
                continue
            if completion.finished:
                self._ended.add(number)
            if self._is_plain and completion.text and number in self._texts and not completion.finished:
                parts.append(self._plain.event(number, completion.text))
            else:
                parts.append(self._full_event(number, completion, output))
        return b"".join(parts)

    def _full_event(self, number: int, completion: CompletionOutput, output: RequestOutput) -> bytes:
        text = self._texts.get(number)
        if text is None:
            text = self._texts[number] = _Text(self._service, self._request, output)
        choice = text.choice(completion, number)
        return event(self._chunk(choices=[choice], usage=self._usage() if self._is_continuous else UNSET))

    def _usage(self) -> Usage:
        if self._request.max_tokens == 0:
            self._counts.num_output = 0
        return self._counts.usage()

    def end(self) -> bytes:
        options = self._request.stream_options
        used = event(self._chunk(choices=[], usage=self._usage())) if options and options.include_usage else b""
        return used + DONE


class _Text:
    """What one choice says, in one part or in several: the prompt, where it is asked for, comes with the first."""

    def __init__(self, service: Service, request: CompletionRequest, output: RequestOutput) -> None:
        self._service = service
        self._request = request
        self._output: RequestOutput | None = output  # until the first part is made
        self._offset = 0

    def choice(self, completion: CompletionOutput, number: int) -> CompletionChoice:
        request, first = self._request, self._output
        self._output = None
        # Nothing to generate is how harnesses ask for the prompt's log-probabilities alone: one token is, and is left out.
        only_prompt = request.max_tokens == 0
        text = "" if only_prompt else completion.text
        token_ids = [] if only_prompt else completion.token_ids
        positions: Sequence[TokenLogprobs | None] = [] if only_prompt else completion.logprobs or []
        if first is not None and request.echo:
            text = self._prompt_text(first) + text
            if first.prompt_logprobs is not None:
                token_ids, positions = [*first.prompt_token_ids, *token_ids], [*first.prompt_logprobs, *positions]
        choice = CompletionChoice(index=number, text=text, finish_reason=finish_reason(completion), stop_reason=stop_reason(completion))
        if only_prompt and completion.finished:
            choice.finish_reason, choice.stop_reason = "length", None
        if request.logprobs is not None:
            first_token = ""
            if token_ids and positions and positions[0] is None:
                first_token = self._service.tokenizer.decode(token_ids[:1], skip_special_tokens=False)
            choice.logprobs = completion_logprobs(token_ids, positions, first_token=first_token, offset=self._offset)
            self._offset += sum(map(len, choice.logprobs.tokens))
        if first is not None and request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(first)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._service.tokenizer.decode(output.prompt_token_ids)


def _params(request: CompletionRequest) -> SamplingParams:
    # With `echo` the prompt's tokens have log-probabilities too.
    with_prompt = request.logprobs if request.echo and request.prompt_logprobs is None else request.prompt_logprobs
    return sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens or 1,
        logprobs=request.logprobs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        prompt_logprobs=with_prompt,
    )


def read_prompts(given: Any, *, add_special_tokens: bool, field: str = "prompt") -> list[TextPrompt | list[int]]:
    """One prompt or several: text, token ids, a list of texts, a list of lists of token ids. Raises RequestError naming `field`."""
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens)]
    if not isinstance(given, list) or not given:
        raise RequestError(400, f"{field} must be text, token ids, or a list of either", param=field)
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > MAX_NUM_PROMPTS:
        raise RequestError(400, f"{field} holds {len(given)} prompts, at most {MAX_NUM_PROMPTS} are allowed", param=field)
    for index, item in enumerate(given):
        is_ids = isinstance(item, list) and item and all(type(token_id) is int for token_id in item)
        if not isinstance(item, str) and not is_ids:
            raise RequestError(400, f"{field}[{index}] must be text or token ids", param=field)
    return [TextPrompt(item, add_special_tokens) if isinstance(item, str) else item for item in given]


async def _last_of_all(started: Sequence[Started]) -> list[RequestOutput]:
    """The final output of each; all are ended if one fails."""
    try:
        outputs = list(await asyncio.gather(*(one.last() for one in started)))
        for output in outputs:
            check_error(output)
        return outputs
    finally:
        for one in started:
            await one.close()
