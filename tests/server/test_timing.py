"""Where the time of a request went, told to the one who asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aioengine.server.timing import digest_of
from tests.server.sockets import Answer, http, serving

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10}


def ms(answer: Answer, name: str) -> float:
    return float(answer.headers[f"x-aioengine-{name}-ms"])


async def test_an_answer_says_in_its_headers_where_its_time_went() -> None:
    async with serving({"tokens_per_s": 200}, max_num_seqs=1) as served:
        paths = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}
        paths |= {"/v1/messages": {**CHAT, "model": "fake"}, "/v1/responses": {"input": "x", "max_output_tokens": 10}}
        for path, body in paths.items():
            answers = await asyncio.gather(*(served.post(path, body) for _ in range(3)))
            slowest = max(answers, key=lambda answer: ms(answer, "queue"))
            assert slowest.status == 200, path
            assert ms(slowest, "decode") >= 9 * 4.5
            assert ms(slowest, "prefill") > 0
            assert ms(slowest, "preempted") == 0
            assert ms(slowest, "wait-seqs") > 0.5 * ms(slowest, "queue") > 0, (path, slowest.headers)
            waits = [float(value) for name, value in slowest.headers.items() if name.startswith("x-aioengine-wait-")]
            assert sum(waits) == pytest.approx(ms(slowest, "queue"), abs=0.05)
            assert slowest.headers["x-aioengine-request-id"]
            assert len({answer.headers["x-aioengine-request-id"] for answer in answers}) == 3


async def test_a_stream_says_the_rest_in_its_usage() -> None:
    async with serving({"tokens_per_s": 200}) as served:
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
            answer = await served.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
            assert ms(answer, "queue") >= 0
            assert "x-aioengine-decode-ms" not in answer.headers, "it was not known when the first token was there"
            usage = json.loads(answer.body.split(b"data: ")[-2])["usage"]
            assert usage["aioengine"]["decode_ms"] >= 9 * 4.5
            assert usage["completion_tokens"] == 10


async def test_a_clients_id_cannot_write_headers() -> None:
    async with serving() as served:
        answer = await served.post("/v1/completions", {**BODY, "request_id": "a\r\nx-evil: 1"})
        assert answer.status in (200, 400)
        assert "x-evil" not in answer.headers


async def test_of_many_prompts_the_one_that_was_waited_for_counts() -> None:
    async with serving({"tokens_per_s": 200}, max_num_seqs=1) as served:
        answer = await served.exchange(http("POST", "/v1/completions", {**BODY, "prompt": ["x", "y", "z"]}))
        assert ms(answer, "queue") > 2 * 9 * 4.5


def test_the_digest_is_of_names_and_contents(tmp_path: Any) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"1" * 10_000)
    second.write_bytes(b"2")
    digest = digest_of([first, second])
    assert digest == digest_of([second, first])
    second.write_bytes(b"3")
    assert digest != digest_of([first, second])


@pytest.mark.model
@pytest.mark.slow
async def test_where_bits_do_not_depend_on_the_load_an_answer_says_what_they_depend_on() -> None:
    import httpx

    from aioengine.engine.async_engine import AsyncEngine
    from aioengine.server import create_app
    from tests.waiting import until

    async with AsyncEngine("smollm2", max_model_len=256) as engine:
        app = create_app(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            await until(lambda: bool(app.state.service.determinism.headers()), within_s=30)
            response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    header = response.headers["x-aioengine-deterministic"]
    assert header.startswith("weights=fast; isa=")
    assert len(header.partition("sha256:")[2]) == 64
