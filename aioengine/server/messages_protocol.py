"""The bodies of Anthropic's `/v1/messages`: what comes in, and what goes out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioengine.server.protocol import EngineRequest, Temperature, TopK, TopP

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesTool(msgspec.Struct, kw_only=True):
    """type: the tools that Anthropic itself runs have one; there are none of those here."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageParam(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    messages: list[MessageParam]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(EngineRequest, kw_only=True):
    messages: list[MessageParam]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """As Anthropic counts: what was in the cache is not among input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class MessageAnswer(msgspec.Struct, kw_only=True):
    id: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessagesErrorDetails(msgspec.Struct, kw_only=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    error: MessagesErrorDetails
    type: Literal["error"] = "error"
    request_id: str | UnsetType | None = UNSET
