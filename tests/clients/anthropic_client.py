"""The `anthropic` package against a running server: python anthropic_client.py URL MODEL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import anthropic

URL, MODEL = sys.argv[1:3]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


def refused(kind: Any, ask: Callable[[], Any]) -> Any:
    """The error that `ask` raises."""
    try:
        ask()
    except kind as exc:
        return exc
    raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    answer = client.messages.create(model=MODEL, messages=ASK, max_tokens=30, system="Be brief.", stop_sequences=["."], **GREEDY)
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "stop_sequence", answer
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=30, system="Be brief.", stop_sequences=["."], **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text
    assert final.stop_sequence == "."
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    forced = client.messages.create(model=MODEL, messages=ASK, max_tokens=200, tools=[TOOL], tool_choice=choice, **GREEDY)
    block = forced.content[0]
    assert block.type == "tool_use"
    assert block.input["city"] in ("Paris", "Rome")
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=200, tools=[TOOL], tool_choice=choice, **GREEDY) as stream:
        assert stream.get_final_message().content[0].input == block.input
    history: list[Any] = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny"}]},
    ]
    client.messages.create(model=MODEL, messages=history, max_tokens=8, tools=[TOOL])
    assert client.messages.count_tokens(model=MODEL, messages=history, tools=[TOOL]).input_tokens > 20
    exc = refused(
        anthropic.BadRequestError, lambda: client.messages.create(model=MODEL, messages=ASK, max_tokens=8, extra_body={"temperature": -1})
    )
    assert "temperature" in str(exc)
    refused(anthropic.NotFoundError, lambda: client.messages.create(model="nothing", messages=ASK, max_tokens=8))
    print(f"anthropic {anthropic.__version__}: ok")


main()
