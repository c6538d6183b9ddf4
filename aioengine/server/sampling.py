"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from typing import Any

import msgspec

from aioengine.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from aioengine.server.errors import RequestError
from aioengine.server.protocol import GenerationRequest, ResponseFormat, StructuredOutputs

# Those that mean the same under the same name. A field that is null or absent keeps the default of `SamplingParams`.
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "truncate_prompt_tokens", "extra_args"),
)


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structured_outputs: StructuredOutputsParams | None = None,
    **changes: Any,
) -> SamplingParams:
    """Raises InvalidRequestError naming the field, its value and the limit.

    structured_outputs: in place of what the request says itself. changes: fields of `SamplingParams` that the caller decides.
    """
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.repetition_detection is not None:
        given["repetition_detection"] = RepetitionDetectionParams(**_given(request.repetition_detection))
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(token_id): bias for token_id, bias in request.logit_bias.items()}
    return SamplingParams(
        **{
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "structured_outputs": structured_outputs or _structured_outputs(request.response_format, request.structured_outputs),
            **changes,
        }
    )


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise RequestError(400, f"logit_bias must have token ids as keys, got {text[:40]!r}", param="logit_bias")
    return int(text)


def _structured_outputs(form: ResponseFormat | None, extra: StructuredOutputs | None) -> StructuredOutputsParams | None:
    """Raises RequestError."""
    if form is None or form.type == "text":
        return None if extra is None else StructuredOutputsParams(**_given(extra))
    if extra is not None:
        raise RequestError(400, "response_format and structured_outputs both say what to match: give one of them", param="response_format")
    schema = None if form.json_schema is None else form.json_schema.schema
    return json_format(form.type, schema, where="response_format")


def json_format(kind: str, schema: dict[str, Any] | None, *, where: str) -> StructuredOutputsParams:
    """Of a format that a request asks for: "json_object" or "json_schema". Raises RequestError."""
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if schema is None:
        raise RequestError(400, f"{where} of type json_schema needs a schema", param=where)
    return StructuredOutputsParams(json=schema)


def _given(fields: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name in fields.__struct_fields__ if (value := getattr(fields, name)) is not None}
