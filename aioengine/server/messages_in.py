"""Chat messages as clients send them -> as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.server.errors import RequestError

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Content becomes text: a string, null, or the text of its parts. Raises RequestError for parts that are no text."""
    if not messages:
        raise RequestError(400, "messages must not be empty", param="messages")
    return [{**message, "content": content_text(message.get("content"), f"messages[{index}]")} for index, message in enumerate(messages)]


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
            raise RequestError(400, f"{where}.content[{number}] is of type {kind!r}: this server takes text only", param="messages")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(400, f"{where}.content[{number}] has no text", param="messages")
        texts.append(text)
    return "".join(texts)
