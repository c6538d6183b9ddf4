"""Chat messages as clients send them -> as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.server.errors import RequestError

Message = dict[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ROLES = {"developer": "system", "function": "tool"}  # newer and older names of the same
_PASSED_ON = ("name", "tool_call_id", "reasoning_content", "reasoning")


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Content becomes text: a string, null, or the text of its parts. The arguments of calls become objects.

    Raises RequestError for what is no message, and for parts that are no text.
    """
    if not messages:
        raise RequestError(400, "messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(given: Mapping[str, Any], where: str) -> Message:
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(400, f"{where}.role must be a text", param="messages")
    message: Message = {"role": _ROLES.get(role, role), "content": content_text(given.get("content"), where)}
    for key in _PASSED_ON:
        value = given.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise RequestError(400, f"{where}.{key} must be a text, got {type(value).__name__}", param="messages")
            message[key] = value
    calls = given.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(400, f"{where}.tool_calls must be a list", param="messages")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return message


def _call(given: Any, where: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise RequestError(400, f"{where} must be a call of a function, with its name", param="messages")
    call_id = given.get("id")
    return tool_call(call_id if isinstance(call_id, str) else "", name, function.get("arguments"))


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in the history. Arguments that are no JSON, cut off for example, stay the text that they are."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            read = arguments
        arguments = read if isinstance(read, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}}


def content_text(content: Any, where: str) -> str:
    """The text of a message's content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(400, f"{where}.content must be text, null or a list of parts, got {type(content).__name__}", param="messages")
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(
                400, f"{where}.content[{number}] is of type {str(kind)[:40]!r}: this server takes text only", param="messages"
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(400, f"{where}.content[{number}] has no text", param="messages")
        texts.append(text)
    return "".join(texts)
