"""The bodies of OpenAI's completions and chat completions. Fields are optional and may be null, as clients send them.

Fields that are not listed are ignored: clients send many that mean nothing here (`user`, `store`, `service_tier`, ...).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from aioengine.sampling_params import MAX_LOGPROBS, MAX_NUM_SEQUENCES, MAX_TEMPERATURE


def _noted(**keywords: Any) -> msgspec.Meta:
    """What the description says of a field. It is checked elsewhere, where the message names the value and the limit."""
    return msgspec.Meta(extra_json_schema=keywords)


_PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant", "tool"]}, "content": _CONTENT},
    "required": ["role", "content"],
}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_FORMS = (
    {"type": "string", "minLength": 1},
    _TOKEN_IDS,
    {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
    {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
)

Messages = Annotated[list[dict[str, Any]], _noted(minItems=1, items=_MESSAGE)]
Temperature = Annotated[float | None, _noted(minimum=0, maximum=MAX_TEMPERATURE)]
TopP = Annotated[float | None, _noted(exclusiveMinimum=0, maximum=1)]
TopK = Annotated[int | None, _noted(minimum=-1, maximum=2**31 - 1)]
Count = Annotated[int | None, _noted(minimum=1, maximum=2**63 - 1)]
Stop = Annotated[str | list[str] | None, _noted(minLength=1, maxItems=256, items={"type": "string", "minLength": 1})]
_Penalty = Annotated[float | None, _noted(minimum=-2, maximum=2)]
_NumLogprobs = Annotated[int | None, _noted(minimum=0, maximum=MAX_LOGPROBS)]
_Name = Annotated[str | None, _noted(minLength=1, maxLength=1024)]
_TokenIds = Annotated[list[int] | None, _noted(items={"type": "integer", "minimum": 0}, maxItems=4096)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's extra: the fields of `StructuredOutputsParams`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """The fields of `RepetitionDetectionParams`."""

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None


class EngineRequest(msgspec.Struct, kw_only=True):
    """What every request for a text may say: which model, and the engine's own way with requests."""

    model: str | None = None
    stream: bool | None = None
    priority: Annotated[int | None, _noted(minimum=-(2**63), maximum=2**63 - 1)] = None
    cache_salt: _Name = None
    timeout: Annotated[float | None, _noted(exclusiveMinimum=0)] = None
    request_id: _Name = None


class GenerationRequest(EngineRequest, kw_only=True):
    """What completions and chats share: OpenAI's fields, and the fields of `SamplingParams` under vLLM's names."""

    stream_options: StreamOptions | None = None
    n: Annotated[int | None, _noted(minimum=1, maximum=MAX_NUM_SEQUENCES)] = None
    max_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: Annotated[float | None, _noted(minimum=0, maximum=1)] = None
    seed: Annotated[int | None, _noted(minimum=0, maximum=2**64 - 1)] = None
    stop: Stop = None
    stop_token_ids: _TokenIds = None
    min_tokens: Annotated[int | None, _noted(minimum=0)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[float | None, _noted(minimum=0.01, maximum=2)] = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: _NumLogprobs = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    repetition_detection: RepetitionDetection | None = None
    extra_args: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    # Text, token ids, or a list of either: msgspec has no union of lists, so it is looked at by hand.
    prompt: Annotated[Any, _noted(anyOf=_PROMPT_FORMS)]
    echo: bool | None = None
    logprobs: _NumLogprobs = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: Messages
    max_completion_tokens: Count = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]] | None, _noted(minItems=1, items=_MESSAGE)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and how a text becomes a vector: see `AsyncEngine.embed`."""

    input: Annotated[Any, _noted(anyOf=list(_PROMPT_FORMS))]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, _noted(enum=[None])] = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
