"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from typing import Any

from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
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
    if form is not None and form.type != "text":
        if extra is not None:
            raise RequestError(
                400, "response_format and structured_outputs both say what to match: give one of them", param="response_format"
            )
        if form.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if form.json_schema is None or form.json_schema.schema is None:
            raise RequestError(400, "response_format of type json_schema needs json_schema.schema", param="response_format")
        return StructuredOutputsParams(json=form.json_schema.schema)
    if extra is None:
        return None
    given = {name: value for name in extra.__struct_fields__ if (value := getattr(extra, name)) is not None}
    return StructuredOutputsParams(**given)
