"""The wire form of events: one JSON object a line, the same for recordings, sockets and golden tests.

The first line is a header (`WireHeader`); each further line is one event, told apart by its "type". Field names are
those of the dataclasses. Prompts travel as lengths: token ids and prompt text are left out unless `include_prompts` is
set, and a decoded event then has `HIDDEN_TOKEN_ID` in their place, so that every length is right and no id can be
mistaken for a real one. Sampling parameters always travel, as what differs from the defaults; `extra_args`, which only
custom logits processors understand, stay behind.

Any change of the form raises `SCHEMA_VERSION`. A reader refuses a newer version instead of guessing, and reads older ones:
a field that a line lacks has its default. Every field is checked on reading: its name, its type, and sampling parameters as
for a new request, unless they are of an older engine that took more.
"""

from __future__ import annotations

import dataclasses
import operator
import time
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.errors import AioEngineError
from aioengine.events.checked_structs import CheckedStructs, StructReader, explain
from aioengine.events.json_form import MAX_INT, MIN_INT, json_form
from aioengine.events.params_form import PARTS, build_params, build_part, params_to_dict, read_unchecked
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
    num_kv_cache_blocks: int | None = None  # the null block included; None: not told (before schema 4)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the tokens' bits depend on, see `RunFacts`

    @classmethod
    def create(
        cls,
        model: str,
        config: Any = None,
        *,
        include_prompts: bool = False,
        num_kv_cache_blocks: int | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> WireHeader:
        """The header of this process, now. `config` is a mapping or a dataclass such as `ResolvedConfig`, or None.

        Without prompts the seed of the block hashes stays behind: who knew it could try prompts against the hashes.
        """
        from aioengine import __version__

        plain: dict[str, Any] = msgspec.json.decode(dumps_anyhow(config or {}))
        if not include_prompts and isinstance(cache := plain.get("cache"), dict) and cache.get("prefix_caching_seed") is not None:
            cache["prefix_caching_seed"] = None
        return cls(
            __version__,
            model,
            plain,
            time.time(),
            time.perf_counter(),
            include_prompts,
            num_kv_cache_blocks=num_kv_cache_blocks,
            facts=msgspec.json.decode(dumps_anyhow(facts)),
        )


# ---------------------------------------------------------------------------------------------------- encoding
@dataclass(frozen=True, slots=True)
class _Form:
    """The fields of a dataclass in order."""

    names: tuple[str, ...]
    sets: tuple[str, ...]  # those that hold one

    @classmethod
    def of(cls, kind: type[Any]) -> _Form:
        hints = typing.get_type_hints(kind)
        names = tuple(f.name for f in dataclasses.fields(kind))
        return cls(names, tuple(name for name in names if typing.get_origin(hints[name]) is frozenset))


def encode_header(header: WireHeader) -> bytes:
    """The header as one line, newline included. Never raises because of a value (a file name need not be Unicode)."""
    return dumps_anyhow({"type": "header", **{f.name: getattr(header, f.name) for f in dataclasses.fields(header)}}) + b"\n"


def encode(event: Event, *, include_prompts: bool = False) -> bytes:
    """One event as one line, newline included. Never raises because of a value.

    Only what differs from the dataclasses is built by hand; the rest is left to msgspec, which reads dataclasses
    natively and is some hundred times faster than `json.dumps(dataclasses.asdict(event))`. Where there is no exact form (an
    integer beyond 64 bits, half of a surrogate pair, a key that is no string), the event is written in the nearest form that
    JSON has (see `json_form`) and says so: `approximate`.
    """
    try:
        if _is_plain(event, include_prompts):
            return _to_line(type(event), event)
        line = _event_to_dict(event, include_prompts)
        _check_integers(line)
        return _to_line(type(event), line)
    except Exception:  # of msgspec, for what it cannot write, or of a user's object that is looked at
        line = _event_to_dict(event, include_prompts)
        line["approximate"] = True
        return _to_line(type(event), json_form(line))


def _to_line(kind: type[Event], fields: Event | dict[str, Any]) -> bytes:
    return b"".join((_PREFIXES[kind], memoryview(_ENCODER.encode_lines((fields,)))[1:]))  # the prefix has the opening brace


def _is_plain(event: Event, include_prompts: bool) -> bool:
    """It is written as it stands, as most steps are: nothing in it has another form on the wire, and no order is to be chosen."""
    match event:
        case StepEvent():
            return (
                not any(_read_other_forms(event))
                and max(map(len, _read_sets(event))) < 2
                and (include_prompts or not event.output.scheduled_spec_decode_tokens)
            )
        case StepResultEvent():
            return not event.added and (include_prompts or not (event.new_text or event.sampled_token_ids))
    return False


def _check_integers(line: dict[str, Any]) -> None:
    """Raise OverflowError for an integer of a user's beyond 64 bits: msgspec would write it, and not every reader could read it."""
    if "output" in line:
        requests, integers = line["output"]["scheduled_new_reqs"], []
    else:
        requests = line.get("requests", ())
        integers = [request["priority"] for request in requests]
    for name in ("last_step", "last_result"):
        if line.get(name) is not None:
            _check_integers(line[name])
    added = line.get("added", [])
    integers += [info["priority"] for info in added]
    for request in (*requests, *added):
        params = request["sampling_params"]
        if params and not _TOKEN_LISTS.isdisjoint(params):
            integers += _token_ids_of(params)
    if integers and not (min(integers) >= MIN_INT and max(integers) <= MAX_INT):
        raise OverflowError("an integer beyond 64 bits")


def _token_ids_of(params: dict[str, Any]) -> Iterable[int]:
    """Those that a user chose: nothing bounds them but the model's vocabulary."""
    chosen = (params.get(name) or () for name in ("stop_token_ids", "allowed_token_ids"))
    biased = (token_id for token_id, _ in params.get("logit_bias", ()))
    return chain(*chosen, biased, *params.get("bad_words_token_ids", ()))


def _event_to_dict(event: Event, include_prompts: bool) -> dict[str, Any]:
    """Without its type."""
    line = _fields_of(event)
    match event:
        case StepEvent():
            line["output"] = _output_to_dict(event.output, include_prompts)
        case StepResultEvent() if not include_prompts:
            line["new_text"] = line["sampled_token_ids"] = line["logprob_digests"] = {}
        case EngineSnapshot():
            line["requests"] = [_request_snapshot_to_dict(request, include_prompts) for request in event.requests]
            for name, told in (("last_step", event.last_step), ("last_result", event.last_result)):
                line[name] = None if told is None else _event_to_dict(told, include_prompts)
    if not isinstance(event, EngineSnapshot):
        line["added"] = [_request_info_to_dict(info, include_prompts) for info in event.added]
    return line


def dumps_anyhow(value: Any) -> bytes:
    """JSON without a newline, in the nearest form that there is."""
    return _ENCODER.encode(json_form(value))


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no wire form")


def _fields_of(value: Any) -> dict[str, Any]:
    """Field by field; sets sorted, so that equal events are equal bytes."""
    form = _FORMS.get(type(value))
    if form is None:
        raise TypeError(f"{type(value).__name__} is no event")
    line: dict[str, Any] = {name: getattr(value, name) for name in form.names}
    for name in form.sets:
        if len(line[name]) > 1:
            line[name] = sorted(line[name])
    return line


def _request_info_to_dict(info: RequestInfo, include_prompts: bool) -> dict[str, Any]:
    line = _fields_of(info)
    if info.sampling_params is not None:
        line["sampling_params"] = params_to_dict(info.sampling_params)
    if not include_prompts:
        line["prompt"] = line["prompt_token_ids"] = line["cache_salt"] = None
    return line


def _request_snapshot_to_dict(request: RequestSnapshot, include_prompts: bool) -> dict[str, Any]:
    line = _fields_of(request)
    if request.sampling_params is not None:
        line["sampling_params"] = params_to_dict(request.sampling_params)
    if not include_prompts:
        line["prompt"] = line["text"] = None
    return line


def _output_to_dict(output: SchedulerOutput, include_prompts: bool) -> dict[str, Any]:
    line = _fields_of(output)
    if not include_prompts and output.scheduled_spec_decode_tokens:
        draft_token_ids = output.scheduled_spec_decode_tokens
        line["scheduled_spec_decode_tokens"] = {req_id: [HIDDEN_TOKEN_ID] * len(ids) for req_id, ids in draft_token_ids.items()}
    line["scheduled_new_reqs"] = [_new_request_to_dict(new, include_prompts) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    if cached.all_token_ids or len(cached.resumed_req_ids) > 1:  # else it is written as it stands
        line["scheduled_cached_reqs"] = _cached_to_dict(cached, include_prompts)
    return line


def _cached_to_dict(cached: CachedRequestData, include_prompts: bool) -> dict[str, Any]:
    line = _fields_of(cached)
    if not include_prompts:
        line["num_all_tokens"] = {req_id: len(ids) for req_id, ids in line.pop("all_token_ids").items()}
    return line


def _new_request_to_dict(new: NewRequestData, include_prompts: bool) -> dict[str, Any]:
    line = _fields_of(new)
    line["sampling_params"] = params_to_dict(new.sampling_params)
    if not include_prompts:
        line["num_prompt_tokens"] = len(line.pop("prompt_token_ids"))
    return line


# ---------------------------------------------------------------------------------------------------- decoding
def decode_header(line: bytes | str) -> WireHeader:
    """Raises WireError if the line is no header, or is one of a newer schema."""
    fields = _loads(line)  # of whatever version it is
    if fields.get("type") != "header":
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
        return _HEADERS.read(line)  # type: ignore[no-any-return]
    except ValueError as exc:
        raise WireError(f"not a header of schema version {version}: {explain(exc)}") from exc


def decode(line: bytes | str, *, schema_version: int = SCHEMA_VERSION) -> Event:
    """The event on a line; `schema_version` is that of the header before it. Fields that it lacks get their defaults.

    Raises WireError, which names the field, if there is no event.
    """
    try:
        return _read(line, lenient=schema_version < SCHEMA_VERSION)
    except _REFUSALS as exc:
        fields = _loads(line)
        tag = fields.get("type")
        if not isinstance(tag, str) or tag not in _EVENT_TYPES:
            raise WireError(f"unknown event type {tag!r}; known: {', '.join(_EVENT_TYPES)}") from None
        raise WireError(f"not a {tag} event of schema version {schema_version}: {explain(exc)}") from exc


def _read(line: bytes | str, *, lenient: bool) -> Event:
    try:
        return (_LENIENT_EVENTS if lenient else _EVENTS).read(line)  # type: ignore[no-any-return]
    except _REFUSALS:
        if lenient or _loads(line).get("approximate") is not True:
            raise
    return _read(line, lenient=True)  # what it holds need not be what it was, and has been accepted once


def _loads(line: bytes | str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(line)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise WireError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _build_cached(*fields: Any) -> CachedRequestData:
    *own, num_all_tokens = fields
    cached = CachedRequestData(*own)
    if num_all_tokens is msgspec.UNSET:
        return cached
    return dataclasses.replace(cached, all_token_ids={req_id: _hidden(count) for req_id, count in num_all_tokens.items()})


def _build_new_request(req_id: str, token_ids: Any, *fields: Any) -> NewRequestData:
    *own, num_prompt_tokens = fields
    if num_prompt_tokens is not msgspec.UNSET:
        token_ids = _hidden(num_prompt_tokens)
    if token_ids is msgspec.UNSET:
        raise ValueError(f"the new request {req_id!r} has neither prompt_token_ids nor num_prompt_tokens")
    return NewRequestData(req_id, token_ids, *own)


def _hidden(count: int) -> list[int]:
    if not 0 <= count <= _MAX_HIDDEN_TOKENS:
        raise ValueError(f"{count} tokens are not from 0 to {_MAX_HIDDEN_TOKENS}")
    return [HIDDEN_TOKEN_ID] * count


# ---------------------------------------------------------------------------------------------------- the readers
def _make_structs(*, lenient: bool) -> CheckedStructs:
    """lenient: of an older schema, or of an event that is not exact; see `read_unchecked`."""
    kind_names = tuple(kind.name for kind in RequestOutputKind)
    return CheckedStructs(
        own_fields={
            CachedRequestData: {"num_all_tokens": dict[str, int] | msgspec.UnsetType},
            NewRequestData: {"prompt_token_ids": list[int] | msgspec.UnsetType, "num_prompt_tokens": int | msgspec.UnsetType},
            SamplingParams: {"logit_bias": list[tuple[int, int | float]], "output_kind": Literal[kind_names], "extra_args": None},
        },
        build={
            CachedRequestData: _build_cached,
            NewRequestData: _build_new_request,
            SamplingParams: build_params,
            **{cls: build_part(cls) for cls in PARTS.values()},
        },
        plain={SamplingParams: read_unchecked} if lenient else {},
    )


# Constants of the form, computed once.
_REFUSALS = (KeyError, TypeError, ValueError, AttributeError, RecursionError)  # of msgspec's, and of what builds the parameters
_FORMS = {
    cls: _Form.of(cls)
    for cls in (
        *(StepEvent, StepResultEvent, EngineSnapshot, RequestInfo, RequestSnapshot),
        *(SchedulerOutput, NewRequestData, CachedRequestData),
    )
}
_read_other_forms = operator.attrgetter("added", "output.scheduled_new_reqs", "output.scheduled_cached_reqs.all_token_ids")
_read_sets = operator.attrgetter(
    *(f"output.{name}" for name in _FORMS[SchedulerOutput].sets),
    *(f"output.scheduled_cached_reqs.{name}" for name in _FORMS[CachedRequestData].sets),
)
_TOKEN_LISTS = frozenset({"stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words_token_ids"})
_ENCODER = msgspec.json.Encoder(enc_hook=_jsonable)
_EVENT_TYPES: dict[str, type[Any]] = {"step": StepEvent, "result": StepResultEvent, "snapshot": EngineSnapshot}
_PREFIXES = {cls: f'{{"type":"{tag}",'.encode() for tag, cls in _EVENT_TYPES.items()}
_HEADERS = StructReader({"header": WireHeader}, CheckedStructs())
_EVENTS = StructReader(_EVENT_TYPES, _make_structs(lenient=False))
_LENIENT_EVENTS = StructReader(_EVENT_TYPES, _make_structs(lenient=True))
