"""Options that are stated once: a field of a settings dataclass says what it is called on the command line and what it means.

From that come the option, its help, its default, its choices, and the way of a value back into the field.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aioengine.errors import ConfigError

_KEY = "aioengine_bench.option"
_METAVARS = {int: "N", float: "X"}


@dataclass(frozen=True, slots=True)
class Option:
    """What the author of a field says; see `option`."""

    text: str
    flags: tuple[str, ...]
    metavar: str | None
    unset: str | None
    group: str | None
    convert: Callable[[Any], Any] | None
    keywords: Mapping[str, Any]


def option(
    default: Any,
    text: str,
    *flags: str,
    metavar: str | None = None,
    unset: str | None = None,
    group: str | None = None,
    convert: Callable[[Any], Any] | None = None,
    **keywords: Any,
) -> Any:
    """A field that is an option.

    text: the help. flags: what it is called, if not as the field. unset: what the default means, if its value does not say so;
    "": nothing is said. group: the title that it stands under. convert: what was read -> the field; raises ConfigError.
    keywords: of argparse, where the type does not say enough.
    """
    metadata = {_KEY: Option(text, flags, metavar, unset, group, convert, keywords)}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_options(
    parser: argparse.ArgumentParser,
    settings: type,
    *,
    group: str | None = None,
    texts: Mapping[str, str] | None = None,
    unset: Mapping[str, str] | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """Give `parser` the options of a settings dataclass that stand under `group`; None: under no title of their own.

    None of them is in the namespace with a value unless it was given. texts, unset: what is said otherwise here, by field.
    leave_out: fields that are no options here.
    """
    said, meant = texts or {}, unset or {}
    target: Any = parser if group is None else _group(parser, group)
    for field, one in _options(settings):
        if one.group == group and field.name not in leave_out:
            flags = one.flags or ("--" + field.name.replace("_", "-"),)
            text, default = said.get(field.name, one.text), meant.get(field.name, one.unset)
            target.add_argument(*flags, help=_help(text, field.default, default), default=None, **_keywords(settings, field, one))


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """What the command line says, by field. A field that is not in it keeps its default. Raises ConfigError."""
    values: dict[str, Any] = {}
    for field, one in _options(settings):
        value = getattr(args, _destination(field, one), None)
        if value is not None:
            value = tuple(value) if isinstance(value, list) else value
            values[field.name] = value if one.convert is None else one.convert(value)
    return values


def refuse_unused(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise ConfigError if one of these options was given: no option does nothing in silence."""
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: "1,2,4" -> [1, 2, 4]."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(item) for item in text.split(",") if item.strip()]
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4") from exc

    return parse


def _options(settings: type) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    for field in dataclasses.fields(settings):
        if _KEY in field.metadata:
            yield field, field.metadata[_KEY]


def _group(parser: argparse.ArgumentParser, title: str) -> Any:
    """The group of that title: two dataclasses may have options in it."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def _destination(field: dataclasses.Field[Any], one: Option) -> str:
    return (one.flags[0].lstrip("-") if one.flags else field.name).replace("-", "_")


def _help(text: str, default: Any, unset: str | None) -> str:
    if unset is None:
        if default is None or default is False or default is dataclasses.MISSING:
            return text
        values = default if isinstance(default, tuple) else (default,)
        unset = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text} (default: {unset})" if unset else text


def _keywords(settings: type, field: dataclasses.Field[Any], one: Option) -> dict[str, Any]:
    """The argparse keywords for a field of this type."""
    keywords = dict(one.keywords)
    if one.metavar is not None:
        keywords["metavar"] = one.metavar
    # Of this field alone: others may be of types that are imported for type checkers only.
    hint: Any = eval(str(field.type), vars(sys.modules[settings.__module__]))
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    (kind,) = (kind for kind in kinds if kind is not type(None))
    if "action" in keywords or "nargs" in keywords or "type" in keywords:
        return keywords
    if typing.get_origin(kind) is Literal:
        return {"choices": typing.get_args(kind), **keywords}
    if kind is bool:
        return {"action": "store_true", **keywords}
    if typing.get_origin(kind) is Sequence:
        (item,) = typing.get_args(kind)
        return {"type": numbers(item), "metavar": f"{_METAVARS[item]},...", **keywords}
    if kind in _METAVARS:
        return {"type": kind, "metavar": _METAVARS[kind], **keywords}
    return keywords
