"""What a JSON schema may say here: where the compiler of schemas would take something else, it is refused or made exact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from aioengine.errors import InvalidRequestError

_MAX_DIGITS = 15
_MAX_EXPONENT = 22
"""llguidance reads a number by one multiplication of doubles, which is exact up to here; beyond, it reads a neighbour."""

_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum")
_COMMENTS = ("default", "examples", "title", "description", "$comment")

JSON_ESCAPES = 'nrbtf\\"'
_CONTROL = re.compile(r"\\u00(?:[01]|7f)|\\[xc]")  # in the text of a schema, where a pattern has more backslashes

# What may be a class of all control characters without the quote or the backslash (see `sound_pattern`): Unicode classes outside
# of a negated class, NUL in a class that is not negated, and operations on classes.
_UNICODE_CLASS = re.compile(r"\\P|\\p\{?\^?(?![LNZ])")
_NUL = re.compile(r"\\x00|\\x\{0*\}|\\u0000|\\u\{0*\}|\\0|\x00")
_OPERATION = re.compile(r"&&|--|~~|\[\^?")


def check_numbers(schema: Any) -> None:
    """Raise InvalidRequestError for a number that would be rounded: an output that "matches" would match something else."""
    for path, value in _numbers(schema):
        _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
        is_whole = isinstance(value, int) and abs(value) <= 2**53
        if not is_whole and not (len(digits) <= _MAX_DIGITS and isinstance(exponent, int) and abs(exponent) <= _MAX_EXPONENT):
            raise InvalidRequestError(
                f"structured_outputs.json has {str(value)[:40]} at {path or '/'}, which cannot be compared exactly: integers up to "
                f"{2**53} in size and decimal numbers of up to {_MAX_DIGITS} digits are taken"
            )


def json_escapes(schema: Any) -> str:
    r"""The escapes that a string may have: \u only for a schema that has control characters itself.

    With \u the compiler takes {"\u0061": ...} for an additional property where "a" is one of the properties.
    """
    return JSON_ESCAPES + ("u" if _CONTROL.search(json.dumps(schema)) else "")


def with_sound_patterns(schema: Any) -> Any:
    """The schema with each `pattern` as `sound_pattern` has it; what the compiler does not read as a pattern is left alone.

    Raises InvalidRequestError for a pattern that cannot be had so, and for `minProperties` where names may come twice.
    """
    made = _copy_of(schema)
    stack = [made]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            _check_min_properties(value)
            if isinstance(pattern := value.get("pattern"), str):
                value["pattern"] = sound_pattern(pattern)
            named = value.get("patternProperties")
            if isinstance(named, dict):
                value["patternProperties"] = {sound_pattern(name): below for name, below in named.items()}
            for key, below in value.items():
                if key in _NAMED_SCHEMAS and isinstance(below, dict):
                    stack += below.values()
                elif key not in _VALUES and key not in _COMMENTS:
                    stack.append(below)
    return made


def _check_min_properties(schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(num_required, 1):
        raise InvalidRequestError(
            f"structured_outputs.json has minProperties {least} and {num_required} required properties: a name that comes twice would "
            "be counted twice; name as many properties in `required`"
        )


def sound_pattern(pattern: str) -> str:
    r"""A regular expression that means the same inside a JSON string, but for NUL, which its negated classes do not match.

    The compiler writes a class of all control characters as "any escape", which includes \" and \\ though the class may not
    (found in llguidance 1.9.1). Without NUL a class is written out. Raises InvalidRequestError for classes that this does not
    reach.
    """
    parts: list[str] = []
    place = 0
    is_class = is_negated = False
    while place < len(pattern):
        char = pattern[place]
        doubtful = _find_doubtful(pattern, place, is_class=is_class, is_negated=is_negated)
        if doubtful is not None:
            raise InvalidRequestError(
                f"structured_outputs.json has the pattern {pattern[:200]!r} with {doubtful!r} at {place}: it might match other characters "
                "than it says, because of how control characters are escaped; write plain ranges without NUL"
            )
        if char == "\\":
            parts.append(pattern[place : place + 2])
            place += 2
            continue
        place += 1
        if char == "[" and not is_class:
            is_class, is_negated = True, pattern.startswith("^", place)
            if is_negated:
                char, place = "[^\\x00", place + 1
            if pattern[place : place + 1] in ("]", "-"):  # a character here, not the end or a range
                char, place = f"{char}\\{pattern[place]}", place + 1
        elif char == "]":
            is_class = is_negated = False
        parts.append(char)
    return "".join(parts)


def _find_doubtful(pattern: str, place: int, *, is_class: bool, is_negated: bool) -> str | None:
    found = None
    if not is_negated:
        found = _UNICODE_CLASS.match(pattern, place)
    if is_class:
        found = found or _OPERATION.match(pattern, place) or (None if is_negated else _NUL.match(pattern, place))
    return found.group() if found else None


def _numbers(schema: Any) -> Iterator[tuple[str, int | float]]:
    """Every number that decides what matches, with its path."""
    stack: list[tuple[str, Any, bool]] = [("", schema, False)]
    while stack:
        path, value, is_named = stack.pop()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path, value
        elif isinstance(value, list):
            stack += [(f"{path}/{index}", item, False) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            below = [(key, item) for key, item in value.items() if is_named or key not in _COMMENTS]
            stack += [(f"{path}/{key}", item, not is_named and key in _NAMED_SCHEMAS) for key, item in below]


def _copy_of(value: Any) -> Any:
    """Without recursion: a schema may be nested deeper than Python's stack."""
    top: list[Any] = [value]
    stack: list[Any] = [top]
    while stack:
        holder = stack.pop()
        for key, item in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(item, (dict, list)):
                holder[key] = dict(item) if isinstance(item, dict) else list(item)
                stack.append(holder[key])
    return top[0]
