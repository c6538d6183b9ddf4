"""Sampling parameters on the wire: what differs from the defaults, and how older ones are read."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any, TypeVar

from aioengine.errors import InvalidRequestError
from aioengine.events.checked_structs import dataclass_fields
from aioengine.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")

_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name != "extra_args")
_read_fields = operator.attrgetter(*_FIELDS)
_DEFAULTS: tuple[Any, ...] = _read_fields(SamplingParams())
PARTS = dataclass_fields(SamplingParams)
"""The fields that hold another dataclass, and its type."""


def params_to_dict(params: SamplingParams, *, complete: bool = False) -> dict[str, Any]:
    """Plain values: what differs from the defaults, or everything; never `extra_args`.

    Plain JSON values, but for what a user's JSON schema may hold.
    """
    values = _read_fields(params)
    line: dict[str, Any]
    if complete:
        line = dict(zip(_FIELDS, values, strict=True))
    else:
        line = {name: value for name, value, default in _differing(values) if value != default}
    if "logit_bias" in line:
        line["logit_bias"] = list(params.logit_bias.items())  # JSON has no integer keys
    if "output_kind" in line:
        line["output_kind"] = params.output_kind.name
    for name in PARTS:
        part = line.get(name)
        if part is not None:
            line[name] = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return line


def _differing(values: tuple[Any, ...]) -> Iterable[tuple[str, Any, Any]]:
    """(name, value, default) of the parameters that are not the default itself, found without a loop of Python's."""
    return compress(zip(_FIELDS, values, _DEFAULTS, strict=True), map(operator.is_not, values, _DEFAULTS))


def build_params(*values: Any) -> SamplingParams:
    return SamplingParams(**_own_types({name: value for name, value, default in _differing(values) if value != default}))


def build_part(cls: type[T]) -> Callable[..., T]:
    """Of a part of sampling parameters: the types were checked, and the values are taken as they are."""
    names = tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]
    return lambda *values: build_unchecked(cls, dict(zip(names, map(_tuples, values), strict=True)))


def read_unchecked(fields: dict[str, Any]) -> SamplingParams:
    """Of an older schema, whose engine took values that this one refuses, or of an event whose values are not exact."""
    for name, cls in PARTS.items():
        if isinstance(fields.get(name), dict):
            fields[name] = build_unchecked(cls, {key: _tuples(value) for key, value in fields[name].items()})
    fields = _own_types(fields)
    try:
        return SamplingParams(**fields)
    except InvalidRequestError:
        return build_unchecked(SamplingParams, {name: _tuples(value) for name, value in fields.items()})


def _own_types(fields: dict[str, Any]) -> dict[str, Any]:
    """Those that JSON does not have."""
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
    if "bad_words_token_ids" in fields:
        fields["bad_words_token_ids"] = tuple(map(tuple, fields["bad_words_token_ids"]))
    if isinstance(fields.get("output_kind"), str):
        fields["output_kind"] = RequestOutputKind[fields["output_kind"]]
    return fields


def build_unchecked(cls: type[T], fields: dict[str, Any]) -> T:
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
