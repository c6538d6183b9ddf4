"""The bodies of OpenAI's `/v1/responses`: what comes in, and what goes out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aioengine.server.protocol import Count, EngineRequest, Stop, Temperature, TopK, TopP

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


# ------------------------------------------------------------------ in
class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """Functions: the tools that OpenAI itself runs are none of those here."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(EngineRequest, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    seed: int | None = None
    stop: Stop = None
    text: TextOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


# ------------------------------------------------------------------ out
class OutputText(msgspec.Struct, kw_only=True, tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[dict[str, Any]] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, kw_only=True, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: Literal["max_output_tokens", "content_filter"]


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class TextSettings(msgspec.Struct, kw_only=True):
    format: dict[str, Any]


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """What was asked for, and the answer as far as there is one."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    temperature: float
    top_p: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    metadata: dict[str, Any]
    store: bool
    background: bool
    usage: ResponsesUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    object: Literal["response"] = "response"
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    truncation: Literal["disabled"] = "disabled"
    service_tier: str = "default"
    top_logprobs: int = 0
    user: str | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """Newest first."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    has_more: bool = False
