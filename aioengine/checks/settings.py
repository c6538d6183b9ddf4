"""Settings that are stated once: a field of a dataclass says what it is, what it takes, and what its default means.

From that statement come the check of a value, the docstring, and the option on the command line.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aioengine.checks.values import flag, shorten, surrogate_at, text, whole
from aioengine.errors import ConfigError

_KEY = "aioengine.setting"
_DOC_WIDTH = 124
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class Statement:
    """What the author of a field says; see `setting`."""

    text: str
    unset: str | None
    more: str
    least: int
    most: int
    may_be_empty: bool
    read: Callable[[str, Any], Any] | None


def setting(
    default: Any,
    text: str,
    *,
    unset: str | None = None,
    more: str = "",
    least: int = 0,
    most: int = INT32_MAX,
    may_be_empty: bool = False,
    read: Callable[[str, Any], Any] | None = None,
) -> Any:
    """A field of a frozen dataclass.

    text: what it is, in a line, for the command line and the docstring. more: what the docstring adds.
    unset: what the default means, if its value does not say so.
    least, most: of a whole number. may_be_empty: of a text.
    read: (name, value) -> the plain value, where the type does not say enough. Raises ConfigError.
    """
    return dataclasses.field(default=default, metadata={_KEY: Statement(text, unset, more, least, most, may_be_empty, read)})


@dataclass(frozen=True, slots=True)
class Setting:
    """A field with its statement, and what its type says."""

    name: str
    default: Any
    statement: Statement
    kinds: tuple[Any, ...]  # of the type, without None and without Literal
    choices: tuple[str, ...]  # what its Literal names; beside `kinds`, words that stand for a value
    is_optional: bool

    @property
    def summary(self) -> str:
        """What it is, and what holds if it is not given; for a line of help."""
        unset = self.statement.unset
        return f"{self.statement.text} (default: {self.default if unset is None else unset})"

    def read(self, value: Any) -> Any:
        """The plain value. Raises ConfigError naming the setting, the value and the limit."""
        if self.is_optional and value is None:
            return None
        if self.statement.read is not None:
            return self.statement.read(self.name, value)
        if self.choices and (not self.kinds or (isinstance(value, str) and value in self.choices)):
            return _one_of(self.name, value, self.choices)
        if bool in self.kinds:
            return _flag(self.name, value)
        if int in self.kinds:
            return _whole(self.name, value, least=self.statement.least, most=self.statement.most)
        return read_text(self.name, value, may_be_empty=self.statement.may_be_empty)


def settings_of(config_type: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in their order."""
    hints = typing.get_type_hints(config_type)
    return tuple(_setting(field, hints[field.name]) for field in dataclasses.fields(config_type))


def _setting(field: dataclasses.Field[Any], hint: Any) -> Setting:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    literals = [kind for kind in kinds if typing.get_origin(kind) is Literal]
    return Setting(
        name=field.name,
        default=field.default,
        statement=field.metadata[_KEY],
        kinds=tuple(kind for kind in kinds if kind is not type(None) and kind not in literals),
        choices=tuple(choice for literal in literals for choice in typing.get_args(literal)),
        is_optional=type(None) in kinds,
    )


def docstring(introduction: str, settings: tuple[Setting, ...]) -> str:
    """The docstring of the dataclass: a paragraph, and an entry for each setting."""
    entries = [f"{item.name}: {item.summary}.{' ' if item.statement.more else ''}{item.statement.more}" for item in settings]
    return "\n".join([introduction, "", *(textwrap.fill(entry, _DOC_WIDTH, subsequent_indent="    ") for entry in entries)])


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {shorten(value)}")
    return value


def _whole(name: str, value: object, *, least: int, most: int) -> int:
    plain = whole(value)
    if plain is None or plain < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shorten(value)}")
    if plain > most:
        raise ConfigError(f"{name} must be an integer <= {most}, got {shorten(value)}")
    return plain


def _flag(name: str, value: object) -> bool:
    plain = flag(value)
    if plain is None:
        raise ConfigError(f"{name} must be True or False, got {shorten(value)}")
    return plain


def read_text(name: str, value: object, *, may_be_empty: bool = False) -> str:
    """What is a name, or a path, or is hashed: with a UTF-8 form, as it is written into recordings too. Raises ConfigError."""
    plain = text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if plain is None or (not plain and not may_be_empty):
        raise ConfigError(f"{name} must be a non-empty string, got {shorten(value)}")
    if surrogate_at(plain) is not None or "\0" in plain:
        raise ConfigError(f"{name} must be valid Unicode without NUL, got {shorten(plain)}")
    return plain
