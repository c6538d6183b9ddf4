"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import RequestOutputKind
from aioengine.server.choices import chat_logprobs, check_error, finish_reason, usage
from aioengine.server.errors import RequestError, json_response
from aioengine.server.messages_in import chat_messages
from aioengine.server.protocol import ChatCompletionRequest
from aioengine.server.sampling import sampling_params
from aioengine.server.service import Service, Started, new_id
from aioengine.server.sse import DONE, EventStream, event


class ChatCompletions:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: ChatCompletionRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        stream = bool(request.stream)
        params = sampling_params(
            request,
            max_tokens=request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        completion_id = new_id("chatcmpl")
        started = await self._service.start(chat_messages(request.messages), params, request, request_id=completion_id)
        head = {"id": completion_id, "created": int(time.time()), "model": self._service.model_name}
        if stream:
            events = self._events(started, request, {**head, "object": "chat.completion.chunk"})
            return EventStream(events, send_timeout_s=self._service.settings.send_timeout_s)
        output = await started.last()
        check_error(output)
        choices = [self._choice(completion, request) for completion in output.outputs]
        return json_response({**head, "object": "chat.completion", "choices": choices, "usage": usage([output])})

    def _choice(self, completion: CompletionOutput, request: ChatCompletionRequest) -> dict[str, Any]:
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "finish_reason": finish_reason(completion),
            "logprobs": self._logprobs(completion, request),
        }

    def _logprobs(self, completion: CompletionOutput, request: ChatCompletionRequest) -> dict[str, Any] | None:
        if not request.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(self._service.engine.tokenizer, completion.token_ids, completion.logprobs, request.top_logprobs or 0)

    async def _events(self, started: Started, request: ChatCompletionRequest, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        counts = UsageSoFar()
        roles = [_chunk(completion.index, {"role": "assistant", "content": ""}) for completion in started.first.outputs]
        yield event({**head, "choices": roles, **counts.field(continuous)})
        ended: set[int] = set()
        async for output in started.outputs():
            check_error(output)
            counts.add(output)
            for completion in output.outputs:
                if completion.index in ended or not (completion.text or completion.token_ids or completion.finished):
                    continue
                if completion.finished:
                    ended.add(completion.index)
                chunk = _chunk(
                    completion.index, {"content": completion.text}, finish_reason(completion), self._logprobs(completion, request)
                )
                yield event({**head, "choices": [chunk], **counts.field(continuous)})
        if options and options.include_usage:
            yield event({**head, "choices": [], "usage": counts.usage()})
        yield DONE


class UsageSoFar:
    """Counts the tokens of streams of differences."""

    def __init__(self) -> None:
        self._num_output = 0
        self._prompts: dict[str, RequestOutput] = {}  # by request: the latest output

    def add(self, output: RequestOutput) -> None:
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        self._prompts[output.request_id] = output

    def usage(self) -> dict[str, Any]:
        counted = usage(self._prompts.values())
        counted["completion_tokens"] = self._num_output
        counted["total_tokens"] = counted["prompt_tokens"] + self._num_output
        return counted

    def field(self, wanted: bool) -> dict[str, Any]:
        return {"usage": self.usage()} if wanted else {}


def _chunk(
    index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Sequence[Any] | dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
