"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from starlette.responses import Response

from aioengine.engine.inputs.input_processor import encode
from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from aioengine.server.choices import UsageSoFar
from aioengine.server.errors import RequestError, anthropic_error_object, json_response, problem_of
from aioengine.server.messages_in import Message, content_text, tool_call
from aioengine.server.messages_protocol import (
    CountTokensRequest,
    MessageAnswer,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    MessagesUsage,
    StopReason,
    TextBlock,
    TokenCount,
    ToolUseBlock,
)
from aioengine.server.service import Service, new_id, off_loop
from aioengine.server.sse import EventStream, TextEvents, event
from aioengine.server.tool_calls import CallStart, Piece, TextPiece
from aioengine.server.tools import Function, Mode, ToolUse, tool_use
from aioengine.server.turn import Answer, Call, Turn, TurnRequest, start_turn

_MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_IGNORED_BLOCKS = ("thinking", "redacted_thinking")


class Messages:
    """Two endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def count_tokens(self, request: CountTokensRequest) -> Response:
        """Raises RequestError and InvalidRequestError."""
        messages = _messages(request)
        prompt = await self._service.prompts.render(messages, tools=_tools(request), continue_final_message=_is_unfinished(messages))
        work = partial(encode, self._service.tokenizer, prompt.text, add_special_tokens=False)
        token_ids = await off_loop(len(prompt.text), work)
        return json_response(TokenCount(input_tokens=len(token_ids)))

    async def answer(self, request: MessagesRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        message_id = new_id("msg")
        messages = _messages(request)
        turn = await start_turn(
            self._service,
            TurnRequest(
                messages=messages,
                tools=_tools(request),
                params=partial(_params, request),
                continue_final_message=_is_unfinished(messages),
            ),
            request,
            request_id=message_id,
        )
        if request.stream:
            return EventStream(self._service, [turn.started], _Events(turn, message_id, self._service.name_in_answer(request.model)))
        output, answers = await turn.last()
        completion = output.outputs[0]
        counts = UsageSoFar()
        counts.add(output)
        reason, sequence = _stop(turn, completion)
        return json_response(
            MessageAnswer(
                id=message_id,
                model=self._service.name_in_answer(request.model),
                content=_blocks(answers[0]),
                stop_reason=reason,
                stop_sequence=sequence,
                usage=_usage(counts),
            )
        )


class _Events:
    """What a streamed answer says."""

    def __init__(self, turn: Turn, message_id: str, model_name: str) -> None:
        self._turn = turn
        self._message_id = message_id
        self._model_name = model_name
        self._counts = UsageSoFar()
        self._blocks = _OpenBlock()
        self._last: CompletionOutput | None = None

    def begin(self) -> bytes:
        self._counts.add_prompt(self._turn.started.first)
        message = MessageAnswer(
            id=self._message_id, model=self._model_name, content=[], stop_reason=None, stop_sequence=None, usage=_usage(self._counts)
        )
        return _named({"type": "message_start", "message": message}) + _named({"type": "ping"})

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Raises RequestError for a failed request."""
        parts: list[bytes] = []
        for completion in self._turn.new(output):
            self._counts.add(output)
            self._last = completion
            for piece in self._turn.pieces(completion, completion.text):
                parts += self._blocks.take(piece)
        return b"".join(parts)

    def end(self) -> bytes:
        assert self._last is not None
        reason, sequence = _stop(self._turn, self._last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        message = _named({"type": "message_delta", "delta": delta, "usage": _usage(self._counts)})
        return b"".join((*self._blocks.end(), message, _named({"type": "message_stop"})))

    def fail(self, exc: Exception) -> bytes:
        return event(anthropic_error_object(problem_of(exc)), name="error")

    def close(self) -> None:
        """There is nothing to clear up."""


class _OpenBlock:
    """Content comes in blocks, one after the other: each is begun, added to, and ended."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None
        self._texts = TextEvents(_text_delta, name="content_block_delta")

    def take(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, TextPiece):
            if self._kind != "text":
                yield from self._begin("text", {"type": "text", "text": ""})
            yield self._texts.event(self._index, piece.text)
            return
        if isinstance(piece, CallStart):
            yield from self._begin("tool_use", {"type": "tool_use", "id": _call_id(piece.id), "name": piece.name, "input": {}})
            return
        else:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        yield _named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _begin(self, kind: str, block: Mapping[str, Any]) -> Iterator[bytes]:
        yield from self.end()
        self._index += 1
        self._kind = kind
        yield _named({"type": "content_block_start", "index": self._index, "content_block": block})

    def end(self) -> Iterator[bytes]:
        if self._kind is not None:
            yield _named({"type": "content_block_stop", "index": self._index})
        self._kind = None


def _text_delta(index: int, text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}


def _named(value: dict[str, Any]) -> bytes:
    return event(value, name=value["type"])


def _call_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _blocks(answer: Answer) -> list[TextBlock | ToolUseBlock]:
    blocks: list[TextBlock | ToolUseBlock] = [TextBlock(text=answer.text)] if answer.text or not answer.calls else []
    return [*blocks, *(ToolUseBlock(id=_call_id(call.id), name=call.name, input=_input(call)) for call in answer.calls)]


def _input(call: Call) -> dict[str, Any]:
    """Arguments that were cut off cannot be an object: there is none then, and the stop reason says why."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _stop(turn: Turn, completion: CompletionOutput) -> tuple[StopReason | None, str | None]:
    match turn.finish_reason(completion):
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
    if completion.finish_reason == "stop" and isinstance(completion.stop_reason, str):
        return "stop_sequence", completion.stop_reason
    return "end_turn", None


def _usage(counts: UsageSoFar) -> MessagesUsage:
    usage = counts.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(input_tokens=usage.prompt_tokens - cached, output_tokens=usage.completion_tokens, cache_read_input_tokens=cached)


# ------------------------------------------------------------------ what comes in
def _params(request: MessagesRequest, structured_outputs: StructuredOutputsParams | None, changes: dict[str, Any]) -> SamplingParams:
    given = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(request, name)) is not None}
    return SamplingParams(
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or (),
        structured_outputs=structured_outputs,
        output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        **given,
        **changes,
    )


def _tools(request: MessagesRequest | CountTokensRequest) -> ToolUse:
    choice = request.tool_choice
    mode = "auto" if choice is None else _MODES[choice.type]
    if mode == "named" and (choice is None or choice.name is None):
        raise RequestError(400, 'tool_choice of type "tool" needs a name', param="tool_choice")
    names = [choice.name] if choice is not None and mode == "named" and choice.name is not None else None
    parallel = choice is None or not choice.disable_parallel_tool_use
    return tool_use([_function(tool, index) for index, tool in enumerate(request.tools or ())], mode, parallel=parallel, names=names)


def _function(tool: MessagesTool, index: int) -> Function:
    if tool.type not in (None, "custom"):
        raise RequestError(400, f"tools[{index}] is of type {tool.type[:40]!r}: this server runs no tools of its own", param="tools")
    return Function(tool.name, tool.description, tool.input_schema)


def _messages(request: MessagesRequest | CountTokensRequest) -> list[Message]:
    if not request.messages:
        raise RequestError(400, "messages must not be empty", param="messages")
    system = content_text(request.system, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(request.messages):
        messages += _chat_messages(message, f"messages[{index}]")
    return messages


def _is_unfinished(messages: list[Message]) -> bool:
    """A last message of the assistant's is the beginning of the answer."""
    return messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]


def _chat_messages(message: MessageParam, where: str) -> Iterator[Message]:
    """One message holds text, calls and the results of calls; a chat has a message for each result."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    rest: list[Mapping[str, Any]] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for number, block in enumerate(message.content):
        kind = block.get("type")
        if kind == "tool_result":
            num_results += 1
            yield _result(block, f"{where}.content[{number}]")
        elif kind == "tool_use":
            calls.append(_call(block, f"{where}.content[{number}]"))
        elif kind not in _IGNORED_BLOCKS:
            rest.append(block)
    text = content_text(rest, where)
    if calls:
        yield {"role": message.role, "content": text, "tool_calls": calls}
    elif text or not num_results:
        yield {"role": message.role, "content": text}


def _result(block: Mapping[str, Any], where: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise RequestError(400, f"{where}.tool_use_id must be a text", param="messages")
    return {"role": "tool", "tool_call_id": call_id, "content": content_text(block.get("content"), where)}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, dict | None):
        raise RequestError(400, f"{where} must have an id, a name and an input", param="messages")
    return tool_call(call_id, name, given)
