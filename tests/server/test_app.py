"""The app as a whole: what is served, its description, and that it can be a part of another program."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from aioengine.engine.async_engine import AsyncEngine
from aioengine.server import ServerSettings, create_app
from aioengine.server.app import routes
from aioengine.server.openapi import OPERATIONS, document
from aioengine.server.run import serve_app
from aioengine.server.service import Service
from aioengine.testing import FakeExecutor, FakeTokenizer


# ------------------------------------------------------------------ the small endpoints
async def test_models_are_listed_under_every_name(serve: Any) -> None:
    async with serve(settings=ServerSettings(served_model_names=["fake", "org/other"])) as served:
        cards = (await served.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["fake", "org/other"]
        assert cards[0]["max_model_len"] == 2048
        assert (await served.client.get("/v1/models/org/other")).json() == cards[1]
        assert (await served.client.get("/v1/models/third")).status_code == 404
        assert (await served.chat(model="org/other"))["model"] == "fake"
        error = await served.chat(model="third", status=404)
        assert error["error"]["type"] == "not_found_error"
        assert error["error"]["param"] == "model"


async def test_tokens_and_texts_are_each_other_s(served: Any) -> None:
    tokens = await served.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})
    assert tokens["tokens"] == [257, 72, 0xC3, 0xA9]
    assert tokens["count"] == 4
    assert tokens["max_model_len"] == 2048
    assert tokens["token_strs"][:2] == ["<bos>", "H"]
    assert (await served.post("/detokenize", {"tokens": tokens["tokens"]}))["prompt"] == "<bos>Hé"
    bodies: list[dict[str, Any]] = [{}, {"prompt": "x", "messages": []}, {"messages": []}]
    for body in bodies:
        await served.post("/tokenize", body, status=400)
    for bad in ([-1], [261], [2**70]):
        await served.post("/detokenize", {"tokens": bad}, status=400)


async def test_embeddings_of_texts_and_token_ids(served: Any) -> None:
    """The fake engine's vectors are the number of tokens and their mean."""
    answer = await served.post("/v1/embeddings", {"model": "fake", "input": ["ab", [5, 6, 7]]})
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "embedding"), (1, "embedding")]
    assert answer["data"][1]["embedding"] == [3.0, 6.0]
    num_tokens = answer["data"][0]["embedding"][0] + 3
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    coded = await served.post("/v1/embeddings", {"input": [5, 6, 7], "encoding_format": "base64"})
    assert struct.unpack("<2f", base64.b64decode(coded["data"][0]["embedding"])) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input must be text, token ids, or a list of either"),
        ({"input": ["a", 5]}, r"input[1] must be text or token ids"),
        ({"input": "a", "dimensions": 64}, "dimensions is not supported"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": [5, 10**9]}, "not in the vocabulary"),
        ({}, "input"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(served: Any, body: dict[str, Any], message: str) -> None:
    error = await served.post("/v1/embeddings", body, status=400)
    assert message in error["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/completions", 405), ("/v1", 404), ("/docs", 404)])
async def test_what_is_not_served_has_an_error_object_too(served: Any, path: str, status: int) -> None:
    response = await served.client.get(path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_long_text_does_not_hold_the_loop(served: Any) -> None:
    """Other people's tokens wait while something holds the loop: a template or a tokenizer that takes long does not."""
    import time

    tokenizer = served.engine.tokenizer
    slow = type(tokenizer).encode

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 10_000:
            time.sleep(0.3)
        return list(slow(tokenizer, text[:100], add_special_tokens=add_special_tokens))

    tokenizer.encode = encode
    for path, body in (
        ("/tokenize", {"prompt": "x" * 20_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 20_000}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 20_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 20_000}], "max_tokens": 1}),
    ):
        asking = asyncio.ensure_future(served.client.post(path, json=body))
        longest, last = 0.0, time.perf_counter()
        while not asking.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
        assert asking.result().status_code == 200
        assert longest < 0.2, f"{path} held the loop for {longest:.2f} s"


# ------------------------------------------------------------------ its description
def test_every_route_is_described_and_everything_described_is_served() -> None:
    service = Service(AsyncEngine(executor=FakeExecutor()), ServerSettings())
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes(service)
        for method in (route.methods or ())
        if method != "HEAD" and route.path != "/openapi.json"
    }
    assert served == {(operation.path, operation.method) for operation in OPERATIONS}


async def test_the_description_is_openapi_whose_references_all_lead_somewhere(served: Any) -> None:
    described = (await served.client.get("/openapi.json")).json()
    assert described == json.loads(json.dumps(document(model_names=["fake"])))
    assert described["openapi"].startswith("3.1")
    names = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if "$ref" in value else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    assert references(described) == names


# ------------------------------------------------------------------ in somebody else's program
async def test_it_mounts_into_a_starlette_program() -> None:
    engine = AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    async def own(request: Any) -> Any:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("mine")

    settings = ServerSettings(api_key="a-secret-key", served_model_names=["fake"])
    program = Starlette(routes=[Route("/own", own), Mount("/llm", create_app(engine, settings))], lifespan=lifespan)
    async with (
        program.router.lifespan_context(program),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=program), base_url="http://x") as client,
    ):
        assert (await client.get("/own")).text == "mine"
        assert (await client.get("/llm/health")).status_code == 200
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert (await client.post("/llm/v1/chat/completions", json=body)).status_code == 401
        headers = {"authorization": "Bearer a-secret-key"}
        assert (await client.post("/llm/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 404
        assert (await client.get("/llm/v1/messages", headers=headers)).json()["type"] == "error"
        assert (await client.get("/llm/openapi.json", headers=headers)).json()["servers"] == [{"url": "/llm"}]


# ------------------------------------------------------------------ over a real socket
@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = asyncio.create_task(serve_app(app, host="127.0.0.1", port=port))
    for _ in range(500):
        await asyncio.sleep(0.01)
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            continue
        writer.close()
        break
    try:
        yield port
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/chat/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/completions", True),
        ("/v1/responses", True),
        ("/v1/responses", False),
        ("/v1/messages", True),
    ],
)
async def test_a_client_that_leaves_frees_its_blocks_within_a_second(serve: Any, wait_for: Any, path: str, stream: bool) -> None:
    executor = FakeExecutor(num_blocks=1025, block_size=4, max_num_seqs=8, forward_s=0.005)
    async with serve(executor=executor) as served, listening(served.client._transport.app) as port:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "prompt": ["a", "b"],
            "input": "x",
            "max_tokens": 1900,
            "max_output_tokens": 1900,
            "stream": stream,
            "temperature": 0,
        }
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        if stream:
            while b"data:" not in await reader.readline():
                pass
        await wait_for(lambda: served.num_used_blocks > 3)
        writer.close()
        await wait_for(lambda: served.num_used_blocks == 0, within_s=1)
        assert served.engine.stats().num_running_reqs == 0
