"""The `openai` package, of either major version, against a running server: python openai_client.py URL MODEL."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import openai
import pydantic

URL, MODEL = sys.argv[1:3]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


class Answer(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    certain: bool


def models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat(client: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8
    both = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, n=2, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert len(both.choices[0].logprobs.content[0].top_logprobs) == 3


def stream_helper(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0, stop=["."], max_tokens=200) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert "Paris" in final.choices[0].message.content


def structured(client: Any) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Answer, temperature=0, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def tools(client: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=200
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert answer.choices[0].finish_reason == "tool_calls"
    history: list[Any] = [
        *ASK,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
    ]
    assert client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=8).choices[0].message
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200
    ) as stream:
        assert any(event.type == "tool_calls.function.arguments.done" for event in stream)


def completions(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0, logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 4
    stream = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, temperature=0, stream=True)
    assert "".join(c.text for chunk in stream for c in chunk.choices) == answer.choices[0].text


def responses(client: Any) -> None:
    brief: Any = {"model": MODEL, "input": "Say hi", "max_output_tokens": 100, "temperature": 0, "extra_body": {"stop": ["."]}}
    first = client.responses.create(**brief)
    assert first.output_text
    second = client.responses.create(model=MODEL, input="Again", previous_response_id=first.id, max_output_tokens=8)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with client.responses.stream(**brief) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == first.output_text
    assert kinds[0] == "response.created"
    flat = {"type": "function", **TOOL["function"]}
    forced = client.responses.create(
        model=MODEL, input="Weather?", tools=[flat], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200
    )
    assert forced.output[0].type == "function_call"
    parsed = client.responses.parse(model=MODEL, input="Capital of France?", text_format=Answer, temperature=0, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Answer)
    waiting = client.responses.create(model=MODEL, input="Tell a story", background=True, max_output_tokens=1000)
    assert client.responses.cancel(waiting.id).status == "cancelled"
    client.responses.delete(first.id)


def errors(client: Any) -> None:
    exc = refused(openai.NotFoundError, lambda: client.chat.completions.create(model="nothing", messages=ASK))
    assert exc.param == "model"
    exc = refused(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1))
    assert "temperature" in str(exc)
    vectors = client.embeddings.create(model=MODEL, input=["x", "a longer text"]).data  # asks for base64
    assert [item.index for item in vectors] == [0, 1], vectors
    assert all(isinstance(number, float) for item in vectors for number in item.embedding), vectors


async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4) for _ in range(8)))
        assert all(answer.choices[0].message.content for answer in answers)


def refused(kind: Any, ask: Callable[[], Any]) -> Any:
    """The error that `ask` raises."""
    try:
        ask()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for check in (models, chat, stream_helper, structured, tools, completions, responses, errors):
        check(client)
    asyncio.run(asynchronous())
    print(f"openai {openai.__version__}: ok")


main()
