"""Nobody comes in without the key, from a foreign page, or by a spelling of a path that one part reads as another does not."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

import aioengine.server.auth as auth
from aioengine.server import ServerSettings
from aioengine.server.auth import OPEN_PATHS
from tests.server.sockets import KEY, Answer, Served, http, serving

LOCKED = {"api_key": KEY}
WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"authorization": "Bearer " + KEY[::-1]},
    "a prefix": {"authorization": "Bearer " + KEY[:-1]},
    "longer": {"authorization": "Bearer " + KEY + "0"},
    "empty": {"authorization": "Bearer "},
    "another scheme": {"authorization": "Basic " + KEY},
    "without scheme": {"authorization": KEY},
    "upper case": {"authorization": "Bearer " + KEY.upper()},
    "no ASCII": {"authorization": "Bearer \xff\xfe" + KEY},
    "x-api-key": {"x-api-key": KEY + " x"},
    "in a cookie": {"cookie": f"api_key={KEY}"},
}


def routes(app: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every method and path of an app."""
    for route in app.routes:
        if isinstance(route, Route):
            path = route.path.replace("{name:path}", "fake")
            while "{" in path:
                path = path[: path.index("{")] + "x" + path[path.index("}") + 1 :]
            for method in sorted(route.methods or {"GET"}):
                yield method, prefix + path
        elif isinstance(route, Mount):
            yield from routes(route, prefix + route.path)


async def ask(served: Served, method: str, path: str, headers: dict[str, str]) -> Answer:
    return await served.exchange(http(method, path, {} if method not in ("GET", "HEAD") else None, headers))


def mounted(own: Starlette) -> Starlette:
    return Starlette(routes=[Mount("/llm", app=own)])


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_no_route_but_the_two_open_ones_answers_without_the_right_key(prefix: str) -> None:
    async with serving(settings=LOCKED, app=mounted if prefix else None) as served:
        found = list(routes(served.app))
        assert len(found) > 10
        for method, path in found:
            for name, headers in WRONG.items() if path == "/v1/models" else [("none", {}), ("wrong", WRONG["wrong"])]:
                answer = await ask(served, method, prefix + path, headers)
                expected = {200, 405} if path in OPEN_PATHS else {401}
                assert answer.status in expected, (method, path, name, answer)
        assert (await ask(served, "GET", prefix + "/nowhere", {})).status == 401, "not even what there is can be found out"


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_the_key_opens(prefix: str) -> None:
    async with serving(settings=LOCKED, app=mounted if prefix else None) as served:
        for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}):
            assert (await served.get(prefix + "/v1/models", headers)).status == 200


async def test_a_key_given_twice_or_beside_another_is_refused() -> None:
    twice = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nauthorization: Bearer other\r\n\r\n".encode()
    async with serving(settings=LOCKED) as served:
        assert (await served.exchange(twice)).status == 400
        assert (await served.get("/v1/models", {"authorization": "Bearer wrong-wrong", "x-api-key": KEY})).status == 401


async def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def noted(shown: bytes, key: bytes) -> bool:
        compared.append((shown, key))
        return hmac.compare_digest(shown, key)

    monkeypatch.setattr(auth, "compare_digest", noted)
    async with serving(settings=LOCKED) as served:
        await served.get("/v1/models", {"x-api-key": "guess"})
    assert compared == [(b"guess", KEY.encode())]
    assert KEY not in repr(ServerSettings(api_key=KEY)), "a settings object in a log shows no key"


TRICKS = (
    *("//health/../v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2f..%2fv1%2fmodels", "/health/v1/models"),
    *("/health;/v1/models", "/health%00/v1/models", "/%2e/health", "/health/", "/health//", "/health.", "/HEALTH", "/health%20"),
    *("//v1/models", "/v1//models", "/v1/models/", "/v1/models/.", "/./v1/models", "/v1/models?x=/health", "/v1/models#/health"),
    *("http://127.0.0.1/v1/models", "http://127.0.0.1//health/../v1/models", "http://health/v1/models", "/v1/models%3f/health"),
    *("/ping/../metrics", "/ping%5c..%5cmetrics", "/\\ping\\..\\metrics", "/v1/models/%2e%2e/%2e%2e/health", "/%68ealth/../load"),
)


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_no_spelling_of_a_path_passes_the_gate(prefix: str) -> None:
    async with serving(settings=LOCKED, app=mounted if prefix else None) as served:
        for trick in TRICKS:
            path = trick.replace("127.0.0.1", "127.0.0.1" + prefix) if trick.startswith("http") else prefix + trick
            for method in ("GET", "POST"):
                answer = await served.exchange(http(method, path, None))
                assert answer.status in (400, 401, 404, 405), (path, method, answer)
                assert b"model" not in answer.body
                assert "location" not in answer.headers, "a redirect would be made of what the client wrote"
        assert await served.is_well() or prefix
    async with serving() as served:  # and nothing is read outside of the app where no key is asked
        for trick in TRICKS:
            assert (await served.exchange(http("GET", trick))).status < 500, trick


# ---------------------------------------------------------------------------------------------------- hosts and origins
LOCAL = {"allowed_hosts": ("localhost", "127.0.0.1", "[::1]")}


FOREIGN_HOSTS = (
    *("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "localhost.", "localhost:80@evil", ""),
    *("evil.example#localhost", "localhost:", "localhost:x", "[::1", "[::2]", "127.0.0.2", "0.0.0.0", "localhost, evil", "2130706433"),
)


async def test_only_the_own_host_names_are_answered() -> None:
    async with serving(settings=LOCAL) as served:
        for host in FOREIGN_HOSTS:
            for path in ("/v1/models", "/health"):
                assert (await served.get(path, {"host": host})).status in (0, 400), host
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
            assert (await served.get("/v1/models", {"host": host})).status == 200, host


AMBIGUOUS_HEADS = (
    "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nhost: localhost\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\n\r\n",
    "GET /v1/models HTTP/1.0\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nx: y\r\n host: localhost\r\n\r\n",
)


async def test_a_host_that_two_could_read_differently_is_refused() -> None:
    async with serving(settings=LOCAL) as served:
        for head in AMBIGUOUS_HEADS:
            assert (await served.exchange(head.encode())).status in (0, 400), head


async def test_a_page_of_a_foreign_origin_may_not_call() -> None:
    body = {"prompt": "x"}
    async with serving(settings={**LOCAL, "allowed_origins": ("https://app.example",)}) as served:
        for origin in ("null", "http://evil.example", "http://localhost:3000", "https://app.example.evil", "", "*"):
            answer = await served.post("/v1/completions", body, {"origin": origin, "content-type": "text/plain"})
            assert answer.status == 403
            assert not any(name.startswith("access-control") for name in answer.headers)
            preflight = {"origin": origin, "access-control-request-method": "POST"}
            assert (await served.exchange(http("OPTIONS", "/v1/completions", None, preflight))).status == 403


async def test_an_allowed_page_may_call_and_is_told_so() -> None:
    origin = {"origin": "https://app.example"}
    async with serving(settings={**LOCKED, "allowed_origins": ("https://app.example",)}) as served:
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await served.exchange(http("OPTIONS", "/v1/completions", None, asked))
        assert preflight.status == 204, "a browser asks before it shows the key"
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert (await served.get("/v1/models", origin)).status == 401
        answer = await served.get("/v1/models", {**origin, "x-api-key": KEY})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")


async def test_by_default_no_page_may_call() -> None:
    async with serving() as served:
        assert (await served.get("/v1/models", {"origin": "http://localhost"})).status == 403
        assert "access-control-allow-origin" not in (await served.get("/v1/models")).headers
