"""The web server of `aioengine top --web`: textual-serve with a page of our own, and a check of who opens the connection."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_PAGE = Path(__file__).with_name("web_page")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing comes from another host. xterm.js, which draws the terminal, writes styles of its own."""


class LocalServer(Server):
    """Refuses WebSocket connections that another web site's page opened.

    A browser lets any page connect to localhost, and a page that could press keys here could submit prompts and abort
    requests. The browser says in the Origin header which site the page is from. On a loopback host, names other than the
    loopback's are refused too: a foreign name that resolves to 127.0.0.1 has an Origin of its own making.

    The page asks only its own host, by whatever name it was opened, has the focus from the start, and a title.
    """

    def __init__(self, command: str, *, host: str, port: int, title: str) -> None:
        super().__init__(command, host=host, port=port, title=title, templates_path=_PAGE)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.router.add_static("/page", _PAGE)
        app.on_response_prepare.append(_add_policy)
        return app

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        if not is_same_site(request.headers.get("Origin"), request.host, loopback_only=self.host in LOOPBACK):
            raise web.HTTPForbidden(text="the page is from another site")
        return await super().handle_websocket(request)


async def _add_policy(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"


def is_same_site(origin: str | None, host: str, *, loopback_only: bool) -> bool:
    """Whether a page of `origin` (None: not a browser) may talk to a server that was addressed as `host`."""
    name = urlsplit(f"//{host}").hostname
    if loopback_only and name not in LOOPBACK:
        return False
    return origin is None or urlsplit(origin).netloc == host
