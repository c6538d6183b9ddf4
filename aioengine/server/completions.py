"""`/v1/completions`: text or token ids, one prompt or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from aioengine.engine.inputs.input_processor import TextPrompt
from aioengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.server.answers import Completion, CompletionChoice
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
from aioengine.server.service import Service, Started, new_id
from aioengine.server.sse import DONE, EventStream, TextEvents, event

DEFAULT_MAX_TOKENS = 16
MAX_NUM_PROMPTS = 1024
MAX_NUM_CHOICES = 1 << 14
_QUEUE_SIZE = 64


class Completions:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: CompletionRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        prompts = _prompts(request.prompt, add_special_tokens=request.add_special_tokens is not False)
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
            events = self._events(
                started, request, n, partial(Completion, id=completion_id, created=created, model=self._service.model_name)
            )
            return EventStream(events, send_timeout_s=self._service.settings.send_timeout_s)
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
                model=self._service.model_name,
                choices=choices,
                usage=usage(outputs, with_output=not only_prompt),
            )
        )

    async def _events(
        self, started: Sequence[Started], request: CompletionRequest, n: int, chunk: Callable[..., Completion]
    ) -> AsyncGenerator[bytes, None]:
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        counts = UsageSoFar()
        ended: set[int] = set()
        texts: dict[int, _Text] = {}
        plain = TextEvents(lambda index, text: chunk(choices=[CompletionChoice(index=index, text=text)]))
        async with aclosing(_merged(started)) as merged:
            async for index, output in merged:
                check_error(output)
                counts.add(output)
                if request.max_tokens == 0:
                    counts.num_output = 0
                for completion in output.outputs:
                    number = index * n + completion.index
                    if number in ended or not (completion.text or completion.token_ids or completion.finished):
                        continue
                    if completion.finished:
                        ended.add(number)
                    if number in texts and completion.text and not (continuous or completion.finished or request.logprobs is not None):
                        yield plain.event(number, completion.text)
                        continue
                    text = texts.setdefault(number, _Text(self._service, request, output))
                    choice = text.choice(completion, number)
                    yield event(chunk(choices=[choice], usage=counts.usage() if continuous else UNSET))
        if options and options.include_usage:
            yield event(chunk(choices=[], usage=counts.usage()))
        yield DONE


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


def _prompts(prompt: Any, *, add_special_tokens: bool) -> list[TextPrompt | list[int]]:
    """One prompt or several: text, token ids, a list of texts, a list of lists of token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(400, "prompt must be text, token ids, or a list of either", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_NUM_PROMPTS:
        raise RequestError(400, f"prompt holds {len(prompt)} prompts, at most {MAX_NUM_PROMPTS} are allowed", param="prompt")
    for index, item in enumerate(prompt):
        is_ids = isinstance(item, list) and item and all(type(token_id) is int for token_id in item)
        if not isinstance(item, str) and not is_ids:
            raise RequestError(400, f"prompt[{index}] must be text or token ids", param="prompt")
    return [TextPrompt(item, add_special_tokens) if isinstance(item, str) else item for item in prompt]


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


async def _merged(started: Sequence[Started]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams as they come. The queue is short: a slow reader holds the streams, which merge what comes."""
    if len(started) == 1:
        async for output in started[0].outputs():
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | None]] = asyncio.Queue(_QUEUE_SIZE)

    async def pump(index: int, one: Started) -> None:
        async for output in one.outputs():
            await queue.put((index, output))
        await queue.put((index, None))

    async with asyncio.TaskGroup() as tasks:
        pumps = [tasks.create_task(pump(index, one)) for index, one in enumerate(started)]
        try:
            num_live = len(pumps)
            while num_live:
                index, item = await queue.get()
                if item is None:
                    num_live -= 1
                else:
                    yield index, item
        finally:
            for task in pumps:
                task.cancel()
