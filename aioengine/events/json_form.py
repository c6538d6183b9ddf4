"""Any value in a form that JSON has."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

MIN_INT, MAX_INT = -(2**63), 2**64 - 1
"""What any reader of JSON reads back as the integer that it was."""

_MAX_DEPTH = 100  # of nested values: what readers that go down by recursion can take


def json_form(value: Any, *, depth: int = 0) -> Any:
    """The value, or the nearest one that JSON can hold: for values that have no form of their own. Never raises.

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
        return min(max(int(value), MIN_INT), MAX_INT)
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
