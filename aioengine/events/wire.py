"""The wire form of events: one JSON object a line, the same for recordings, sockets and golden tests.

The first line is a header (`WireHeader`); each further line is one event, told apart by its "type". Field names are
those of the dataclasses. Prompts travel as lengths: token ids and prompt text are left out unless `include_prompts` is
set, and a decoded event then has `HIDDEN_TOKEN_ID` in their place, so that every length is right and no id can be
mistaken for a real one. Sampling parameters always travel, as what differs from the defaults; `extra_args`, which only
custom logits processors understand, stay behind.

Any change of the form raises `SCHEMA_VERSION`. A reader refuses a newer version instead of guessing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from aioengine.core.scheduler_output import (
    BlockChanges,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from aioengine.errors import AioEngineError
from aioengine.events.step_event import (
    SCHEMA_VERSION,
    EngineSnapshot,
    Event,
    FinishedInfo,
    RequestInfo,
    RequestSnapshot,
    StepEvent,
    StepResultEvent,
)
from aioengine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

HIDDEN_TOKEN_ID = -1
"""Stands for a token id that did not travel."""


class WireError(AioEngineError):
    """A line is not an event of this schema, or a recording cannot be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class WireHeader:
    """The first line: who speaks, in which version, with which settings."""

    engine_version: str
    model: str
    config: dict[str, Any]  # plain JSON values
    unix_time: float  # one moment on two clocks, so that event times (perf_counter) can be dated
    perf_counter: float
    include_prompts: bool = False
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def create(cls, model: str, config: Any = None, *, include_prompts: bool = False) -> WireHeader:
        """The header of this process, now. `config` is a mapping or a dataclass such as `ResolvedConfig`, or None."""
        from aioengine import __version__

        plain: dict[str, Any] = orjson.loads(orjson.dumps(config or {}, default=_jsonable))
        return cls(__version__, model, plain, time.time(), time.perf_counter(), include_prompts)


# ---------------------------------------------------------------------------------------------------- encoding
def encode_header(header: WireHeader) -> bytes:
    """The header as one line, newline included."""
    return _dumps({"type": "header", **{f.name: getattr(header, f.name) for f in dataclasses.fields(header)}})


def encode(event: Event, *, include_prompts: bool = False) -> bytes:
    """One event as one line, newline included.

    Only what differs from the dataclasses is built by hand; the rest is left to orjson, which reads dataclasses
    natively and is some hundred times faster than `json.dumps(dataclasses.asdict(event))`.
    """
    match event:
        case StepEvent():
            return _dumps(_step_to_dict(event, include_prompts))
        case StepResultEvent():
            line = _flat_to_dict("result", event)
            if not include_prompts:
                line["new_text"] = {}
                line["added"] = [_without_prompt(info) for info in event.added]
            return _dumps(line)
        case EngineSnapshot():
            line = _flat_to_dict("snapshot", event)
            line["requests"] = [_request_snapshot_to_dict(request, include_prompts) for request in event.requests]
            return _dumps(line)


def _dumps(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, default=_jsonable, option=orjson.OPT_APPEND_NEWLINE)


def _jsonable(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)  # sorted, so that equal events are equal bytes
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no wire form")


def _flat_to_dict(tag: str, event: StepResultEvent | EngineSnapshot) -> dict[str, Any]:
    return {"type": tag, **{name: getattr(event, name) for name in _FIELDS[type(event)]}}


def _without_prompt(info: RequestInfo) -> RequestInfo:
    return info if info.prompt is None else dataclasses.replace(info, prompt=None)


def _request_snapshot_to_dict(request: RequestSnapshot, include_prompts: bool) -> dict[str, Any]:
    line: dict[str, Any] = {name: getattr(request, name) for name in _FIELDS[RequestSnapshot]}
    if request.sampling_params is not None:
        line["sampling_params"] = params_to_dict(request.sampling_params)
    if not include_prompts:
        line["prompt"] = line["text"] = None
    return line


def params_to_dict(params: SamplingParams, *, complete: bool = False) -> dict[str, Any]:
    """Plain JSON values: what differs from the defaults, or everything; never `extra_args`."""
    line: dict[str, Any] = {name: getattr(params, name) for name in _PARAM_FIELDS}
    if not complete:
        line = {name: value for name, value in line.items() if value != getattr(_DEFAULT_PARAMS, name)}
    if "logit_bias" in line:
        line["logit_bias"] = list(params.logit_bias.items())  # JSON has no integer keys
    if "output_kind" in line:
        line["output_kind"] = params.output_kind.name
    if line.get("structured_outputs") is not None:
        line["structured_outputs"] = dataclasses.asdict(line["structured_outputs"])
    if line.get("repetition_detection") is not None:
        line["repetition_detection"] = dataclasses.asdict(line["repetition_detection"])
    return line


def _params_from_dict(fields: dict[str, Any]) -> SamplingParams:
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "bad_words_token_ids" in fields:
        fields["bad_words_token_ids"] = tuple(tuple(ids) for ids in fields["bad_words_token_ids"])
    if "output_kind" in fields:
        fields["output_kind"] = RequestOutputKind[fields["output_kind"]]
    if fields.get("structured_outputs") is not None:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if fields.get("repetition_detection") is not None:
        fields["repetition_detection"] = RepetitionDetectionParams(**fields["repetition_detection"])
    return SamplingParams(**fields)


def _step_to_dict(event: StepEvent, include_prompts: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"type": "step"}
    for name in _FIELDS[StepEvent]:
        line[name] = getattr(event, name)
    line["output"] = _output_to_dict(event.output, include_prompts)
    if not include_prompts:
        line["added"] = [_without_prompt(info) for info in event.added]
    return line


def _output_to_dict(output: SchedulerOutput, include_prompts: bool) -> dict[str, Any]:
    cached = output.scheduled_cached_reqs
    cached_line: dict[str, Any] = {name: getattr(cached, name) for name in _FIELDS[CachedRequestData]}
    if not include_prompts:
        cached_line["num_all_tokens"] = {req_id: len(ids) for req_id, ids in cached_line.pop("all_token_ids").items()}
    line: dict[str, Any] = {name: getattr(output, name) for name in _FIELDS[SchedulerOutput]}
    if not include_prompts and output.scheduled_spec_decode_tokens:
        guesses = output.scheduled_spec_decode_tokens
        line["scheduled_spec_decode_tokens"] = {req_id: [HIDDEN_TOKEN_ID] * len(ids) for req_id, ids in guesses.items()}
    line["scheduled_new_reqs"] = [_new_request_to_dict(new, include_prompts) for new in output.scheduled_new_reqs]
    line["scheduled_cached_reqs"] = cached_line
    return line


def _new_request_to_dict(new: NewRequestData, include_prompts: bool) -> dict[str, Any]:
    line: dict[str, Any] = {name: getattr(new, name) for name in _FIELDS[NewRequestData]}
    line["sampling_params"] = params_to_dict(new.sampling_params)
    if not include_prompts:
        line["num_prompt_tokens"] = len(line.pop("prompt_token_ids"))
    return line


# ---------------------------------------------------------------------------------------------------- decoding
def decode_header(line: bytes | str) -> WireHeader:
    """Raises WireError if the line is no header, or is one of a newer schema."""
    fields = _loads(line)
    if fields.pop("type", None) != "header":
        raise WireError('not an aioengine recording: the first line is no header ("type": "header")')
    version = fields.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise WireError(f"schema version {version!r} is not a positive integer")
    if version > SCHEMA_VERSION:
        raise WireError(
            f"schema version {version} is newer than {SCHEMA_VERSION}, the newest that this aioengine reads "
            f"(written by aioengine {fields.get('engine_version')}): upgrade aioengine"
        )
    try:
        return WireHeader(**fields)
    except TypeError as exc:
        raise WireError(f"not a header of schema version {version}: {exc}") from exc


def decode(line: bytes | str) -> Event:
    """The event on a line. Raises WireError if there is none."""
    fields = _loads(line)
    tag = fields.pop("type", None)
    read = _READERS.get(tag) if isinstance(tag, str) else None
    if read is None:
        raise WireError(f"unknown event type {tag!r}; known: {', '.join(_READERS)}")
    try:
        return read(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise WireError(f"not a {tag} event of schema version {SCHEMA_VERSION}: {type(exc).__name__}: {exc}") from exc


def _loads(line: bytes | str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise WireError(f"not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise WireError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _step_from_dict(fields: dict[str, Any]) -> StepEvent:
    fields["output"] = _output_from_dict(fields["output"])
    return StepEvent(**_common_from_dict(fields))


def _result_from_dict(fields: dict[str, Any]) -> StepResultEvent:
    return StepResultEvent(**_common_from_dict(fields))


def _snapshot_from_dict(fields: dict[str, Any]) -> EngineSnapshot:
    fields["stats"] = SchedulerStats(**fields["stats"])
    fields["requests"] = [_request_snapshot_from_dict(request) for request in fields["requests"]]
    return EngineSnapshot(**fields)


def _request_snapshot_from_dict(fields: dict[str, Any]) -> RequestSnapshot:
    if fields.get("sampling_params") is not None:
        fields["sampling_params"] = _params_from_dict(fields["sampling_params"])
    return RequestSnapshot(**fields)


def _common_from_dict(fields: dict[str, Any]) -> dict[str, Any]:
    fields["stats"] = SchedulerStats(**fields["stats"])
    fields["block_changes"] = BlockChanges(**fields["block_changes"])
    fields["finished"] = [FinishedInfo(**info) for info in fields["finished"]]
    fields["added"] = [RequestInfo(**info) for info in fields.get("added", ())]
    return fields


def _output_from_dict(fields: dict[str, Any]) -> SchedulerOutput:
    fields["scheduled_new_reqs"] = [_new_request_from_dict(new) for new in fields["scheduled_new_reqs"]]
    fields["scheduled_cached_reqs"] = _cached_from_dict(fields["scheduled_cached_reqs"])
    fields["finished_req_ids"] = frozenset(fields["finished_req_ids"])
    fields["preempted_req_ids"] = frozenset(fields["preempted_req_ids"])
    fields["structured_output_request_ids"] = frozenset(fields.get("structured_output_request_ids", ()))
    return SchedulerOutput(**fields)


def _cached_from_dict(fields: dict[str, Any]) -> CachedRequestData:
    if "num_all_tokens" in fields:
        fields["all_token_ids"] = {req_id: [HIDDEN_TOKEN_ID] * n for req_id, n in fields.pop("num_all_tokens").items()}
    fields["resumed_req_ids"] = frozenset(fields["resumed_req_ids"])
    fields["new_block_ids"] = [None if ids is None else tuple(ids) for ids in fields["new_block_ids"]]
    return CachedRequestData(**fields)


def _new_request_from_dict(fields: dict[str, Any]) -> NewRequestData:
    if "num_prompt_tokens" in fields:
        fields["prompt_token_ids"] = [HIDDEN_TOKEN_ID] * fields.pop("num_prompt_tokens")
    fields["sampling_params"] = _params_from_dict(fields["sampling_params"])
    fields["block_ids"] = tuple(fields["block_ids"])
    return NewRequestData(**fields)


# Constants of the form, computed once: the field names in order, and the reader of each event type.
_FIELDS: dict[type[Any], tuple[str, ...]] = {
    cls: tuple(f.name for f in dataclasses.fields(cls))
    for cls in (StepEvent, StepResultEvent, EngineSnapshot, RequestSnapshot, SchedulerOutput, NewRequestData, CachedRequestData)
}
_DEFAULT_PARAMS = SamplingParams()
_PARAM_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name != "extra_args")
_READERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "step": _step_from_dict,
    "result": _result_from_dict,
    "snapshot": _snapshot_from_dict,
}
