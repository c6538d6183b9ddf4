"""What a client is told when something is wrong: the status and OpenAI's error object for each kind of error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from aioengine.errors import (
    AioEngineError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestTimeoutError,
)

_ENCODER = msgspec.json.Encoder()
RETRY_AFTER_S = 1


class RequestError(Exception):
    """A request that is refused here, before the engine sees it."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, kind, param)


@dataclass(frozen=True, slots=True)
class Problem:
    """kind: OpenAI's `type` of the error."""

    status: int
    message: str
    kind: str
    param: str | None = None


def problem_of(exc: BaseException) -> Problem:
    """The status, and what to say, for whatever a handler may raise. What nobody raised on purpose is not told to the client."""
    match exc:
        case RequestError():
            return exc.problem
        case InvalidRequestError():
            return Problem(400, str(exc), "invalid_request_error")
        case EngineOverloadedError():
            return Problem(429, str(exc), "rate_limit_error")
        case RequestTimeoutError():
            return Problem(504, str(exc), "timeout_error")
        case EngineDeadError():
            return Problem(500, str(exc), "server_error")
        case RecursionError():  # what is deep can come through the decoder and be too deep for what follows
            return Problem(400, "the body is nested too deeply", "invalid_request_error")
        case AioEngineError():
            return Problem(500, str(exc), "server_error")
    return Problem(500, "internal error; the server's log has it", "server_error")


def error_object(problem: Problem) -> dict[str, Any]:
    """OpenAI's form."""
    return {"error": {"message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.status}}


def error_response(problem: Problem) -> Response:
    return json_response(error_object(problem), problem.status, headers=_headers(problem))


# ------------------------------------------------------------------ Anthropic's form, of /v1/messages
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error_object(problem: Problem) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": None}


def anthropic_error(problem: Problem) -> Response:
    return json_response(anthropic_error_object(problem), problem.status, headers=_headers(problem))


def error_at(path: str, problem: Problem) -> Response:
    """In the form of the API that the path belongs to."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_error(problem) if is_anthropic else error_response(problem)


# ------------------------------------------------------------------
def _headers(problem: Problem) -> dict[str, str] | None:
    return {"retry-after": str(RETRY_AFTER_S)} if problem.status in (429, 503) else None


def json_response(value: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    return Response(_ENCODER.encode(value), status, headers=headers, media_type="application/json")
