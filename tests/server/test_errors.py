"""Every error has a status and an object, and no body hurts anybody but its sender."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aioengine import errors
from aioengine.server.errors import RETRY_AFTER_S, RequestError, anthropic_error, error_response, problem_of
from aioengine.server.openapi import OPERATIONS
from aioengine.testing import FakeExecutor

# The table that the documentation shows.
TABLE = [
    (errors.InvalidRequestError("m"), 400, "invalid_request_error", "invalid_request_error"),
    (errors.EngineOverloadedError("m"), 429, "rate_limit_error", "rate_limit_error"),
    (errors.RequestTimeoutError("m"), 504, "timeout_error", "timeout_error"),
    (errors.EngineDeadError("m"), 500, "server_error", "api_error"),
    (errors.RankLostError("m"), 500, "server_error", "api_error"),
    (errors.StepTimeoutError("m"), 500, "server_error", "api_error"),
    (errors.RankLostError("m"), 500, "server_error", "api_error"),
    (errors.ModelError("m"), 500, "server_error", "api_error"),
    (errors.AioEngineError("m"), 500, "server_error", "api_error"),
    (errors.ConfigError("m"), 500, "server_error", "api_error"),
    (RequestError(413, "m"), 413, "invalid_request_error", "request_too_large"),
    (RequestError(408, "m", kind="timeout_error"), 408, "timeout_error", "invalid_request_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "anthropic_kind"), TABLE, ids=lambda value: getattr(type(value), "__name__", value))
def test_every_error_has_a_status_and_an_object_in_both_forms(error: Exception, status: int, kind: str, anthropic_kind: str) -> None:
    response = error_response(problem_of(error))
    assert response.status_code == status
    assert json.loads(bytes(response.body)) == {"error": {"message": "m", "type": kind, "param": None, "code": status}}
    assert response.headers.get("retry-after") == (str(RETRY_AFTER_S) if status == 429 else None)
    theirs = anthropic_error(problem_of(error))
    assert theirs.status_code == status
    assert json.loads(bytes(theirs.body))["error"] == {"type": anthropic_kind, "message": "m"}


def test_every_error_of_the_engine_is_in_the_table() -> None:
    known = {type(error) for error, *_ in TABLE}
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.AioEngineError)}
    assert classes <= known


def test_what_nobody_raised_on_purpose_is_not_told_to_the_client() -> None:
    assert "secret" not in problem_of(KeyError("secret")).message
    assert problem_of(KeyError("secret")).status == 500


# ------------------------------------------------------------------ bodies
BODIES = {
    "nothing": b"",
    "no JSON": b"hello",
    "a list": b"[]",
    "a null": b"null",
    "cut off": b'{"prompt": "x"',
    "two values": b'{"prompt": "x"} {}',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "no UTF-8 in a field that is ignored": b'{"prompt": "x", "user": "\xff"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "the other half": b'{"prompt": "\\udc00 x"}',
    "a surrogate as UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a deep list": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a deep object": b'{"prompt": "x", "extra_args": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "a deep object in a field that is ignored": b'{"prompt": "x", "other": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "a number beyond doubles": b'{"prompt": "x", "temperature": 1e999}',
    "a number of 10,000 digits": b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}",
    "a large whole number": b'{"prompt": "x", "max_tokens": 99999999999999999999999999}',
    "a large token id": b'{"prompt": [99999999999999999999999999]}',
    "a null byte": b'{"prompt": "x"}\x00',
    "a control character": b'{"prompt": "x\n"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_is_a_400_and_the_engine_lives(served: Any, name: str) -> None:
    response = await served.client.post("/v1/completions", content=BODIES[name])
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 2000
    await served.complete("x")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
@pytest.mark.parametrize("content", ["\ud800", "\x00 \x07", "\U0010ffff", "x" * 300_000])
async def test_strange_text_is_no_server_error_anywhere(served: Any, path: str, content: str) -> None:
    body = {"messages": [{"role": "user", "content": content}], "input": content, "max_tokens": 2, "max_output_tokens": 2}
    response = await served.client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400), response.text
    if content == "\ud800":
        assert response.status_code == 400


@pytest.mark.parametrize("value", [None, True, 7, -1.5, "x", [], {}, [[]], [{}], {"a": 1}, "9" * 400], ids=repr)
async def test_no_value_in_any_field_is_a_server_error(serve: Any, value: Any) -> None:
    """Each field of each body in turn."""
    async with serve(max_model_len=64, num_kv_cache_blocks=1025) as served:
        await put_into_every_field(served, value)


async def put_into_every_field(served: Any, value: Any) -> None:
    good = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "max_tokens": 1,
        "max_output_tokens": 1,
        "tokens": [1],
    }
    for operation in OPERATIONS:
        if operation.body is None:
            continue
        names = operation.body.__struct_fields__  # type: ignore[attr-defined]
        base = {key: item for key, item in good.items() if key in names and not (operation.path == "/tokenize" and key == "prompt")}
        responses = await asyncio.gather(*(served.client.post(operation.path, json={**base, name: value}) for name in names))
        for name, response in zip(names, responses, strict=True):
            assert response.status_code < 500, (operation.path, name, value, response.text)


@pytest.mark.parametrize("value", [None, True, 7, "x", [], {}, {"type": "text"}, [None], [7], [{"type": "text"}], [{"type": 7}]], ids=repr)
async def test_no_message_is_a_server_error(served: Any, value: Any) -> None:
    messages: list[Any] = [value, {"role": "user", "content": value}, {"role": value, "content": "x"}]
    messages += [{"role": "assistant", "content": None, "tool_calls": item} for item in (value, [value], [{"function": value}])]
    messages += [{"role": "tool", "content": "x", "tool_call_id": value}, {"role": "user", "content": "x", "name": value}]
    for message in messages:
        for path, key in (("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")):
            response = await served.client.post(path, json={key: [message], "max_tokens": 1, "max_output_tokens": 1})
            assert response.status_code < 500, (path, message, response.text)


@pytest.mark.parametrize("depth", [50, 200, 400, 600, 800, 950, 1200])
async def test_depth_is_no_server_error_anywhere(served: Any, depth: int) -> None:
    deep = "DEEP"  # json.dumps would give up before the server does
    text = '{"properties":' * depth + "{}" + "}" * depth
    function = {"name": "f", "parameters": deep}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": function}]}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"x": deep}}),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}}),
        ("/v1/responses", {"tools": [{"type": "function", **function}]}),
        ("/v1/responses", {"metadata": deep}),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": deep}]}),
    ]
    ask = {"messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 1, "max_output_tokens": 1}
    for path, body in bodies:
        response = await served.client.post(path, content=json.dumps({**ask, **body}).replace('"DEEP"', text))
        assert response.status_code in (200, 400), (path, depth, response.text[:300])


# ------------------------------------------------------------------ the engine's own errors, from outside
async def test_a_full_queue_is_a_429(serve: Any) -> None:
    executor = FakeExecutor(num_blocks=1025, block_size=4, max_num_seqs=1, forward_s=0.01)
    async with serve(executor=executor, max_num_seqs=1, max_num_queued_reqs=1) as served:
        posts = [served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}) for _ in range(6)]
        responses = await asyncio.gather(*posts)
        refused = [response for response in responses if response.status_code == 429]
        assert refused
        assert refused[0].headers["retry-after"] == "1"
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert {response.status_code for response in responses} == {200, 429}


async def test_a_request_out_of_time_is_a_504(serve: Any) -> None:
    executor = FakeExecutor(num_blocks=1025, block_size=4, max_num_seqs=8, forward_s=0.02)
    async with serve(executor=executor) as served:
        error = (await served.complete("x", max_tokens=1000, timeout=0.1, status=504))["error"]
        assert error["type"] == "timeout_error"


async def test_a_request_that_fails_is_a_500_or_the_end_of_its_stream(serve: Any) -> None:
    async with serve() as served:
        served.executor._fails = lambda req_id, request: "NaN" if len(request.token_ids) - request.num_prompt_tokens >= 5 else None
        assert (await served.complete("x", status=500))["error"]["message"]
        events = await served.events("/v1/completions", {"prompt": "x"})
        assert events[-1][1]["error"]["type"] == "server_error"
        assert all(data is not None for _, data in events), "a stream that failed is not [DONE]"


async def test_a_dead_engine_says_so_and_is_unhealthy(serve: Any) -> None:
    async with serve() as served:
        assert (await served.client.get("/health")).status_code == 200
        served.executor.fail_at(0)
        served.executor.fail_at(1)
        assert (await served.complete("x", status=500))["error"]["type"] == "server_error"
        assert (await served.client.get("/health")).status_code == 503
        assert (await served.complete("x", status=500))["error"]["type"] == "server_error"


async def test_an_engine_without_a_tokenizer_takes_token_ids(serve: Any) -> None:
    async with serve(tokenizer=None) as served:
        await served.chat(status=400)
        await served.complete("text", status=400)
        await served.post("/tokenize", {"prompt": "x"}, status=400)
        answer = await served.complete([1, 2, 3], logprobs=1)
        assert answer["usage"]["completion_tokens"] == 16
