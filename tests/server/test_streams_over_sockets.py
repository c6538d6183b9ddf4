"""Streams over a real connection: written without a task where that goes, and the same events as through any ASGI server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.sockets import Served, http, serving
from tests.waiting import until

ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 30, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30},
    "/v1/responses": {"input": "x", "max_output_tokens": 30},
}


def around(seen: list[bytes]) -> Callable[[Any], Any]:
    """A program around the app that looks at what is sent, and writes it in capitals."""

    def wrap(app: Any) -> Any:
        async def program(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                if message["type"] == "http.response.body":
                    seen.append(message["body"])
                    message = {**message, "body": message["body"].upper()}
                await send(message)

            await app(scope, receive, sending)

        return program

    return wrap


def said(body: bytes) -> dict[int, str]:
    """The text of each choice, of any of the four forms."""
    texts: dict[int, str] = {}
    for line in body.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event or event["error"] is None, event
        for choice in event.get("choices", ()):
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice.get("text") or choice.get("delta", {}).get("content") or "")
        if event.get("type") == "content_block_delta":
            texts[0] = texts.get(0, "") + event["delta"]["text"]
        if event.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + event["delta"]
    return texts


async def whole(served: Served, path: str) -> dict[int, str]:
    """What the answer says when it is not streamed."""
    answer = (await served.post(path, {**ASKS[path], "temperature": 0, "ignore_eos": True, "seed": 1})).json()
    if "choices" in answer:
        return {choice["index"]: choice.get("text") or choice["message"]["content"] for choice in answer["choices"]}
    return {0: answer["content"][0]["text"] if "content" in answer else answer["output"][0]["content"][0]["text"]}


@pytest.mark.parametrize("path", sorted(ASKS))
async def test_a_stream_says_what_the_whole_answer_says(path: str) -> None:
    async with serving() as served:
        body = {**ASKS[path], "temperature": 0, "ignore_eos": True, "seed": 1, "stream": True}
        answers = await asyncio.gather(*(served.post(path, body) for _ in range(4)))
        expected = await whole(served, path)
        for answer in answers:
            assert answer.status == 200
            assert said(answer.body) == expected
            assert path in ("/v1/messages", "/v1/responses") or answer.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", sorted(ASKS))
async def test_a_program_around_the_app_sees_all_that_is_sent(path: str) -> None:
    seen: list[bytes] = []
    async with serving({"tokens_per_s": 200}, app=around(seen)) as served:
        answer = await served.post(path, {**ASKS[path], "temperature": 0, "ignore_eos": True, "stream": True})
        assert answer.body == b"".join(seen).upper()
        assert len(seen) > 5, "it came piece by piece"


async def test_streams_need_no_task_each_for_their_events() -> None:
    async with serving({"tokens_per_s": 100}) as served:
        await whole(served, "/v1/chat/completions")  # what the first request starts is there
        before = len(asyncio.all_tasks())
        connections = [await served.connect() for _ in range(50)]
        for connection in connections:
            await connection.send(http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}))
        for connection in connections:
            await asyncio.wait_for(connection.reader.readuntil(b"data:"), 10)
        assert len(asyncio.all_tasks()) - before <= 50, "one for the request, none beside it"


async def test_a_reader_that_rests_gets_everything_in_fewer_events() -> None:
    """It takes nothing for a while: what comes meanwhile is merged, not piled up and not lost."""
    num_tokens = 2000
    async with serving(send_buffer=16384, max_model_len=8192) as served:
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", served.port))
        body = {"prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        await loop.sock_sendall(sock, http("POST", "/v1/completions", body))
        async with asyncio.timeout(30):
            await until(lambda: served.engine.num_unfinished_reqs == 1)
            await until(lambda: served.engine.num_unfinished_reqs == 0, within_s=20)
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += await loop.sock_recv(sock, 65536)
        sock.close()
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
        usage = next(event["usage"] for event in events if event.get("usage"))
        assert usage["completion_tokens"] == num_tokens
        assert len(events) < num_tokens
