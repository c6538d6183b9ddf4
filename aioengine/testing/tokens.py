"""Tokens without a model: a tokenizer of bytes, and functions that say which token comes next."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioengine.sampling_params import SamplingParams

NextToken = Callable[[Sequence[int], int, SamplingParams], int]
"""(prompt and output token ids so far, number of prompt tokens, sampling params) -> the next token id."""

EOS_TOKEN_ID = 256
BOS_TOKEN_ID = 257
SPECIAL_TOKENS = {EOS_TOKEN_ID: "<eos>", BOS_TOKEN_ID: "<bos>", 258: "<|user|>", 259: "<|assistant|>", 260: "<|system|>"}
VOCAB_SIZE = 261


class FakeTokenizer:
    """One token a byte of UTF-8, then a few special tokens. Satisfies `aioengine.engine.outputs.detokenizer.TextTokenizer`."""

    has_chat_template = True
    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset(SPECIAL_TOKENS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Bytes, with special tokens recognised in the text; `add_special_tokens` puts <bos> in front."""
        token_ids = [BOS_TOKEN_ID] if add_special_tokens else []
        while text:
            found = [(text.find(name), token_id, name) for token_id, name in SPECIAL_TOKENS.items() if name in text]
            start, token_id, name = min(found, default=(len(text), -1, ""))
            token_ids += text[:start].encode()
            if token_id >= 0:
                token_ids.append(token_id)
            text = text[start + len(name) :]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Incomplete or invalid UTF-8 becomes U+FFFD."""
        parts = [
            bytes([token_id]) if token_id < 256 else b"" if skip_special_tokens else SPECIAL_TOKENS[token_id].encode()
            for token_id in token_ids
        ]
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        """What each token id stands for in a text, for structured outputs."""
        return [bytes([token_id]) if token_id < 256 else SPECIAL_TOKENS[token_id].encode() for token_id in range(VOCAB_SIZE)]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """ "<bos><|user|>Hi<eos><|assistant|>"; raises ValueError for an unknown role, as real templates do.

        Tools and calls are written as Hermes and Qwen do.
        """
        text = "<bos>"
        if tools:
            text += f"<|system|><tools>{json.dumps(list(tools))}</tools><eos>"
        for message in messages:
            role, content = self._turn(message)
            calls = "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls") or ())
            text += f"<|{role}|>{content}{calls}<eos>"
        return text + ("<|assistant|>" if add_generation_prompt else "")

    def _turn(self, message: Mapping[str, Any]) -> tuple[str, Any]:
        """The role and the text of a message as they are written."""
        role = message["role"]
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"unknown role {role!r}")
        return "user" if role == "tool" else role, message["content"]


def default_next_token(token_ids: Sequence[int], num_prompt_tokens: int, sampling_params: SamplingParams) -> int:
    """A printable character that depends on all tokens so far, and on the seed unless decoding is greedy."""
    seed = 0 if sampling_params.is_greedy else (sampling_params.seed or 0)
    return 32 + zlib.crc32(array("q", token_ids).tobytes(), seed & 0xFFFFFFFF) % 95


def scripted(answer: str | Sequence[int], *, then: int = EOS_TOKEN_ID) -> NextToken:
    """Every request is answered with these tokens (text: its bytes), and then with `then` for ever."""
    token_ids = list(answer.encode() if isinstance(answer, str) else answer)

    def next_token(known: Sequence[int], num_prompt_tokens: int, sampling_params: SamplingParams) -> int:
        index = len(known) - num_prompt_tokens
        return token_ids[index] if index < len(token_ids) else then

    return next_token
