"""Who may come in: the API key on every path but the two that say the server lives, and no foreign host or page."""

from __future__ import annotations

from hmac import compare_digest

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aioengine.server.errors import Problem, error_at
from aioengine.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ping"})
_ONCE = frozenset({b"host", b"authorization", b"x-api-key", b"origin"})
_PREFLIGHT_AGE_S = b"600"


class Gate:
    """ASGI middleware. Refuses by status 401 (key), 400 (host) and 403 (origin) before anything of the body is read."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, problem = _single_headers(scope)
        problem = problem or self._foreign(headers)
        origin = headers.get(b"origin")
        if problem is None and origin is not None:
            send = _with_origin(send, origin)
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                await _answer_preflight(headers, send)  # a browser asks before it shows the key
                return
        problem = problem or self._without_key(scope, headers)
        if problem is not None:
            await error_at(_path_within(scope), problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _foreign(self, headers: dict[bytes, bytes]) -> Problem | None:
        if self._hosts and _host_name(headers.get(b"host", b"")) not in self._hosts:
            return Problem(400, "this server does not answer to that host name", "invalid_request_error")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in self._origins:
            return Problem(403, "pages of this origin may not call", "permission_error")
        return None

    def _without_key(self, scope: Scope, headers: dict[bytes, bytes]) -> Problem | None:
        if self._key is None or _path_within(scope) in OPEN_PATHS or self._shows_key(headers):
            return None
        return Problem(401, "no valid API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`", "authentication_error")

    def _shows_key(self, headers: dict[bytes, bytes]) -> bool:
        assert self._key is not None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return compare_digest(shown, self._key)


def _single_headers(scope: Scope) -> tuple[dict[bytes, bytes], Problem | None]:
    """By name. Those that decide who comes in may not be given twice: somebody before us may have read the other one."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers and name in _ONCE:
            return {}, Problem(400, f"the header {name.decode('latin-1')} is given twice", "invalid_request_error")
        headers[name] = value
    return headers, None


def _path_within(scope: Scope) -> str:
    """The path within this app, as its router sees it, where it is mounted into another program."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and (path == root or path.startswith(root + "/")) else path


def _host_name(header: bytes) -> str:
    """Without the port: `localhost:8000`, `[::1]:8000`. "" for what is no host and port."""
    text = header.decode("latin-1").lower()
    head, bracket, rest = text.rpartition("]")
    name, colon, port = rest.partition(":")
    if colon and not (port.isascii() and port.isdigit()):
        return ""
    return head + bracket + name


def _with_origin(send: Send, origin: bytes) -> Send:
    """Lets the browser show its page what is sent. Only for origins that were allowed."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"access-control-allow-origin", origin), (b"vary", b"origin")]}
        await send(message)

    return sending


async def _answer_preflight(headers: dict[bytes, bytes], send: Send) -> None:
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"authorization, content-type")),
        (b"access-control-max-age", _PREFLIGHT_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})
