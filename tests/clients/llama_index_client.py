"""`llama-index-llms-openai-like` against a running server: python llama_index_client.py URL MODEL."""

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = sys.argv[1:3]


def main() -> None:
    common: Any = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0, "context_window": 2048}
    plain = OpenAILike(**common)
    text = plain.complete("One, two,").text
    assert text
    assert "".join(part.delta or "" for part in plain.stream_complete("One, two,")) == text
    chat = OpenAILike(**common, is_chat_model=True)
    ask = [ChatMessage(role="user", content="What is the capital of France?")]
    text = chat.chat(ask).message.content or ""
    assert "".join(part.delta or "" for part in chat.stream_chat(ask)) == text
    print("llama-index: ok")


main()
