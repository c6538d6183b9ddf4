"""What callers pass, read as plain values of Python's own: numbers of NumPy, subclasses and generators become plain ones.

Each reader gives None for what is not of its kind: whoever asks knows the name of the field, and its limits. Nothing here raises,
whatever a value's own methods do, and `shorten` shows any value in a line.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

_MAX_SHOWN_CHARS = 160
_MAX_SHOWN_BITS = 256


def shorten(value: object) -> str:
    """`repr(value)` for a message: of a bounded length, and without ever failing."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_SHOWN_CHARS
    short.maxlevel = 3
    try:
        text = short.repr(value)
    except Exception:  # of the value's own __repr__, or integers in it that are too long to be written
        return f"a {type(value).__name__}"
    return text if len(text) <= 2 * _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def whole(value: object) -> int | None:
    """A plain int; a bool is none, and neither is 5.0."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except Exception:  # an array of several items, or whatever else only looks like an integer
        return None


def number(value: object) -> float | None:
    """A finite int or float that fits a float64; an int stays one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        as_float = float(value)
    except Exception:  # 10**400: OverflowError
        return None
    if not math.isfinite(as_float):
        return None
    return value if isinstance(value, int) and type(value) is int else as_float


def flag(value: object) -> bool | None:
    """True or False; 1 and 0 are numbers."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ != "numpy":
        return None
    try:
        item = value.item()  # type: ignore[attr-defined]
    except Exception:  # an array of several items
        return None
    return item if isinstance(item, bool) else None


def text(value: object) -> str | None:
    """A plain str, also of a subclass (`numpy.str_`, a member of a StrEnum)."""
    return str.__str__(value) if isinstance(value, str) else None


def surrogate_at(value: str) -> int | None:
    """Where `value` cannot be written as UTF-8, because half of a surrogate pair stands there; None: it can."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        return exc.start
    return None


def listed(value: object, *, most: int) -> tuple[Any, ...] | None:
    """The items of a list, tuple, array, set or iterator; more than `most` + 1 are not read, so one that never ends does.

    The order of a set differs between processes, so its items come sorted. Text, bytes and mappings are no lists.
    """
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return None
    if isinstance(value, Set):
        items = _read(value, most)
        try:
            return items if items is None else tuple(sorted(items))
        except Exception:  # of several kinds: one of them will be refused
            return items
    return _read(value, most)


def token_ids(items: Sequence[Any]) -> tuple[int, ...] | None:
    """Plain integers that are not negative; None if one of them is something else. A millisecond for 40,000."""
    plain: Iterable[Any] = items
    if not set(map(type, items)) <= {int}:
        plain = [whole(item) for item in items]
        if None in plain:
            return None
    result = tuple(plain)
    return None if result and min(result) < 0 else result


def _read(value: Any, most: int) -> tuple[Any, ...] | None:
    try:
        if hasattr(value, "tolist"):  # an array: its items as Python's own numbers
            value = value[: most + 1].tolist()
        return tuple(itertools.islice(value, most + 1))
    except Exception:  # it is no list, or whatever its own code raises
        return None
