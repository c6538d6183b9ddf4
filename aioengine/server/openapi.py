"""`/openapi.json`: the description of what is served, made from the types that read and write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aioengine import __version__
from aioengine.server import answers, messages_protocol, protocol, responses_protocol
from aioengine.server.errors import json_response

_SCHEMAS = "#/components/schemas/"
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_TEXT = {"type": "string"}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# What any request may be told, whatever it says: see `errors.problem_of` and `auth.Gate`.
_ERROR_STATUSES = ("400", "401", "403", "404", "405", "408", "413", "429", "500", "503", "504")


@dataclass(frozen=True, slots=True)
class Operation:
    """body, answer: the types; None: there is none. streams: the answer may come as events, if the body asks for that."""

    path: str
    method: str
    summary: str
    body: type | None = None
    answer: type | None = None
    streams: bool = False
    error: type = answers.ErrorAnswer
    media_type: str = "application/json"


_RESPONSE = "/v1/responses/{response_id}"
OPERATIONS = (
    Operation("/v1/chat/completions", "post", "Answer a chat", protocol.ChatCompletionRequest, answers.ChatCompletion, streams=True),
    Operation("/v1/completions", "post", "Continue texts", protocol.CompletionRequest, answers.Completion, streams=True),
    Operation(
        "/v1/responses", "post", "Make a response", responses_protocol.ResponsesRequest, responses_protocol.ResponseAnswer, streams=True
    ),
    Operation(_RESPONSE, "get", "A stored response", answer=responses_protocol.ResponseAnswer),
    Operation(_RESPONSE, "delete", "Forget a response", answer=responses_protocol.DeletedResponse),
    Operation(_RESPONSE + "/cancel", "post", "End a response that is being made", answer=responses_protocol.ResponseAnswer),
    Operation(_RESPONSE + "/input_items", "get", "What a response answers", answer=responses_protocol.InputItems),
    Operation(
        "/v1/messages",
        "post",
        "Answer a chat, in Anthropic's form",
        messages_protocol.MessagesRequest,
        messages_protocol.MessageAnswer,
        streams=True,
        error=messages_protocol.MessagesError,
    ),
    Operation(
        "/v1/messages/count_tokens",
        "post",
        "How many tokens a chat has",
        messages_protocol.CountTokensRequest,
        messages_protocol.TokenCount,
        error=messages_protocol.MessagesError,
    ),
    Operation("/v1/embeddings", "post", "Texts to vectors", protocol.EmbeddingRequest, answers.Embeddings),
    Operation("/v1/models", "get", "What is served", answer=answers.ModelList),
    Operation("/v1/models/{name}", "get", "One model", answer=answers.ModelCard),
    Operation("/tokenize", "post", "Text or a chat to token ids", protocol.TokenizeRequest, answers.Tokens),
    Operation("/detokenize", "post", "Token ids to text", protocol.DetokenizeRequest, answers.Text),
    Operation("/health", "get", "200 while requests are taken"),
    Operation("/ping", "get", "As /health"),
    Operation("/ping", "post", "As /health"),
    Operation("/version", "get", "The engine's version", answer=answers.Version),
    Operation("/load", "get", "How many requests there are", answer=answers.Load),
    Operation("/metrics", "get", "For Prometheus", media_type="text/plain"),
)


async def openapi(request: Request) -> Response:
    names = request.app.state.service.model_names
    return json_response(document(model_names=names, root_path=request.scope.get("root_path", "")))


def document(*, model_names: Sequence[str] = (), root_path: str = "") -> dict[str, Any]:
    """OpenAPI 3.1. model_names: what requests may call the model. root_path: where the app is mounted."""
    kinds = {kind for operation in OPERATIONS for kind in (operation.body, operation.answer, operation.error) if kind is not None}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    references, components = msgspec.json.schema_components(ordered, ref_template=_SCHEMAS + "{name}")
    schemas = dict(zip(ordered, references, strict=True))
    for component in components.values():
        # Only requests have a model that may be left out.
        if model_names and (model := component.get("properties", {}).get("model")) and "anyOf" in model:
            model["anyOf"] = [{"enum": list(model_names)}, {"type": "null"}]
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": _SECURITY,
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _described(operation: Operation, schemas: dict[type, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}{operation.path}").strip("_"),
        "parameters": _parameters(re.findall(r"\{(\w+)\}", operation.path)),
        "responses": {"200": _answer(operation, schemas)},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[operation.body]}}}
    error = {"content": {"application/json": {"schema": schemas[operation.error]}}, "description": "What is wrong"}
    described["responses"] |= dict.fromkeys(_ERROR_STATUSES, error)
    return described


def _answer(operation: Operation, schemas: dict[type, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Done"}
    if operation.answer is not None:
        answer["content"] = {"application/json": {"schema": schemas[operation.answer]}, **(_STREAM if operation.streams else {})}
    elif operation.media_type != "application/json":
        answer["content"] = {operation.media_type: {"schema": _TEXT}}
    return answer


def _parameters(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names]
