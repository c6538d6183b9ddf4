"""Fields of a request, read and checked: plain values of Python's own, or an InvalidRequestError with name, value and limit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aioengine.checks.values as values
from aioengine.checks.values import shorten
from aioengine.errors import InvalidRequestError

MAX_JSON_DEPTH = 200  # levels: what encoders and parsers that go down by recursion can take
MAX_JSON_VALUES = 1 << 16  # a tenth of a second of the caller's time
MAX_JSON_INTEGER_BITS = 4096  # Python itself refuses to write integers of more than 4300 digits
_SURROGATE_ESCAPE = "\\ud"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)


def number(name: str, value: object, *, least: float, most: float, above_least: bool = False) -> float:
    """A finite number in [least, most], or in (least, most]."""
    plain = values.number(value)
    if plain is None or not least <= plain <= most or (above_least and plain == least):
        raise InvalidRequestError(f"{name} must be in {'(' if above_least else '['}{least:g}, {most:g}], got {shorten(value)}")
    return plain


def whole(name: str, value: object, *, least: int, most: int, note: str = "") -> int:
    """An integer in [least, most]."""
    plain = values.whole(value)
    if plain is None or not least <= plain <= most:
        # A limit that nobody comes near is told to those who pass it.
        is_far = most >= 2**31 - 1 and (plain is None or plain < least)
        limits = f">= {_limit(least)}" if is_far else f"in [{_limit(least)}, {_limit(most)}]"
        raise InvalidRequestError(f"{name} must be an integer {limits}{note}, got {shorten(value)}")
    return plain


def _limit(limit: int) -> str:
    """Large powers of two, and the numbers before them, as such."""
    if limit < 0:
        return f"-{_limit(-limit)}"
    for offset, ending in ((0, ""), (1, " - 1")):
        bits = (limit + offset).bit_length() - 1
        if bits > 20 and limit + offset == 1 << bits:
            return f"2**{bits}{ending}"
    return str(limit)


def flag(name: str, value: object) -> bool:
    plain = values.flag(value)
    if plain is None:
        raise InvalidRequestError(f"{name} must be True or False, got {shorten(value)}")
    return plain


def items(name: str, value: object, *, most: int, what: str = "a list") -> tuple[Any, ...]:
    """The items of a list or the like, at most `most`; None: there are none."""
    found = () if value is None else values.listed(value, most=most)
    if found is None:
        raise InvalidRequestError(f"{name} must be {what}, got {shorten(value)}")
    require(len(found) <= most, f"{name} must have at most {most} items, got more: {shorten(value)}")
    return found


def token_ids(name: str, value: object, *, most: int) -> tuple[int, ...]:
    given = items(name, value, most=most)
    plain = values.token_ids(given)
    if plain is None:
        wrong = next(item for item in given if (token_id := values.whole(item)) is None or token_id < 0)
        raise InvalidRequestError(f"{name} must hold integers >= 0, got {shorten(wrong)}")
    return plain


def texts(name: str, value: object, *, most: int, most_chars: int) -> tuple[str, ...]:
    """Strings that are not empty; most_chars: of all of them together."""
    given = items(name, value, most=most, what="a list of strings")
    plain = tuple(text(f"{name} must hold non-empty strings", name, item) for item in given)
    num_chars = sum(map(len, plain))
    require(num_chars <= most_chars, f"{name} must have at most {most_chars} characters together, got {num_chars}")
    return plain


def text(complaint: str, name: str, value: object) -> str:
    """A string that is not empty and has a UTF-8 form. complaint: what is said of anything else than a non-empty string."""
    plain = values.text(value)
    if not plain:
        raise InvalidRequestError(f"{complaint}, got {shorten(value)}")
    check_unicode(name, plain)
    return plain


def check_unicode(what: str, given: str) -> None:
    """Raise InvalidRequestError if `given` cannot be written as UTF-8 (it holds half of a surrogate pair)."""
    place = values.surrogate_at(given)
    if place is not None:
        raise InvalidRequestError(f"{what} is not valid Unicode: {given[place]!r} at position {place}")


def mapping(name: str, value: object, *, most: int) -> dict[Any, Any]:
    """A copy of a mapping; None: an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping, got {shorten(value)}")
    try:
        size = len(value)
        copy = dict(value) if size <= most else {}
    except Exception as exc:  # the mapping's own code
        raise InvalidRequestError(f"{name} cannot be read: {type(exc).__name__}: {exc}") from exc
    require(size <= most, f"{name} must have at most {most} entries, got {size}")
    return copy


def text_keys(name: str, value: object, *, most: int) -> dict[str, Any]:
    """A copy of a mapping whose keys are strings; its values are as they were given."""
    return {text(f"{name} must have non-empty strings as keys", name, key): item for key, item in mapping(name, value, most=most).items()}


def biases(name: str, value: object, *, most: int, bound: float) -> dict[int, float]:
    """Token id -> number in [-bound, bound]. Two milliseconds for 40,000 plain ones."""
    given = mapping(name, value, most=most)
    if _are_plain_biases(given, bound):
        return given
    plain: dict[int, float] = {}
    for key, bias in given.items():
        token_id = values.whole(key)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(f"{name} must have token ids >= 0 as keys, got {shorten(key)}")
        plain[token_id] = number(f"{name} for token {shorten(token_id)}", bias, least=-bound, most=bound)
    return plain


def _are_plain_biases(given: dict[Any, Any], bound: float) -> bool:
    """Without a loop of Python's; False: look closer."""
    if not given:
        return True
    numbers = given.values()
    if set(map(type, given)) != {int} or not set(map(type, numbers)) <= {int, float}:
        return False
    # No comparison tells NaN, a sum does.
    return min(given) >= 0 and -bound <= min(numbers) and max(numbers) <= bound and not math.isnan(sum(numbers))


def json_schema(name: str, value: object, *, most_chars: int) -> str | dict[str, Any]:
    """A schema as text, or a copy of one that was given as a mapping: plain JSON values that have a wire form.

    One with integers of more than 64 bits, which not every reader of JSON takes, becomes text.
    """
    if isinstance(value, Mapping):
        copy, has_wide_integers = _plain_json(name, value)
        assert isinstance(copy, dict)
        return json.dumps(copy) if has_wide_integers else copy
    schema = text(f"{name} must be a mapping or a non-empty text", name, value)
    require(len(schema) <= most_chars, f"{name} has {len(schema)} characters, at most {most_chars} are taken")
    if _SURROGATE_ESCAPE in schema.lower():  # an escape says what the text itself may not hold
        try:
            _plain_json(name, json.loads(schema))
        except (ValueError, RecursionError) as exc:
            if isinstance(exc, InvalidRequestError):
                raise
            # No JSON: the compiler of the grammar says where it is broken.
    return schema


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value of a level goes, and how it is reached: by a key of an object, or as the next item of an array."""

    container: Any
    key: str | None
    item: object
    parent: _Place | None = None

    def put(self, copy: object) -> None:
        if self.key is None:
            self.container.append(copy)
        else:
            self.container[self.key] = copy

    def pointer(self) -> str:
        """As JSON pointers are, with * for any item of an array."""
        keys: list[str] = []
        place: _Place | None = self
        while place is not None and place.parent is not None:
            keys.append("*" if place.key is None else place.key[:100])
            place = place.parent
        return "/" + "/".join(reversed(keys))


def _plain_json(name: str, value: object) -> tuple[Any, bool]:
    """A copy of a JSON value, made level by level, so that one that holds itself ends at MAX_JSON_DEPTH; whether there are
    integers of more than 64 bits in it."""
    result: list[Any] = []
    has_wide_integers = False
    level = [_Place(result, None, value)]
    num_values = 0
    for _ in range(MAX_JSON_DEPTH):
        below: list[_Place] = []
        for place in level:
            try:
                copy, inner = _plain_json_item(name, place)
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"{exc} at {place.pointer()}"[:1000]) from None
            place.put(copy)
            below += inner
            has_wide_integers |= isinstance(copy, int) and not -(2**63) <= copy < 2**64
        num_values += len(level)
        require(num_values + len(below) <= MAX_JSON_VALUES, f"{name} has more than {MAX_JSON_VALUES} values")
        if not below:
            return result[0], has_wide_integers
        level = below
    raise InvalidRequestError(f"{name} is nested deeper than {MAX_JSON_DEPTH} levels")


def _plain_json_item(name: str, at: _Place) -> tuple[Any, list[_Place]]:
    """A value without what it holds, and what it holds, with the place for each."""
    item = at.item
    if item is None or isinstance(item, bool):
        return item, []
    if isinstance(item, Mapping):
        object_: dict[str, Any] = {}
        inner = []
        for key, value in mapping(name, item, most=MAX_JSON_VALUES).items():
            plain_key = values.text(key)
            if plain_key is None:
                raise InvalidRequestError(f"{name} must have strings as keys, got {shorten(key)}")
            check_unicode(f"{name} is not valid JSON: a key in it", plain_key)
            inner.append(_Place(object_, plain_key, value, at))
        return object_, inner
    if isinstance(item, str):
        check_unicode(f"{name} is not valid JSON: a text in it", item)
        return values.text(item), []
    if isinstance(item, (list, tuple)):
        array: list[Any] = []
        return array, [_Place(array, None, value, at) for value in item]
    if (plain_flag := values.flag(item)) is not None:
        return plain_flag, []
    plain: float | None = values.whole(item)
    if plain is None:
        plain = values.number(item)
    if plain is None or (isinstance(plain, int) and plain.bit_length() > MAX_JSON_INTEGER_BITS):
        limit = f"integers of at most {MAX_JSON_INTEGER_BITS} bits"
        raise InvalidRequestError(f"{name} is not valid JSON: it must hold JSON values, with {limit}, got {shorten(item)}")
    return plain, []
