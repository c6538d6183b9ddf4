"""The bodies that completions, chats and the smaller endpoints answer with. `/openapi.json` is made from them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioengine.server.timing import Timing

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """aioengine: where the time of a stream went; other answers say it in their headers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    aioengine: Timing | UnsetType = UNSET


# ------------------------------------------------------------------ log-probabilities
class TokenLogprob(msgspec.Struct, kw_only=True):
    """bytes: those of a piece of a character are no text. null: the tokenizer does not tell."""

    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprobs(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[PositionLogprobs]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four lists with one entry a token; the first token of a text has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""One entry a prompt token, by token id."""


# ------------------------------------------------------------------ chat
class FunctionCall(msgspec.Struct, kw_only=True):
    """arguments: JSON, unless the answer was cut off."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """stop_reason: the stop string or token id that ended it, or what else did."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType = UNSET


# ------------------------------------------------------------------ completions
class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None = None  # null while it is streamed
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType = UNSET


# ------------------------------------------------------------------ embeddings
class Embedding(msgspec.Struct, kw_only=True):
    """embedding: numbers, or where the request asks for it, their float32 bytes in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


# ------------------------------------------------------------------ the rest
class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "aioengine"
    parent: None = None


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct, kw_only=True):
    prompt: str


class Version(msgspec.Struct, kw_only=True):
    version: str


class Load(msgspec.Struct, kw_only=True):
    server_load: int
    running: int
    waiting: int


class ErrorDetails(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct, kw_only=True):
    error: ErrorDetails
