"""`/v1/chat/completions` in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.testing import scripted


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_an_answer_has_every_field_of_openai(served: Any) -> None:
    answer = await served.chat(model="fake")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 8
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert "tool_calls" not in choice["message"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_is_a_role_then_text_then_a_reason_then_usage(served: Any) -> None:
    whole = await served.chat()
    chunks = await served.chunks(stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"].pop("aioengine")["queue_ms"] >= 0, "what other answers say in their headers"
    assert {**chunks[-1]["usage"], "prompt_tokens_details": None} == {**whole["usage"], "prompt_tokens_details": None}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_continuous_usage_grows_with_every_chunk(served: Any) -> None:
    chunks = await served.chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts[-1] == 8
    assert counts == sorted(counts)
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


async def test_n_gives_as_many_choices_streamed_or_not(served: Any) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5}
    whole = await served.chat(**fields)
    chunks = await served.chunks(**fields)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert whole["usage"]["completion_tokens"] == 24


async def test_logprobs_say_tokens_bytes_and_the_likeliest(served: Any) -> None:
    answer = await served.chat(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
    chunks = await served.chunks(logprobs=True, top_logprobs=2)
    streamed = [entry for chunk in chunks for c in chunk["choices"] for entry in (c["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_a_piece_of_a_character_has_bytes_and_no_text(serve: Any) -> None:
    async with serve(scripted("é")) as served:
        answer = await served.chat(logprobs=True)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content[:2]] == [[0xC3], [0xA9]]
        assert [entry["token"] for entry in content[:2]] == ["\ufffd", "\ufffd"]
        assert answer["choices"][0]["message"]["content"] == "é"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_before_it(serve: Any, stream: bool) -> None:
    async with serve(scripted("one two three")) as served:
        if stream:
            chunks = await served.chunks(stop=[" three"], max_tokens=50)
            assert text_of(chunks) == "one two"
            last = chunks[-1]["choices"][0]
        else:
            last = (await served.chat(stop=" three", max_tokens=50))["choices"][0]
            assert last["message"]["content"] == "one two"
        assert last["finish_reason"] == "stop"
        assert last["stop_reason"] == " three"


async def test_an_empty_answer_is_still_an_answer(serve: Any) -> None:
    async with serve(scripted("")) as served:
        assert (await served.chat())["choices"][0]["message"]["content"] == ""
        chunks = await served.chunks()
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert text_of(chunks) == ""


async def test_content_may_be_parts_of_text(served: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answers = [await served.chat(messages=[{"role": "user", "content": content}]) for content in ("hi", parts)]
    assert answers[0]["choices"] == answers[1]["choices"]


async def test_the_roles_of_newer_and_older_clients_are_understood(served: Any) -> None:
    async def prompt(messages: list[Any]) -> Any:
        return (await served.post("/tokenize", {"messages": messages}))["tokens"]

    user = {"role": "user", "content": "x"}
    assert await prompt([{"role": "developer", "content": "a"}, user]) == await prompt([{"role": "system", "content": "a"}, user])


async def test_an_unfinished_answer_is_gone_on_with(served: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = (await served.post("/tokenize", fields))["tokens"]
    text = (await served.post("/detokenize", {"tokens": tokens}))["prompt"]
    assert text.endswith("The answer is")
    answer = await served.chat(**fields)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


async def test_a_chat_goes_to_the_rest_of_the_context(serve: Any) -> None:
    async with serve(max_model_len=64) as served:
        answer = await served.chat(max_tokens=None)
        assert answer["usage"]["total_tokens"] == 64
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_that_goes_in_circles_ends_with_a_reason_that_clients_know(serve: Any) -> None:
    async with serve(lambda known, num_prompt, params: 65) as served:
        detection = {"max_pattern_size": 4, "min_count": 3}
        choice = (await served.chat(max_tokens=100, repetition_detection=detection))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == "repetition_detected"


async def test_a_schema_holds_the_answer(served: Any) -> None:
    import json

    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = await served.chat(max_tokens=300, response_format=form)
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"x"}


async def test_extra_fields_are_ignored(served: Any) -> None:
    await served.chat(user="u", store=True, service_tier="auto", metadata={"a": 1}, nonsense={"b": [1]}, reasoning_effort="low")


async def test_a_reply_in_the_cache_is_counted(served: Any) -> None:
    messages = [{"role": "user", "content": "the same words again and again"}]
    await served.chat(messages=messages)
    assert (await served.chat(messages=messages))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
