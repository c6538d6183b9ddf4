"""The web server of `aioengine top --web`: textual-serve, and a check of who opens the connection."""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class LocalServer(Server):
    """Refuses WebSocket connections that another web site's page opened.

    A browser lets any page connect to localhost, and a page that could press keys here could submit prompts and abort
    requests. The browser says in the Origin header which site the page is from. On a loopback host, names other than the
    loopback's are refused too: a foreign name that resolves to 127.0.0.1 has an Origin of its own making.
    """

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        if not is_same_site(request.headers.get("Origin"), request.host, loopback_only=self.host in LOOPBACK):
            raise web.HTTPForbidden(text="the page is from another site")
        return await super().handle_websocket(request)


def is_same_site(origin: str | None, host: str, *, loopback_only: bool) -> bool:
    """Whether a page of `origin` (None: not a browser) may talk to a server that was addressed as `host`."""
    name = urlsplit(f"//{host}").hostname
    if loopback_only and name not in LOOPBACK:
        return False
    return origin is None or urlsplit(origin).netloc == host
