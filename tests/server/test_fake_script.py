"""`serve --fake`: what a script says is what clients get, through the real scheduler, the same every time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

import aioengine.server.script as script_module
from aioengine.errors import ConfigError
from aioengine.server.script import DEFAULT_TEXT, parse_script
from tests.server.sockets import Answer, Served, serving

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


async def chat(served: Served, text: str, **fields: Any) -> Answer:
    return await served.post(CHAT, {"messages": [{"role": "user", "content": text}], **fields})


def content(answer: Answer) -> Any:
    assert answer.status == 200, answer
    return answer.json()["choices"][0]["message"]["content"]


async def test_the_example_of_the_documentation_does_what_it_says() -> None:
    doc = script_module.__doc__
    assert doc is not None
    example = doc[doc.index("{") : doc.index("The first answer")]
    async with serving(parse_script(example)) as served:
        assert content(await chat(served, "hi")) == "Hello!"
        assert [(await chat(served, "please retry")).status for _ in range(3)] == [429, 429, 200]
        called = (await chat(served, "the weather in Paris?", tools=[WEATHER])).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        call = called["message"]["tool_calls"][0]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
        messages = [
            {"role": "user", "content": "the weather in Paris?"},
            called["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "21"},
        ]
        answer = await served.post(CHAT, {"messages": messages, "tools": [WEATHER]})
        assert content(answer) == "It is 21 degrees in Paris."
        start = time.monotonic()
        assert content(await chat(served, "not slow")) == "Hello!"
        assert content(await chat(served, "slow down")) == "Slowly."
        assert time.monotonic() - start > 0.3 + 6 / 20
        broken = await chat(served, "break", stream=True)
        assert b'"content":"T"' in broken.body
        assert b"error" in broken.body.split(b"data: ")[-1] or b"error" in broken.body


async def test_everything_else_gets_the_same_sentence_and_twice_the_same() -> None:
    async with serving() as served:
        assert content(await chat(served, "hi")) == content(await chat(served, "ho")) == DEFAULT_TEXT
        plain = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "temperature": 1.0})
        assert plain.json()["choices"][0]["text"] == DEFAULT_TEXT
        assert plain.json()["usage"]["completion_tokens"] == len(DEFAULT_TEXT) + 1, "a token a byte, and the end"
        long = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "ignore_eos": True})
        assert long.json()["choices"][0]["text"] == (DEFAULT_TEXT * 3)[:200]
        many = await chat(served, "hi", n=3)
        assert [choice["message"]["content"] for choice in many.json()["choices"]] == [DEFAULT_TEXT] * 3


async def test_grammars_are_obeyed_and_the_script_is_followed_where_it_matches() -> None:
    given = {"name": "Ada", "age": 36, "tags": ["a", "b"]}
    script = {
        "answers": [
            {"when": {"contains": "Ada"}, "text": json.dumps(given)},
            {"when": {"contains": "tool"}, "tool_calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]},
        ]
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    async with serving(script) as served:
        assert json.loads(content(await chat(served, "Ada", response_format=form))) == given
        shortest = json.loads(content(await chat(served, "somebody", response_format=form)))
        assert set(shortest) == {"name", "age", "tags"}
        assert isinstance(json.loads(content(await chat(served, "anything", response_format={"type": "json_object"}))), dict)
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            for text, city in (("a tool", "Oslo"), ("nothing of the script", None)):
                message = (await chat(served, text, tools=[WEATHER], tool_choice=choice)).json()["choices"][0]["message"]
                arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
                assert city is None or arguments == {"city": city}


async def test_parallel_calls_and_streamed_arguments() -> None:
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Rome", "Bern")]
    async with serving({"answers": [{"text": "Let me see.", "tool_calls": calls}]}) as served:
        answer = await chat(served, "both", tools=[WEATHER], stream=True)
        events = [json.loads(part) for part in answer.body.decode().split("data: ")[1:-1]]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        arguments = {0: "", 1: ""}
        for delta in deltas:
            for call in delta.get("tool_calls") or ():
                arguments[call["index"]] += call["function"].get("arguments") or ""
        assert text.strip() == "Let me see."
        assert [json.loads(value)["city"] for value in arguments.values()] == ["Rome", "Bern"]


async def test_the_scheduler_is_the_real_one() -> None:
    """Requests queue, share steps and are preempted; a script does not see any of it."""
    script = {"tokens_per_s": 500, "answers": [{"text": "abcdefghij" * 4}]}
    async with serving(script, max_num_seqs=4, max_model_len=128, num_kv_cache_blocks=9) as served:
        body = {"prompt": "x" * 20, "max_tokens": 40}
        answers = await asyncio.gather(*(served.post("/v1/completions", body) for _ in range(6)))
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {"abcdefghij" * 4}
        assert served.engine.stats().num_preemptions > 0


async def test_a_dropped_connection_and_a_prompt_that_takes_its_time() -> None:
    script = {"prefill_tokens_per_s": 1000, "answers": [{"when": {"contains": "drop"}, "text": "abcdef", "disconnect_after_tokens": 3}]}
    async with serving(script) as served:
        assert (await chat(served, "drop", stream=True)).status == 0
        start = time.monotonic()
        await served.post("/v1/completions", {"prompt": "x" * 300, "max_tokens": 1})
        assert time.monotonic() - start > 0.29
        assert await served.is_well()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ('{"answers": [{"text": 5}]}', r"answers\[0\].text"),
        ('{"answer": []}', "answer"),
        ('{"answers": [{"text": "x"}, {"text": "x", "error": {"status": 500}}]}', r"answers\[1\].error takes the place"),
        ('{"answers": [{"error": {"status": 200}}]}', "between 400 and 599, got 200"),
        ('{"answers": [{"when": {"matches": "("}, "text": "x"}]}', r"answers\[0\].when.matches"),
        ('{"tokens_per_s": 0}', "tokens_per_s must be a number above 0, got 0"),
        ('{"answers": [{"text": "x", "delay_ms": -1}]}', "delay_ms"),
        ('{"answers": [{"text": "x", "times": 0}]}', "times must be at least 1"),
    ],
)
def test_a_script_that_makes_no_sense_says_where(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_script(text)
