"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioengine.server import ServerSettings
from aioengine.testing import scripted

ASK = [{"role": "user", "content": "hi"}]
TOOL = {
    "name": "get_weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]},
}


async def ask(served: Any, *, status: int = 200, **fields: Any) -> Any:
    return await served.post("/v1/messages", {"model": "fake", "messages": ASK, "max_tokens": 8, "temperature": 0, **fields}, status=status)


async def stream(served: Any, **fields: Any) -> list[Any]:
    """The data of the events, whose names have to be their types."""
    events = await served.events("/v1/messages", {"messages": ASK, "max_tokens": 8, **fields})
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events]


async def test_an_answer_has_every_field_of_anthropic(served: Any) -> None:
    answer = await ask(served)
    assert answer["id"].startswith("msg")
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["stop_reason"] == "max_tokens"
    assert answer["stop_sequence"] is None
    (block,) = answer["content"]
    assert block["type"] == "text"
    assert len(block["text"]) == 8
    assert answer["usage"]["output_tokens"] == 8
    assert answer["usage"]["input_tokens"] > 0


async def test_a_stream_is_a_message_of_blocks(served: Any) -> None:
    whole = await ask(served)
    events = await stream(served)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == whole["content"][0]["text"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 8


async def test_a_stop_sequence_is_named(serve: Any) -> None:
    async with serve(scripted("one two three")) as served:
        answer = await ask(served, stop_sequences=[" three"], max_tokens=99)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")
        assert answer["content"][0]["text"] == "one two"
        assert (await ask(served, max_tokens=99))["stop_reason"] == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_forced_tool_is_used_streamed_or_not(served: Any, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 500}
    answer = await ask(served, **fields)
    (block,) = answer["content"]
    assert block["type"] == "tool_use"
    assert block["name"] == "get_weather"
    assert isinstance(block["input"]["hot"], bool)
    assert answer["stop_reason"] == "tool_use"
    events = await stream(served, **fields)
    start = next(event for event in events if event["type"] == "content_block_start")
    assert start["content_block"]["type"] == "tool_use"
    assert start["content_block"]["input"] == {}
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert isinstance(json.loads("".join(parts))["hot"], bool)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_text_and_calls_are_blocks_of_their_own(serve: Any) -> None:
    async with serve(scripted('Wait.<tool_call>{"name": "get_weather", "arguments": {"hot": true}}</tool_call>')) as served:
        fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 500}
        answer = await ask(served, **fields)
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
        events = await stream(served, **fields)
        starts = [(event["index"], event["content_block"]["type"]) for event in events if event["type"] == "content_block_start"]
        assert starts == [(0, "text"), (1, "tool_use")]
        stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert stops == [0, 1]


async def test_a_conversation_with_tools_is_the_same_as_openai_s(served: Any) -> None:
    ours = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"hot": true}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    theirs: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"hot": True}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "thanks"},
                ],
            },
        ],
    }
    count = (await served.post("/v1/messages/count_tokens", theirs))["input_tokens"]
    assert count == (await served.post("/tokenize", {"messages": ours}))["count"]
    assert (await ask(served, **theirs))["usage"]["input_tokens"] == count


async def test_a_last_message_of_the_assistant_is_gone_on_with(served: Any) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The answer is"}]
    count = (await served.post("/v1/messages/count_tokens", {"messages": begun}))["input_tokens"]
    ours = {"messages": begun, "continue_final_message": True}
    assert count == (await served.post("/tokenize", ours))["count"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"temperature": -1},
        {"tools": [{"name": "web_search", "type": "web_search_20250305"}]},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
    ],
)
async def test_what_is_wrong_is_said_in_anthropic_s_form(served: Any, fields: dict[str, Any]) -> None:
    error = await ask(served, **fields, status=400)
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"]


async def test_refusals_of_the_gate_and_the_router_are_in_anthropic_s_form(serve: Any) -> None:
    async with serve(settings=ServerSettings(api_key="a-secret-key")) as served:
        refused = await served.client.post("/v1/messages", json={})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        headers = {"x-api-key": "a-secret-key"}
        assert (await served.client.get("/v1/messages", headers=headers)).json()["type"] == "error"
        unknown = await served.client.post("/v1/messages", json={"model": "no", "messages": ASK, "max_tokens": 1}, headers=headers)
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_stream_that_fails_ends_with_an_error_event(serve: Any) -> None:
    async with serve() as served:
        fail_in_the_middle(served)
        events = await served.events("/v1/messages", {"messages": ASK, "max_tokens": 50})
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["type"] == "api_error"


def fail_in_the_middle(served: Any) -> None:
    """Every request fails at its sixth token."""
    served.executor._fails = lambda req_id, request: "NaN" if len(request.token_ids) - request.num_prompt_tokens >= 5 else None
