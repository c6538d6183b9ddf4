"""The wire form of events: one JSON object a line, the same for recordings, sockets and golden tests.

The first line is a header (`WireHeader`); each further line is one event, told apart by its "type". Field names are
those of the dataclasses. Prompts travel as lengths: token ids and prompt text are left out unless `include_prompts` is
set, and a decoded event then has `HIDDEN_TOKEN_ID` in their place, so that every length is right and no id can be
mistaken for a real one. Sampling parameters always travel, as what differs from the defaults; `extra_args`, which only
custom logits processors understand, stay behind.

Any change of the form raises `SCHEMA_VERSION`. A reader refuses a newer version instead of guessing, and reads older ones:
a field that a line lacks has its default.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.events.json_form import Reader, dataclass_fields, json_form
from aioengine.events.step_event import (
    SCHEMA_VERSION,
    EngineSnapshot,
    Event,
    RequestInfo,
    RequestSnapshot,
    StepEvent,
    StepResultEvent,
)
from aioengine.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")

HIDDEN_TOKEN_ID = -1
"""Stands for a token id that did not travel."""

_MAX_HIDDEN_TOKENS = 1 << 24  # a line of a few bytes must not make a reader ask for all memory


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

        plain: dict[str, Any] = orjson.loads(dumps_anyhow(config or {}))
        return cls(__version__, model, plain, time.time(), time.perf_counter(), include_prompts)


# ---------------------------------------------------------------------------------------------------- encoding
def encode_header(header: WireHeader) -> bytes:
    """The header as one line, newline included. Never raises because of a value (a file name need not be Unicode)."""
    return dumps_anyhow({"type": "header", **{f.name: getattr(header, f.name) for f in dataclasses.fields(header)}}) + b"\n"


def encode(event: Event, *, include_prompts: bool = False) -> bytes:
    """One event as one line, newline included. Never raises because of a value.

    Only what differs from the dataclasses is built by hand; the rest is left to orjson, which reads dataclasses
    natively and is some hundred times faster than `json.dumps(dataclasses.asdict(event))`. Where it refuses (an integer
    beyond 64 bits, half of a surrogate pair, a key that is no string), the event is written in the nearest form that JSON
    has (see `json_form`) and says so: `approximate`.
    """
    line = _event_to_dict(event, include_prompts)
    try:
        return _dumps(line)
    except TypeError:  # what orjson raises for whatever it cannot write
        line["approximate"] = True
        return _dumps(json_form(line))


def _event_to_dict(event: Event, include_prompts: bool) -> dict[str, Any]:
    match event:
        case StepEvent():
            return _step_to_dict(event, include_prompts)
        case StepResultEvent():
            line = _flat_to_dict("result", event)
            if not include_prompts:
                line["new_text"] = {}
                line["added"] = [_without_prompt(info) for info in event.added]
            return line
        case EngineSnapshot():
            line = _flat_to_dict("snapshot", event)
            line["requests"] = [_request_snapshot_to_dict(request, include_prompts) for request in event.requests]
            return line
    raise TypeError(f"{type(event).__name__} is no event")


def dumps_anyhow(value: Any) -> bytes:
    """JSON without a newline: exact if there is such a form, else `json_form`."""
    try:
        return orjson.dumps(value, default=_jsonable)
    except TypeError:
        return orjson.dumps(json_form(value))


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
    """Plain values: what differs from the defaults, or everything; never `extra_args`.

    Plain JSON values, but for what a user's JSON schema may hold.
    """
    line: dict[str, Any] = {name: getattr(params, name) for name in _PARAM_FIELDS}
    if not complete:
        line = {name: value for name, value in line.items() if value is not _DEFAULTS[name] and value != _DEFAULTS[name]}
    if "logit_bias" in line:
        line["logit_bias"] = list(params.logit_bias.items())  # JSON has no integer keys
    if "output_kind" in line:
        line["output_kind"] = params.output_kind.name
    for name in _PARAM_PARTS:
        part = line.get(name)
        if part is not None:
            line[name] = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return line


def _params_from_dict(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**_params_fields(fields))


def _unchecked_params_from_dict(fields: dict[str, Any]) -> SamplingParams:
    """Of an older schema, whose engine took values that this one refuses, or of an event whose values are not exact."""
    try:
        return SamplingParams(**_params_fields(dict(fields)))
    except InvalidRequestError:
        return _build_unchecked(SamplingParams, {name: _tuples(value) for name, value in _params_fields(fields).items()})


def _params_fields(fields: dict[str, Any]) -> dict[str, Any]:
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "bad_words_token_ids" in fields:
        fields["bad_words_token_ids"] = tuple(tuple(ids) for ids in fields["bad_words_token_ids"])
    if "output_kind" in fields:
        fields["output_kind"] = RequestOutputKind[fields["output_kind"]]
    for name, cls in _PARAM_PARTS.items():
        if isinstance(fields.get(name), dict):
            fields[name] = _build_unchecked(cls, {key: _tuples(value) for key, value in fields[name].items()})
    return fields


def _build_unchecked(cls: type[T], fields: dict[str, Any]) -> T:
    """An instance without the checks of its constructor. Raises TypeError for an unknown field."""
    made = object.__new__(cls)
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        value = fields.pop(f.name, default)
        if value is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__} lacks {f.name!r}")
        object.__setattr__(made, f.name, value)
    if fields:
        raise TypeError(f"{cls.__name__} has no {next(iter(fields))!r}")
    return made


def _tuples(value: Any) -> Any:
    """The form that parameters have once built: their lists are tuples."""
    return tuple(value) if isinstance(value, list) else value


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


def decode(line: bytes | str, *, schema_version: int = SCHEMA_VERSION) -> Event:
    """The event on a line; `schema_version` is that of the header before it. Fields that it lacks get their defaults.

    Raises WireError if there is no event.
    """
    fields = _loads(line)
    tag = fields.pop("type", None)
    cls = _EVENT_TYPES.get(tag) if isinstance(tag, str) else None
    if cls is None:
        raise WireError(f"unknown event type {tag!r}; known: {', '.join(_EVENT_TYPES)}")
    reader = _LENIENT_READER if schema_version < SCHEMA_VERSION or fields.get("approximate") else _READER
    try:
        event: Event = reader.build(cls, fields)
        _check_place(event)
        return event
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise WireError(f"not a {tag} event of schema version {schema_version}: {type(exc).__name__}: {exc}") from exc


def _check_place(event: Event) -> None:
    """Every reader counts with these two, and makes file names of them."""
    if not isinstance(event.step_id, int) or not isinstance(event.time, (int, float)):
        raise TypeError(f"step_id {event.step_id!r} or time {event.time!r} is no number")


def _loads(line: bytes | str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise WireError(f"not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise WireError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _cached_from_dict(reader: Reader, fields: dict[str, Any]) -> CachedRequestData:
    if "num_all_tokens" in fields:
        fields["all_token_ids"] = {req_id: _hidden(n) for req_id, n in fields.pop("num_all_tokens").items()}
    return reader.build(CachedRequestData, fields)  # type: ignore[no-any-return]


def _new_request_from_dict(reader: Reader, fields: dict[str, Any]) -> NewRequestData:
    if "num_prompt_tokens" in fields:
        fields["prompt_token_ids"] = _hidden(fields.pop("num_prompt_tokens"))
    return reader.build(NewRequestData, fields)  # type: ignore[no-any-return]


def _hidden(count: int) -> list[int]:
    if not 0 <= count <= _MAX_HIDDEN_TOKENS:
        raise ValueError(f"{count} tokens are not from 0 to {_MAX_HIDDEN_TOKENS}")
    return [HIDDEN_TOKEN_ID] * count


def _make_reader(params_from_dict: Callable[[dict[str, Any]], SamplingParams]) -> Reader:
    special: dict[type[Any], Callable[[Any], Any]] = {SamplingParams: params_from_dict}
    reader = Reader(special)
    # Forms that are not the dataclass's own; each builds its fields with the same reader.
    return Reader(
        {
            **special,
            CachedRequestData: functools.partial(_cached_from_dict, reader),
            NewRequestData: functools.partial(_new_request_from_dict, reader),
        }
    )


# Constants of the form, computed once: the field names in order, and the class of each event type.
_FIELDS: dict[type[Any], tuple[str, ...]] = {
    cls: tuple(f.name for f in dataclasses.fields(cls))
    for cls in (StepEvent, StepResultEvent, EngineSnapshot, RequestSnapshot, SchedulerOutput, NewRequestData, CachedRequestData)
}
_PARAM_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name != "extra_args")
_DEFAULTS = {name: getattr(SamplingParams(), name) for name in _PARAM_FIELDS}
_PARAM_PARTS = dataclass_fields(SamplingParams)
_EVENT_TYPES: dict[str, type[Any]] = {"step": StepEvent, "result": StepResultEvent, "snapshot": EngineSnapshot}
_READER = _make_reader(_params_from_dict)
_LENIENT_READER = _make_reader(_unchecked_params_from_dict)
