"""The parts of an answer that several endpoints share: finish reasons, usage, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from aioengine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from aioengine.server.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptTokensDetails,
    RankedLogprob,
    TokenLogprob,
    Usage,
)
from aioengine.server.errors import RequestError
from aioengine.server.timing import Timing, timing

# JSON has no infinity; OpenAI's own API says this for a token that cannot come.
LEAST_LOGPROB = -9999.0
REPETITION = "repetition_detected"


def finish_reason(completion: CompletionOutput) -> FinishReason | None:
    """OpenAI's word. An aborted request, or one that went round in circles, ended because somebody here wanted it to: "stop".

    An error is an error (`check_error`).
    """
    match completion.finish_reason:
        case None | "stop" | "length":
            return completion.finish_reason
    return "stop"


def stop_reason(completion: CompletionOutput) -> int | str | None:
    return REPETITION if completion.finish_reason == "repetition" else completion.stop_reason


def check_error(output: RequestOutput) -> None:
    """Raise RequestError if the engine could not go on with this request."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise RequestError(500, completion.error or "the request failed", kind="server_error")


def make_usage(*, num_prompt: int, num_output: int, num_cached: int, timing: Timing | UnsetType = UNSET) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        aioengine=timing,
    )


def usage(outputs: Iterable[RequestOutput], *, with_output: bool = True) -> Usage:
    """Of final outputs."""
    num_prompt = num_cached = num_output = 0
    for output in outputs:
        num_prompt += len(output.prompt_token_ids)
        num_cached += output.num_cached_tokens
        num_output += sum(len(completion.token_ids) for completion in output.outputs)
    return make_usage(num_prompt=num_prompt, num_output=num_output if with_output else 0, num_cached=num_cached)


class UsageSoFar:
    """Counts the tokens of streams of differences."""

    def __init__(self) -> None:
        self.num_output = 0
        self._timing: Timing | UnsetType = UNSET  # of the one that ended last
        self._prompts: dict[str, tuple[int, int]] = {}  # by request: tokens of the prompt, those of them that were cached

    def add(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.num_output += len(completion.token_ids)
        if output.request_id not in self._prompts:
            self.add_prompt(output)
        if output.metrics.finished_time is not None:
            self._timing = timing(output.metrics)

    def add_prompt(self, output: RequestOutput) -> None:
        self._prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)

    def usage(self) -> Usage:
        prompts = self._prompts.values()
        return make_usage(
            num_prompt=sum(num_prompt for num_prompt, _ in prompts),
            num_output=self.num_output,
            num_cached=sum(num_cached for _, num_cached in prompts),
            timing=self._timing,
        )


# ------------------------------------------------------------------ log-probabilities
def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _token(token_id: int, entry: Logprob) -> TokenLogprob:
    text = str(token_id) if entry.decoded_token is None else entry.decoded_token
    data = None if entry.token_bytes is None else list(entry.token_bytes)
    return TokenLogprob(token=text, logprob=finite(entry.logprob), bytes=data)


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], *, num_top: int) -> ChatLogprobs:
    content: list[PositionLogprobs] = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        own = _token(token_id, position[token_id])
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        content.append(
            PositionLogprobs(
                token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=[_token(other, entry) for other, entry in ranked]
            )
        )
    return ChatLogprobs(content=content)


def token_name(token_id: int, entry: Logprob) -> str:
    """A token in the completions' lists. A piece of a character is named by its bytes, as OpenAI does: its text would be like others'."""
    if entry.decoded_token is None:
        return str(token_id)
    if "\ufffd" in entry.decoded_token and entry.token_bytes is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
    return entry.decoded_token


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[TokenLogprobs | None], *, first_token: str, offset: int
) -> CompletionLogprobs:
    """first_token: the text of a token without an entry, which only the first of a prompt is."""
    names = [first_token if p is None else token_name(t, p[t]) for t, p in zip(token_ids, positions, strict=True)]
    offsets: list[int] = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return CompletionLogprobs(
        tokens=names,
        token_logprobs=[None if p is None else finite(p[t].logprob) for t, p in zip(token_ids, positions, strict=True)],
        top_logprobs=[None if p is None else _by_name(p) for p in positions],
        text_offset=offsets,
    )


def _by_name(position: TokenLogprobs) -> dict[str, float]:
    """Where two tokens have the same name the likelier one stays."""
    found: dict[str, float] = {}
    for token_id, entry in position.items():
        name = token_name(token_id, entry)
        found[name] = max(found.get(name, LEAST_LOGPROB), finite(entry.logprob))
    return found


def prompt_logprobs(output: RequestOutput) -> PromptLogprobs | None:
    """vLLM's form."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): RankedLogprob(logprob=finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in output.prompt_logprobs
    ]
