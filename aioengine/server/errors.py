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
        case AioEngineError():
            return Problem(500, str(exc), "server_error")
    return Problem(500, "internal error; the server's log has it", "server_error")


def error_object(problem: Problem) -> dict[str, Any]:
    """OpenAI's form."""
    return {"error": {"message": problem.message, "type": problem.kind, "param": problem.param, "code": problem.status}}


def error_response(problem: Problem) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_S)} if problem.status in (429, 503) else None
    return json_response(error_object(problem), problem.status, headers=headers)


def json_response(value: Any, status: int = 200, *, headers: dict[str, str] | None = None) -> Response:
    return Response(_ENCODER.encode(value), status, headers=headers, media_type="application/json")
