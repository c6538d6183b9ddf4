"""The parts of an answer that completions and chats share: finish reasons, usage, tokens as text and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from aioengine.engine.detokenizer import TextTokenizer
from aioengine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from aioengine.server.errors import RequestError

# JSON has no infinity; OpenAI's own API says this for a token that cannot come.
LEAST_LOGPROB = -9999.0


def finish_reason(completion: CompletionOutput) -> str | None:
    """OpenAI's word. An aborted request ended because somebody here wanted it to: "stop". An error is an error (`check_error`)."""
    return "stop" if completion.finish_reason == "abort" else completion.finish_reason


def check_error(output: RequestOutput) -> None:
    """Raise RequestError if the engine could not go on with this request."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise RequestError(500, completion.error or "the request failed", kind="server_error")


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    num_prompt = num_cached = num_output = 0
    for output in outputs:
        num_prompt += len(output.prompt_token_ids)
        num_cached += output.num_cached_tokens
        num_output += sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def token_entry(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    """A token of a chat's logprobs."""
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def chat_logprobs(tokenizer: TextTokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        top = [token_entry(tokenizer, other, entry.logprob) for other, entry in ranked]
        content.append({**token_entry(tokenizer, token_id, position[token_id].logprob), "top_logprobs": top})
    return {"content": content}
