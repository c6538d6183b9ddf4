"""`/v1/completions`: text or token ids, one prompt or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from aioengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from aioengine.sampling_params import RequestOutputKind
from aioengine.server.chat import UsageSoFar
from aioengine.server.choices import check_error, finish_reason, finite, token_text, usage
from aioengine.server.errors import RequestError, json_response
from aioengine.server.protocol import CompletionRequest
from aioengine.server.sampling import sampling_params
from aioengine.server.service import Service, Started, new_id
from aioengine.server.sse import DONE, EventStream, event

DEFAULT_MAX_TOKENS = 16
MAX_NUM_PROMPTS = 1024
_QUEUE_SIZE = 64


class Completions:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: CompletionRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        prompts = _prompts(request.prompt)
        if request.suffix:
            raise RequestError(400, "suffix is not supported: these models continue a text, they do not fill a gap", param="suffix")
        n = request.n or 1
        if request.best_of is not None and request.best_of != n:
            raise RequestError(400, f"best_of must be n ({n}) or absent, got {request.best_of}", param="best_of")
        stream = bool(request.stream)
        if stream and request.echo:
            raise RequestError(400, "echo is not supported with stream", param="echo")
        # Nothing to generate is how harnesses ask for the prompt's log-probabilities alone: one token is, and is left out.
        only_prompt = request.max_tokens == 0
        max_tokens = 1 if only_prompt else request.max_tokens
        params = sampling_params(
            request,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            logprobs=request.logprobs,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
            prompt_logprobs=request.logprobs if request.echo else request.prompt_logprobs,
        )
        completion_id = new_id("cmpl")
        started = await self._service.start_all(
            [
                self._service.start(prompt, params, request, request_id=completion_id if len(prompts) == 1 else f"{completion_id}-{index}")
                for index, prompt in enumerate(prompts)
            ]
        )
        head = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": self._service.model_name}
        if stream:
            return EventStream(self._events(started, request, n, head), send_timeout_s=self._service.settings.send_timeout_s)
        outputs = await _last_of_all(started)
        choices = [
            self._choice(output, completion, request, index * n, only_prompt)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return json_response({**head, "choices": choices, "usage": usage(outputs)})

    def _choice(
        self, output: RequestOutput, completion: CompletionOutput, request: CompletionRequest, first_index: int, only_prompt: bool
    ) -> dict[str, Any]:
        tokenizer = self._service.engine.tokenizer
        prompt = (output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)) if request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            token_ids = [] if only_prompt else list(completion.token_ids)
            positions: list[TokenLogprobs | None] = [] if only_prompt else list(completion.logprobs or [])
            if request.echo and output.prompt_logprobs is not None:
                token_ids, positions = [*output.prompt_token_ids, *token_ids], [*output.prompt_logprobs, *positions]
            logprobs = self._logprobs(token_ids, positions, 0)
        return {
            "index": first_index + completion.index,
            "text": prompt + ("" if only_prompt else completion.text),
            "finish_reason": finish_reason(completion),
            "stop_reason": completion.stop_reason,
            "logprobs": logprobs,
        }

    def _logprobs(self, token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], offset: int) -> dict[str, Any]:
        """OpenAI's four lists; the first token of a text has no log-probability."""
        tokenizer = self._service.engine.tokenizer
        texts = [token_text(tokenizer, token_id) for token_id in token_ids]
        offsets = [offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [None if p is None else finite(p[t].logprob) for t, p in zip(token_ids, positions, strict=True)],
            "top_logprobs": [
                None if p is None else {token_text(tokenizer, other): finite(entry.logprob) for other, entry in p.items()}
                for p in positions
            ],
            "text_offset": offsets[: len(texts)],
        }

    async def _events(
        self, started: Sequence[Started], request: CompletionRequest, n: int, head: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        counts = UsageSoFar()
        ended: set[int] = set()
        offsets: dict[int, int] = {}
        async for index, output in _merged(started):
            check_error(output)
            counts.add(output)
            for completion in output.outputs:
                number = index * n + completion.index
                if number in ended or not (completion.text or completion.token_ids or completion.finished):
                    continue
                if completion.finished:
                    ended.add(number)
                logprobs = None
                if request.logprobs is not None:
                    logprobs = self._logprobs(completion.token_ids, completion.logprobs or [], offsets.get(number, 0))
                    offsets[number] = offsets.get(number, 0) + sum(map(len, logprobs["tokens"]))
                choice = {
                    "index": number,
                    "text": completion.text,
                    "finish_reason": finish_reason(completion),
                    "stop_reason": completion.stop_reason,
                    "logprobs": logprobs,
                }
                yield event({**head, "choices": [choice], **counts.field(continuous)})
        if options and options.include_usage:
            yield event({**head, "choices": [], "usage": counts.usage()})
        yield DONE


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several: text, token ids, a list of texts, a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
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
    return list(prompt)


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
