"""`instructor` against a running server: python instructor_client.py URL MODEL."""

from __future__ import annotations

import sys
from typing import Any

import instructor
import openai
import pydantic

URL, MODEL = sys.argv[1:3]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Answer(pydantic.BaseModel):
    """An answer"""

    city: str = pydantic.Field(max_length=20)
    certain: bool


def main() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, response_model=Answer, temperature=0, max_tokens=200, max_retries=0
        )
        assert isinstance(answer, Answer)
    print("instructor: ok")


main()
