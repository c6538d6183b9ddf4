"""Between dataclasses and JSON: any value in a form that JSON has, and dataclasses back from plain values by their annotations."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # what orjson writes and reads back as an integer
_MAX_DEPTH = 100  # of nested values; orjson refuses 255


def json_form(value: Any, *, depth: int = 0) -> Any:
    """The value, or the nearest one that orjson can write: for values that it refuses. Never raises.

    Integers are limited to 64 bits, so that they stay numbers; half of a surrogate pair becomes its escape; keys become
    strings, sets sorted lists; what nests too deep becomes "…" and what is of another kind the name of its type.
    """
    try:
        return "…" if depth > _MAX_DEPTH else _form(value, depth)
    except Exception:  # a user's object may raise whatever it likes when it is looked at
        return f"<{_text(type(value).__name__)}>"


def _form(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return json_form(value.value, depth=depth + 1)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Integral):
        return min(max(int(value), _MIN_INT), _MAX_INT)
    if isinstance(value, Real):
        return float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_form(getattr(value, f.name), depth=depth + 1) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): json_form(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((json_form(item, depth=depth + 1) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [json_form(item, depth=depth + 1) for item in value]
    return f"<{_text(type(value).__name__)}>"


def _text(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _key(key: Any) -> str:
    form = key if isinstance(key, str) else json_form(key)
    return _text(str(form))


def dataclass_fields(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields of a dataclass that hold another one (or None), and its type."""
    found: dict[str, type[Any]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[name] = kind
    return found


class Reader:
    """Builds dataclasses from plain values: nested ones, tuples and frozensets as the annotations say.

    A field that is missing gets its default; TypeError if it has none, and for a field that the class does not have.
    special: readers of the types that are not built field by field.
    """

    def __init__(self, special: Mapping[type[Any], Callable[[Any], Any]]) -> None:
        self._special = dict(special)
        self._plans: dict[type[Any], list[tuple[str, Callable[[Any], Any]]]] = {}

    def build(self, cls: type[Any], fields: dict[str, Any]) -> Any:
        """An instance of `cls`. `fields` is used up."""
        plan = self._plans.get(cls)
        if plan is None:
            plan = self._plans[cls] = self._plan(cls)
        for name, convert in plan:
            if name in fields:
                fields[name] = convert(fields[name])
        return cls(**fields)

    def _plan(self, cls: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
        """The fields whose values differ from their JSON form, and how to read them."""
        hints = typing.get_type_hints(cls)
        converters = ((f.name, self._converter(hints[f.name])) for f in dataclasses.fields(cls))
        return [(name, convert) for name, convert in converters if convert is not None]

    def _converter(self, hint: Any) -> Callable[[Any], Any] | None:
        """None: the value is what it is in JSON."""
        if hint in self._special:
            return self._special[hint]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return lambda fields: self.build(hint, fields)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            inner = next(filter(None, map(self._converter, arguments)), None)
            return None if inner is None else lambda value: None if value is None else inner(value)
        if origin is frozenset:
            return frozenset
        if origin not in (list, tuple, dict):
            return None
        item = self._converter(arguments[-1] if origin is dict else arguments[0])
        if origin is dict:
            return None if item is None else lambda values: {key: item(value) for key, value in values.items()}
        if item is None:
            return tuple if origin is tuple else None
        return lambda values: origin(map(item, values))
