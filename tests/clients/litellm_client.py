"""The `litellm` package against a running server: python litellm_client.py URL MODEL."""

from __future__ import annotations

import sys
from typing import Any

import litellm

URL, MODEL = sys.argv[1:3]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    for name in (f"hosted_vllm/{MODEL}", f"openai/{MODEL}"):
        common: Any = {"model": name, "messages": ASK, "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_tokens": 8}
        answer = litellm.completion(**common)
        text = answer.choices[0].message.content
        assert text
        assert answer.usage.completion_tokens == 8
        chunks = list(litellm.completion(**common, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    print("litellm: ok")


main()
