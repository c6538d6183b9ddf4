"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from aioengine.outputs import CompletionOutput, RequestOutput
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
from aioengine.server.sse import DONE, EventStream, OpenAIEvents, TextEvents, event
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
            chunk = partial(ChatChunk, id=completion_id, created=created, model=self._service.name_in_answer(request.model))
            return EventStream(self._service, [turn.started], _Events(turn, request, chunk))
        output, answers = await turn.last()
        return json_response(
            ChatCompletion(
                id=completion_id,
                created=created,
                model=self._service.name_in_answer(request.model),
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


class _Events(OpenAIEvents):
    """What a streamed answer says."""

    def __init__(self, turn: Turn, request: ChatCompletionRequest, chunk: Callable[..., ChatChunk]) -> None:
        self._turn = turn
        self._request = request
        self._chunk = chunk
        options = request.stream_options
        self._is_continuous = bool(options and options.continuous_usage_stats)
        self._is_plain = not self._is_continuous and not request.logprobs
        self._counts = UsageSoFar()
        self._texts = TextEvents(lambda index, text: chunk(choices=[ChunkChoice(index=index, delta=Delta(content=text))]))

    def begin(self) -> bytes:
        first = self._turn.started.first
        self._counts.add_prompt(first)
        return self._event([ChunkChoice(index=c.index, delta=Delta(role="assistant", content="")) for c in first.outputs])

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Raises RequestError for a failed request."""
        completion = output.outputs[0]
        if len(output.outputs) == 1 and completion.finish_reason is None and completion.text:
            self._counts.num_output += len(completion.token_ids)  # as nearly all outputs are
            return self._of_completion(completion)
        new = self._turn.new(output)
        if new:
            self._counts.add(output)
        return b"".join(map(self._of_completion, new))

    def _of_completion(self, completion: CompletionOutput) -> bytes:
        pieces = self._turn.pieces(completion, completion.text)
        if self._is_plain and len(pieces) == 1 and type(pieces[0]) is TextPiece and not completion.finished:
            return self._texts.event(completion.index, pieces[0].text)
        deltas = _deltas(pieces)
        logprobs = _logprobs(completion, self._request)
        # The log-probabilities go with the first delta of these tokens, and the reason with the last.
        if not deltas and (completion.finished or logprobs is not None):
            deltas = [Delta()] if completion.finished else [Delta(content="")]
        parts: list[bytes] = []
        for number, delta in enumerate(deltas):
            choice = ChunkChoice(index=completion.index, delta=delta, logprobs=logprobs if number == 0 else None)
            if completion.finished and number == len(deltas) - 1:
                choice.finish_reason, choice.stop_reason = self._turn.finish_reason(completion), stop_reason(completion)
            parts.append(self._event([choice]))
        return b"".join(parts)

    def _event(self, choices: list[ChunkChoice]) -> bytes:
        return event(self._chunk(choices=choices, usage=self._counts.usage() if self._is_continuous else UNSET))

    def end(self) -> bytes:
        options = self._request.stream_options
        used = event(self._chunk(choices=[], usage=self._counts.usage())) if options and options.include_usage else b""
        return used + DONE


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
