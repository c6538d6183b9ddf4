"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aioengine.server import ServerSettings
from aioengine.server.response_store import ResponseStore, StoredResponse
from aioengine.server.responses import _new_answer
from aioengine.server.responses_protocol import ResponsesRequest
from aioengine.testing import FakeExecutor, scripted

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]},
}


async def ask(served: Any, value: Any = "hi", *, status: int = 200, **fields: Any) -> Any:
    return await served.post("/v1/responses", {"input": value, "max_output_tokens": 8, "temperature": 0, **fields}, status=status)


async def stream(served: Any, **fields: Any) -> list[Any]:
    events = await served.events("/v1/responses", {"input": "hi", "max_output_tokens": 8, **fields})
    assert all(name == data["type"] for name, data in events)
    data = [data for _, data in events]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return data


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def test_an_answer_has_every_field_of_openai(serve: Any) -> None:
    async with serve(scripted("Hello")) as served:
        response = await ask(served, model="fake", instructions="Be brief", metadata={"a": "b"})
        assert response["object"] == "response"
        assert response["status"] == "completed"
        assert response["error"] is None
        assert response["incomplete_details"] is None
        assert response["metadata"] == {"a": "b"}
        assert response["text"] == {"format": {"type": "text"}}
        (message,) = response["output"]
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
        assert response["usage"]["output_tokens"] == 6
        assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0}


async def test_an_answer_that_is_cut_off_is_incomplete(served: Any) -> None:
    response = await ask(served)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


async def test_a_stream_builds_the_answer_that_is_stored(serve: Any) -> None:
    async with serve(scripted("Hello")) as served:
        events = await stream(served)
        kinds = [event["type"] for event in events]
        assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert "".join(event["delta"] for event in events[4:-4]) == "Hello"
        assert events[-4]["text"] == "Hello"
        final = events[-1]["response"]
        assert text_of(final) == "Hello"
        stored = (await served.client.get(f"/v1/responses/{final['id']}")).json()
        assert stored == final


async def test_calls_are_items_whose_arguments_are_streamed(serve: Any) -> None:
    async with serve(scripted('Wait.<tool_call>{"name": "get_weather", "arguments": {"hot": true}}</tool_call>')) as served:
        fields: dict[str, Any] = {"tools": [TOOL], "max_output_tokens": 500}
        events = await stream(served, **fields)
        added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
        assert added == ["message", "function_call"]
        deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert json.loads("".join(event["delta"] for event in deltas)) == {"hot": True}
        done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
        assert json.loads(done["arguments"]) == {"hot": True}
        assert {event["output_index"] for event in deltas} == {1}
        whole = await ask(served, **fields)
        assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
        assert whole["status"] == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_forced_call_fits_its_schema(served: Any, choice: Any) -> None:
    response = await ask(served, tools=[TOOL], tool_choice=choice, max_output_tokens=500, parallel_tool_calls=False)
    (call,) = response["output"]
    assert call["type"] == "function_call"
    assert isinstance(json.loads(call["arguments"])["hot"], bool)


async def test_a_schema_holds_the_text(served: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = await ask(served, text={"format": form}, max_output_tokens=300)
    assert set(json.loads(text_of(response))) == {"x"}
    assert response["text"]["format"]["schema"] == schema


async def test_a_conversation_goes_on_from_what_is_stored(serve: Any) -> None:
    async with serve(scripted("Hello")) as served:
        first = await ask(served, "one", instructions="only for the first")
        second = await ask(served, "two", previous_response_id=first["id"])
        messages = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "two"},
        ]
        assert second["usage"]["input_tokens"] == (await served.post("/tokenize", {"messages": messages}))["count"]
        assert second["previous_response_id"] == first["id"]
        items = (await served.client.get(f"/v1/responses/{second['id']}/input_items")).json()
        assert [item["content"] for item in items["data"]] == ["two"]


async def test_instructions_come_before_everything_and_there_is_one_system_message(served: Any) -> None:
    items = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    messages = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    response = await ask(served, items, instructions="a")
    assert response["usage"]["input_tokens"] == (await served.post("/tokenize", {"messages": messages}))["count"]


async def test_results_of_calls_are_items(served: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"hot": true}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"hot": true}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    response = await ask(served, items)
    assert response["usage"]["input_tokens"] == (await served.post("/tokenize", {"messages": messages}))["count"]


async def test_what_is_not_stored_is_gone(served: Any) -> None:
    response = await ask(served, store=False)
    assert (await served.client.get(f"/v1/responses/{response['id']}")).status_code == 404
    await ask(served, previous_response_id=response["id"], status=400)


async def test_a_deleted_response_is_gone(served: Any) -> None:
    response = await ask(served)
    path = f"/v1/responses/{response['id']}"
    assert (await served.client.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (await served.client.get(path)).status_code == 404
    assert (await served.client.delete(path)).status_code == 404


async def test_a_response_in_the_background_can_be_waited_for(serve: Any) -> None:
    async with serve(scripted("Hello")) as served:
        response = await ask(served, background=True)
        assert response["status"] == "queued"
        for _ in range(1000):
            response = (await served.client.get(f"/v1/responses/{response['id']}")).json()
            if response["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.001)
        assert response["status"] == "completed"
        assert text_of(response) == "Hello"


async def test_a_background_response_that_is_refused_failed(served: Any) -> None:
    response = await ask(served, background=True, temperature=-1)
    await asyncio.sleep(0.01)
    stored = (await served.client.get(f"/v1/responses/{response['id']}")).json()
    assert stored["status"] == "failed"
    assert "temperature" in stored["error"]["message"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_is_cancelled_frees_its_blocks(serve: Any, wait_for: Any, background: bool) -> None:
    executor = FakeExecutor(num_blocks=1025, block_size=4, max_num_seqs=8, forward_s=0.005)
    async with serve(executor=executor) as served:
        fields = {"max_output_tokens": 1500, "background": background, "stream": not background, "temperature": 0, "input": "hi"}
        making = asyncio.ensure_future(served.client.post("/v1/responses", json=fields))
        store = served.client._transport.app.state.service.responses
        await wait_for(lambda: served.num_used_blocks > 0 and len(store) > 0)
        (response_id,) = store.ids()
        cancelled = await served.client.post(f"/v1/responses/{response_id}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        await making
        await wait_for(lambda: served.num_used_blocks == 0, within_s=1)
        assert (await served.client.get(f"/v1/responses/{response_id}")).json()["status"] == "cancelled"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": 7},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call", "name": "x"}]},
        {"input": [{"role": 7, "content": "x"}]},
        {"tools": [{"type": "web_search"}]},
        {"background": True, "store": False},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
    ],
)
async def test_what_makes_no_sense_is_refused(served: Any, fields: dict[str, Any]) -> None:
    error = await ask(served, fields.pop("input", "hi"), **fields, status=400)
    assert error["error"]["type"] == "invalid_request_error"


async def test_the_store_is_bounded_and_forgets_the_oldest(serve: Any) -> None:
    async with serve(settings=ServerSettings(max_stored_responses=2)) as served:
        ids = [(await ask(served))["id"] for _ in range(3)]
        statuses = [(await served.client.get(f"/v1/responses/{response_id}")).status_code for response_id in ids]
        assert statuses == [404, 200, 200]


def test_the_store_counts_bytes() -> None:
    store = ResponseStore(max_responses=100, max_bytes=10_000)
    for _ in range(5):
        answer = _new_answer(ResponsesRequest(input="x"), "m")
        answer.status = "completed"
        store.put(StoredResponse(answer, [], [{"role": "user", "content": "x" * 4000}]))
    assert len(store) == 2


async def test_a_request_that_fails_is_an_error_or_a_failed_stream(serve: Any) -> None:
    async with serve() as served:
        served.executor._fails = lambda req_id, request: "NaN" if len(request.token_ids) - request.num_prompt_tokens >= 5 else None
        assert (await ask(served, status=500))["error"]["type"] == "server_error"
        events = await stream(served)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
