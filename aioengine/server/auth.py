"""Who may come in: the API key on every path but the two that say the server lives, and no foreign host or page."""

from __future__ import annotations

from hmac import compare_digest

from starlette.types import ASGIApp, Receive, Scope, Send

from aioengine.server.errors import Problem, error_at
from aioengine.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ping"})


class Gate:
    """ASGI middleware. Refuses by status 401 (key), 400 (host) and 403 (origin) before anything of the body is read."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif problem is not None:
            await error_at(_own_path(scope), problem)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in headers and name in (b"host", b"authorization", b"x-api-key", b"origin"):
                return Problem(400, f"the header {name.decode('latin-1')} is given twice", "invalid_request_error")
            headers[name] = value
        if self._hosts and _host_name(headers.get(b"host", b"")) not in self._hosts:
            return Problem(400, "this server does not answer to that host name", "invalid_request_error")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin not in self._origins:
            return Problem(403, "pages of this origin may not call", "permission_error")
        if self._key is None or _own_path(scope) in OPEN_PATHS or self._shows_key(headers):
            return None
        return Problem(401, "no valid API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`", "authentication_error")

    def _shows_key(self, headers: dict[bytes, bytes]) -> bool:
        assert self._key is not None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return compare_digest(shown, self._key)


def _own_path(scope: Scope) -> str:
    """Mounted into another program, the path that counts is the one within this app."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _host_name(header: bytes) -> str:
    """Without the port: `localhost:8000`, `[::1]:8000`."""
    text = header.decode("latin-1").lower()
    return text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]
