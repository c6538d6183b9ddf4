"""From a request to `/v1/responses` to a chat: its messages, tools and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from aioengine.server.errors import RequestError
from aioengine.server.messages_in import Message, content_text, tool_call
from aioengine.server.responses_protocol import ResponsesRequest
from aioengine.server.sampling import json_format
from aioengine.server.tools import Function, ToolUse, chat_tool_choice, tool_use

_IGNORED_ITEMS = ("reasoning",)
_ROLES = {"developer": "system"}


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as a list of items, whatever it came as. Raises RequestError."""
    items = [{"type": "message", "role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    if not items and request.previous_response_id is None:
        raise RequestError(400, "input must not be empty", param="input")
    return items


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Chat messages; the calls that follow each other are those of one message. Raises RequestError."""
    messages: list[Message] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if not isinstance(role, str) or not role:
                    raise _wrong(f"{where}.role must be a text")
                messages.append({"role": _ROLES.get(role, role), "content": content_text(item.get("content"), where)})
            case "function_call":
                call = tool_call(_text(item, "call_id", where), _text(item, "name", where), _text(item, "arguments", where))
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case "function_call_output":
                content = content_text(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
            case kind if kind not in _IGNORED_ITEMS:
                raise _wrong(f"{where} is of type {str(kind)[:40]!r}, which this server does not take")
    return messages


def with_instructions(instructions: str | None, messages: list[Message]) -> list[Message]:
    """Instructions are of this response alone: those of the one before do not count any more. Templates want one system message."""
    if not instructions:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{key} must be a text")
    return value


def _wrong(message: str) -> RequestError:
    return RequestError(400, message, param="input")


def tools_of(request: ResponsesRequest) -> ToolUse:
    """Raises RequestError."""
    mode, names = chat_tool_choice(request.tool_choice)
    functions = [Function(tool.name, tool.description, tool.parameters) for tool in request.tools or ()]
    tools = tool_use(functions, mode, parallel=request.parallel_tool_calls is not False, names=names)
    if tools.is_forced and _format(request) is not None:
        raise RequestError(400, "tool_choice and text.format both say what to answer: give one of them", param="tool_choice")
    return tools


def params_of(request: ResponsesRequest, structured_outputs: StructuredOutputsParams | None, changes: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequestError and RequestError."""
    names = ("temperature", "top_p", "top_k", "seed", "stop")
    given = {name: value for name in names if (value := getattr(request, name)) is not None}
    return SamplingParams(
        max_tokens=request.max_output_tokens,
        structured_outputs=structured_outputs or _format(request),
        output_kind=RequestOutputKind.DELTA,
        **given,
        **changes,
    )


def _format(request: ResponsesRequest) -> StructuredOutputsParams | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    return json_format(form.type, form.schema, where="text.format")
