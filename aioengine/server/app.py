"""The ASGI application: routes over one engine, behind the gate."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aioengine.engine.async_engine import AsyncEngine
from aioengine.server.auth import Gate
from aioengine.server.chat import ChatCompletions
from aioengine.server.completions import Completions
from aioengine.server.errors import Problem, error_response
from aioengine.server.models import Models
from aioengine.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from aioengine.server.service import Service
from aioengine.server.settings import ServerSettings


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> Starlette:
    """An app for `engine`, which somebody else starts and shuts down, in the event loop that the app runs in."""
    settings = settings or ServerSettings()
    service = Service(engine, settings)
    chat, completions, models = ChatCompletions(service), Completions(service), Models(service)
    post = ["POST"]
    routes = [
        Route("/v1/chat/completions", service.endpoint(ChatCompletionRequest, chat.answer), methods=post),
        Route("/v1/completions", service.endpoint(CompletionRequest, completions.answer), methods=post),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.show),
        Route("/tokenize", service.endpoint(TokenizeRequest, models.tokenize), methods=post),
        Route("/detokenize", service.endpoint(DetokenizeRequest, models.detokenize), methods=post),
        Route("/health", models.health),
        Route("/ping", models.health, methods=["GET", "POST"]),
        Route("/version", models.version),
        Route("/load", models.load),
        Route("/metrics", models.metrics),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False  # a redirect would be made of the Host header that the client wrote
    app.state.service = service
    return app


async def _http_error(request: Request, exc: Exception) -> Response:
    """What the router itself refuses: an unknown path, a wrong method."""
    assert isinstance(exc, HTTPException)
    kind = "not_found_error" if exc.status_code == 404 else "invalid_request_error"
    return error_response(Problem(exc.status_code, f"{request.method} is not served at this path: {exc.detail}", kind))
