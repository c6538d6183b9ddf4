"""`langchain-openai` against a running server: python langchain_client.py URL MODEL."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pydantic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1:3]


class Answer(pydantic.BaseModel):
    """An answer"""

    city: str = pydantic.Field(max_length=20)


@tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"sunny in {city}"


def main() -> None:
    model: Any = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=40)
    text = model.invoke("What is the capital of France?").content
    assert "Paris" in text
    assert "".join(chunk.content for chunk in model.stream("What is the capital of France?")) == text
    answers = asyncio.run(model.abatch(["One", "Two", "Three"]))
    assert len(answers) == 3
    parsed = model.with_structured_output(Answer, method="json_schema").invoke("What is the capital of France?")
    assert isinstance(parsed, Answer)
    bound = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=300)
    called = bound.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Rome?")
    assert called.tool_calls[0]["name"] == "get_weather" or called.invalid_tool_calls
    print("langchain-openai: ok")


main()
