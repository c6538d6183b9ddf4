"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from aioengine.outputs import CompletionOutput
from aioengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from aioengine.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from aioengine.server.choices import UsageSoFar, chat_logprobs, prompt_logprobs, stop_reason, usage
from aioengine.server.errors import RequestError, json_response
from aioengine.server.messages_in import chat_messages
from aioengine.server.protocol import ChatCompletionRequest, Tool
from aioengine.server.sampling import sampling_params
from aioengine.server.service import Service, new_id
from aioengine.server.sse import DONE, EventStream, TextEvents, event
from aioengine.server.tool_calls import CallStart, Piece, TextPiece
from aioengine.server.tools import Function, ToolUse, chat_tool_choice, tool_use
from aioengine.server.turn import Answer, Turn, TurnRequest, start_turn


class ChatCompletions:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: ChatCompletionRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        completion_id = new_id("chatcmpl")
        turn = await start_turn(
            self._service,
            TurnRequest(
                messages=chat_messages(request.messages),
                tools=_tools(request),
                params=partial(_params, request),
                variables=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
            ),
            request,
            request_id=completion_id,
        )
        created = int(time.time())
        if request.stream:
            events = self._events(turn, request, completion_id, created)
            return EventStream(events, send_timeout_s=self._service.settings.send_timeout_s)
        output, answers = await turn.last()
        return json_response(
            ChatCompletion(
                id=completion_id,
                created=created,
                model=self._service.model_name,
                choices=[
                    self._choice(turn, completion, answer, request) for completion, answer in zip(output.outputs, answers, strict=True)
                ],
                usage=usage([output]),
                prompt_logprobs=prompt_logprobs(output),
            )
        )

    def _choice(self, turn: Turn, completion: CompletionOutput, answer: Answer, request: ChatCompletionRequest) -> ChatChoice:
        calls = [ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)) for call in answer.calls]
        reason = turn.finish_reason(completion)
        assert reason is not None
        return ChatChoice(
            index=completion.index,
            message=ChatMessage(content=answer.text if answer.text or not calls else None, tool_calls=calls or UNSET),
            finish_reason=reason,
            logprobs=_logprobs(completion, request),
            stop_reason=stop_reason(completion),
        )

    async def _events(self, turn: Turn, request: ChatCompletionRequest, completion_id: str, created: int) -> AsyncGenerator[bytes, None]:
        options = request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        counts = UsageSoFar()
        chunk = partial(ChatChunk, id=completion_id, created=created, model=self._service.model_name)
        counts.add_prompt(turn.started.first)
        async with turn:
            roles = [ChunkChoice(index=c.index, delta=Delta(role="assistant", content="")) for c in turn.started.first.outputs]
            yield event(chunk(choices=roles, usage=counts.usage() if continuous else UNSET))
            texts = TextEvents(lambda index, text: chunk(choices=[ChunkChoice(index=index, delta=Delta(content=text))]))
            last_output = None
            async for output, completion in turn.outputs():
                if output is not last_output:
                    counts.add(output)
                    last_output = output
                pieces = turn.pieces(completion, completion.text)
                if len(pieces) == 1 and type(pieces[0]) is TextPiece and not (continuous or request.logprobs or completion.finished):
                    yield texts.event(completion.index, pieces[0].text)
                    continue
                deltas = _deltas(pieces)
                logprobs = _logprobs(completion, request)
                used = counts.usage() if continuous else UNSET
                # The log-probabilities go with the first delta of these tokens, and the reason with the last.
                if not deltas and (completion.finished or logprobs is not None):
                    deltas = [Delta()] if completion.finished else [Delta(content="")]
                for number, delta in enumerate(deltas):
                    choice = ChunkChoice(index=completion.index, delta=delta, logprobs=logprobs if number == 0 else None)
                    if completion.finished and number == len(deltas) - 1:
                        choice.finish_reason, choice.stop_reason = turn.finish_reason(completion), stop_reason(completion)
                    yield event(chunk(choices=[choice], usage=used))
            if options and options.include_usage:
                yield event(chunk(choices=[], usage=counts.usage()))
            yield DONE


def _params(request: ChatCompletionRequest, structured_outputs: StructuredOutputsParams | None, changes: dict[str, Any]) -> SamplingParams:
    return sampling_params(
        request,
        max_tokens=request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_outputs=structured_outputs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        **changes,
    )


def functions_of(tools: Sequence[Tool] | None) -> list[Function]:
    return [Function(tool.function.name, tool.function.description, tool.function.parameters) for tool in tools or ()]


def _tools(request: ChatCompletionRequest) -> ToolUse:
    mode, names = chat_tool_choice(request.tool_choice)
    tools = tool_use(functions_of(request.tools), mode, parallel=request.parallel_tool_calls is not False, names=names)
    is_structured = request.structured_outputs is not None or (
        request.response_format is not None and request.response_format.type != "text"
    )
    if tools.is_forced and is_structured:
        raise RequestError(400, "tool_choice and response_format both say what to answer: give one of them", param="tool_choice")
    return tools


def _logprobs(completion: CompletionOutput, request: ChatCompletionRequest) -> ChatLogprobs | None:
    if not request.logprobs or completion.logprobs is None:
        return None
    return chat_logprobs(completion.token_ids, completion.logprobs, num_top=request.top_logprobs or 0)


def _deltas(pieces: Sequence[Piece]) -> list[Delta]:
    """One chunk a piece, and the beginning of a call together with the first of its arguments, if they are there."""
    deltas: list[Delta] = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            deltas.append(Delta(content=piece.text))
        elif isinstance(piece, CallStart):
            call = ToolCallDelta(index=piece.number, id=piece.id, type="function", function=FunctionDelta(name=piece.name))
            deltas.append(Delta(tool_calls=[call]))
        else:
            deltas.append(Delta(tool_calls=[ToolCallDelta(index=piece.number, function=FunctionDelta(arguments=piece.text))]))
    return deltas
