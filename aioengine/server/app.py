"""The ASGI application: routes over one engine, behind the gate."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aioengine.engine.async_engine import AsyncEngine
from aioengine.server.auth import Gate
from aioengine.server.chat import ChatCompletions
from aioengine.server.completions import Completions
from aioengine.server.embeddings import EmbeddingsEndpoint
from aioengine.server.errors import Problem, anthropic_error, error_at, error_response
from aioengine.server.leaving import keep_direct
from aioengine.server.messages import Messages
from aioengine.server.messages_protocol import CountTokensRequest, MessagesRequest
from aioengine.server.models import Models
from aioengine.server.openapi import openapi
from aioengine.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from aioengine.server.responses import Responses
from aioengine.server.responses_protocol import ResponsesRequest
from aioengine.server.service import Service
from aioengine.server.settings import ServerSettings
from aioengine.server.tracing import RequestTracer

T = TypeVar("T")


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None, *, tracer: RequestTracer | None = None) -> Starlette:
    """An app for `engine`, which somebody else starts and shuts down, in the event loop that the app runs in.

    It is an ordinary ASGI app, and can be a part of another one:

        @asynccontextmanager
        async def lifespan(app):
            async with engine:
                yield

        engine = AsyncEngine("smollm2")
        app = Starlette(routes=[Mount("/llm", create_app(engine))], lifespan=lifespan)     # POST /llm/v1/chat/completions

    FastAPI's `app.mount("/llm", create_app(engine))` does the same. tracer: writes a span for each generation (extra `[otel]`).
    """
    settings = settings or ServerSettings()
    service = Service(engine, settings, tracer=tracer)
    app = _App(
        routes=routes(service),
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would be made of the Host header that the client wrote
    app.state.service = service
    return app


class _App(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_direct(scope, send)
        await super().__call__(scope, receive, send)


def routes(service: Service) -> list[Route]:
    """Every path, and who answers it. What it takes and gives is written down in `openapi.OPERATIONS`."""
    chat, completions, models = ChatCompletions(service), Completions(service), Models(service)
    responses, messages, embeddings = Responses(service), Messages(service), EmbeddingsEndpoint(service)
    return [
        *_posts(service, "/v1/chat/completions", ChatCompletionRequest, chat.answer),
        *_posts(service, "/v1/completions", CompletionRequest, completions.answer),
        *_posts(service, "/v1/responses", ResponsesRequest, responses.answer),
        Route("/v1/responses/{response_id}", responses.show),
        Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", responses.input_items),
        *_posts(service, "/v1/messages", MessagesRequest, messages.answer, anthropic_error),
        *_posts(service, "/v1/messages/count_tokens", CountTokensRequest, messages.count_tokens, anthropic_error),
        *_posts(service, "/v1/embeddings", EmbeddingRequest, embeddings.answer),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.show),
        *_posts(service, "/tokenize", TokenizeRequest, models.tokenize),
        *_posts(service, "/detokenize", DetokenizeRequest, models.detokenize),
        Route("/health", models.health),
        Route("/ping", models.health, methods=["GET", "POST"]),
        Route("/version", models.version),
        Route("/load", models.load),
        Route("/metrics", models.metrics),
        Route("/openapi.json", openapi),
    ]


def _posts(
    service: Service,
    path: str,
    kind: type[T],
    answer: Callable[[T], Coroutine[Any, Any, Response]],
    respond: Callable[[Problem], Response] = error_response,
) -> list[Route]:
    return [Route(path, service.endpoint(kind, answer, respond), methods=["POST"])]


async def _http_error(request: Request, exc: Exception) -> Response:
    """What the router itself refuses: an unknown path, a wrong method."""
    assert isinstance(exc, HTTPException)
    kind = "not_found_error" if exc.status_code == 404 else "invalid_request_error"
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return error_at(path, Problem(exc.status_code, f"{request.method} is not served at this path: {exc.detail}", kind))
