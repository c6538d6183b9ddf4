"""Bodies meant to hurt: each is a 4xx in little time and memory, the engine lives, and nothing of them is in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from typing import Any

import pytest

from aioengine.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from aioengine.testing.executor import FakeExecutor
from tests.server.sockets import Served, serving
from tests.server.test_locked_doors import routes

SIZE = 8 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def nested(opening: str, closing: str, depth: int) -> str:
    return opening * depth + closing * depth


RAW: dict[str, str | bytes] = {
    "nothing": "",
    "no JSON": "prompt=x&max_tokens=4",
    "half": '{"prompt": "x',
    "two values": '{"prompt": "x"} {}',
    "a list": "[]",
    "a number": "1",
    "null": "null",
    "NaN": '{"prompt": "x", "temperature": NaN}',
    "Infinity": '{"prompt": "x", "temperature": Infinity}',
    "minus infinity": '{"prompt": "x", "top_p": -Infinity}',
    "a float without end": '{"prompt": "x", "temperature": 1e999}',
    "an integer of many digits": '{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}",
    "a float of many digits": '{"prompt": "x", "temperature": 0.' + "1" * 5000 + "e5000}",
    "an integer beyond 64 bits": '{"prompt": "x", "seed": 18446744073709551616}',
    "deep lists": nested("[", "]", 100_000),
    "deep lists in the prompt": '{"prompt": ' + nested("[", "]", 5000) + "}",
    "deep objects": nested('{"a":', "}", 50_000),
    "deep schema": '{"prompt": "x", "structured_outputs": {"json": ' + '{"items":' * 900 + "{}" + "}" * 900 + "}}",
    "8 MiB of nesting": b"[" * SIZE,
    "8 MiB of objects": b'{"a":' * (SIZE // 5),
    "a lone surrogate": '{"prompt": "\\ud800"}',
    "half a pair": '{"prompt": "x\\udc00y", "stop": ["\\ud83d"]}',
    "bytes that are no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a NUL": b'{"prompt": "x"\x00}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a control character": b'{"prompt": "a\x01b"}',
    "a comment": '{"prompt": "x" /* y */}',
    "keys without quotes": "{prompt: 'x'}",
    "no prompt": "{}",
    "an empty prompt": '{"prompt": ""}',
    "an empty list": '{"prompt": []}',
    "empty lists": '{"prompt": [[], []]}',
    "ids that are none": '{"prompt": [1, -1]}',
    "huge ids": '{"prompt": [1, 99999999999]}',
    "ids and text": '{"prompt": [1, "a"]}',
    "booleans": '{"prompt": [true, false]}',
    "many prompts": json.dumps({"prompt": ["x"] * 5000}),
    "a prompt of 8 MB": json.dumps({"prompt": "x" * (SIZE - 100)}),
    "ids of 8 MB": '{"prompt": [' + "1," * (SIZE // 2 - 20) + "1]}",
}


async def test_no_raw_body_hurts() -> None:
    async with serving() as served:
        for name, raw in RAW.items():
            body = raw if isinstance(raw, bytes) else raw.encode()
            for path in (COMPLETIONS, CHAT):
                answer = await served.post(path, body, timeout_s=30)
                assert 400 <= answer.status < 500, (name, path, answer.status, answer.body[:200])
                assert set(answer.json()["error"]) >= {"message", "type"}, name
                assert len(answer.body) < 2000, f"{name}: the error repeats the body"
        assert await served.is_well()


async def test_keys_given_twice_are_read_as_json_says() -> None:
    """The last one counts, for us as for whoever looked at the body before us."""
    async with serving() as served:
        answer = await served.post(COMPLETIONS, b'{"prompt": "x", "max_tokens": 9999999, "max_tokens": 3}')
        assert answer.json()["usage"]["completion_tokens"] == 3


HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, -1e308, "", "x", "\x00", "😀" * 100, [], [[]], {}, {"": ""}),
    *([None], [""], [-1], [2**40], ["x"] * 2000, [0] * 5000, {"1": 1e308}, {"-1": 1}, {"99999999": 1}, {str(i): 1 for i in range(2000)}),
    *({"type": "json_schema"}, {"type": "json_object"}, {"json": "{"}, {"regex": "("}, {"regex": "(a|aa)+" * 50}, {"grammar": "x"}),
    *({"choice": []}, {"json": {"$ref": "#"}}, {"json": {"type": "nothing"}}, [{"role": "user", "content": "x"}], [{}], [{"role": 1}]),
    *([{"role": "x" * 1000, "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": 5}]),
)


PATHS: dict[type, str] = {
    CompletionRequest: COMPLETIONS,
    ChatCompletionRequest: CHAT,
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}


@pytest.mark.parametrize("kind", list(PATHS))
async def test_no_value_of_any_field_kills_the_engine(kind: type) -> None:
    """CVE-2026-114051 was `max_tokens: null` beside a huge `min_tokens`: the core died while /health said 200."""
    await try_values(kind, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PATHS))
async def test_no_value_at_all_of_any_field_kills_the_engine(kind: type) -> None:
    await try_values(kind, every=1)


async def try_values(kind: type, *, every: int) -> None:
    """Every so many of all values of all fields."""
    path = PATHS[kind]
    good: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
    if kind is ChatCompletionRequest:
        good = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    if kind is DetokenizeRequest:
        good = {"tokens": [97]}
    async with serving() as served:

        async def one(name: str, value: Any) -> None:
            answer = await served.post(path, json.dumps({**good, name: value}).encode(), timeout_s=30)
            assert answer.status < 500, (name, value, answer.body[:300])

        cases = [(name, value) for name in kind.__struct_fields__ for value in HOSTILE][::every]  # type: ignore[attr-defined]
        for start in range(0, len(cases), 50):
            await asyncio.gather(*(one(name, value) for name, value in cases[start : start + 50]))
        assert await served.is_well()
        pairs: list[dict[str, Any]] = [
            {"max_tokens": None, "min_tokens": 2**40},
            {"max_tokens": 0, "min_tokens": 5},
            {"n": 2**31},
            {"n": 10_000, "best_of": 10_000},
        ]
        pairs += [{"min_tokens": 5, "max_tokens": 2}, {"timeout": 1e-300}, {"timeout": -1}, {"logprobs": 10**6}, {"top_logprobs": 10**6}]
        for pair in pairs:
            assert (await served.post(path, {**good, **pair}, timeout_s=30)).status < 505
        assert await served.is_well()


async def test_every_route_that_takes_a_body_takes_hostile_ones() -> None:
    async with serving() as served:
        for method, path in routes(served.app):
            if method == "POST":
                for name in ("nothing", "deep lists", "a lone surrogate", "NaN", "null", "bytes that are no UTF-8"):
                    raw = RAW[name]
                    answer = await served.post(path, raw if isinstance(raw, bytes) else raw.encode())
                    assert answer.status < 500, (path, name, answer)
        assert await served.is_well()


async def test_large_hostile_bodies_take_little_memory_and_hold_the_loop_for_a_moment_only() -> None:
    bodies = [b"[" * SIZE, json.dumps({"prompt": "x" * (SIZE - 100)}).encode(), b'{"messages":[' + b"{}," * (SIZE // 3 - 20) + b"{}]}"]
    bodies += [b'{"messages":[' + b"{}," * 200_000 + b"{}]}", b'{"prompt":[' + b"[]," * 200_000 + b"[]]}"]
    bodies += [
        b'{"prompt":["' + b'","' * (SIZE // 3 - 20) + b'"]}',
        b'{"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(700_000)) + b'},"prompt":"x"}',
    ]
    async with serving() as served:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for body in bodies:
            gaps = await _while_ticking(_send_all(served, [body]))
            assert max(gaps) < 1.0, f"others had to wait for {body[:40]!r}"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10
        assert await served.is_well()


async def _send_all(served: Served, bodies: list[bytes]) -> None:
    for body in bodies:
        for path in (COMPLETIONS, CHAT):
            assert 400 <= (await served.post(path, body, timeout_s=30)).status < 500


async def _while_ticking(work: Any) -> list[float]:
    """The CPU seconds that the loop was held for, again and again, while `work` ran."""
    task, gaps = asyncio.ensure_future(work), [0.0]
    while not task.done():
        start = time.thread_time()
        await asyncio.sleep(0.001)
        gaps.append(time.thread_time() - start)
    await task
    return gaps


# ---------------------------------------------------------------------------------------------------- the log
CANARY = "canary-3f9a"


async def _provoke(served: Served) -> None:
    """Whatever might make the server or the engine write about a request."""
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3}
    await served.post(CHAT, chat)
    await served.post(CHAT, {**chat, "stream": True})
    await served.post(CHAT, {"messages": [{"role": CANARY, "content": 3}]})
    await served.post(COMPLETIONS, b'{"prompt": "' + CANARY.encode())
    await served.post(COMPLETIONS, {"prompt": CANARY, "temperature": -5})
    await served.post(COMPLETIONS, {"prompt": CANARY, "structured_outputs": {"regex": "(" + CANARY}})
    await served.post("/tokenize", {"prompt": CANARY})
    await served.get("/" + CANARY)
    await served.exchange(b"GET / HTTP/1.1\r\nx-y: " + CANARY.encode() + b"\x00\r\n\r\n")
    async with await served.connect() as connection:
        await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n" + CANARY.encode())


@pytest.mark.parametrize("log_requests", [False, True])
async def test_the_log_holds_nothing_of_a_prompt_unless_asked(caplog: pytest.LogCaptureFixture, log_requests: bool) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(settings={"log_requests": log_requests}) as served:
        await _provoke(served)
        executor = served.engine._life.executor
        assert isinstance(executor, FakeExecutor)
        executor.forget_all()  # the next step fails: the engine dies of it, and says all it knows
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": CANARY + "y" * 500, "max_tokens": 50}))
        await asyncio.sleep(0.02)
        executor.forget_all()
        await running
    assert (CANARY in caplog.text) is log_requests
