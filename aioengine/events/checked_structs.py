"""msgspec structs that check what a line holds against the dataclasses that it stands for.

The structs are derived from the annotations: a field that is added to a dataclass with a default is read, and a line without
it is, with nothing to write here. msgspec would build the dataclasses themselves too, but it passes over fields that they do not
have; a struct refuses them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Build = Callable[[Any], Any]


class CheckedStructs:
    """The structs of some dataclasses, and the way back from them.

    own_fields: for a dataclass whose form on the wire differs, the types of the fields that do; None leaves a field out. Fields
    that the dataclass does not have come on top, at the end; they and those without a default may be absent (`msgspec.UNSET`).
    build: for such a dataclass, how to build it from the fields of its struct in order. What they hold has been built.
    plain: how to build a dataclass from an unchecked JSON object instead.
    """

    def __init__(
        self,
        *,
        own_fields: Mapping[type[Any], Mapping[str, Any]] = types.MappingProxyType({}),
        build: Mapping[type[Any], Callable[..., Any]] = types.MappingProxyType({}),
        plain: Mapping[type[Any], Callable[[dict[str, Any]], Any]] = types.MappingProxyType({}),
    ) -> None:
        self._own_fields = own_fields
        self._build = build
        self._plain = plain
        self._structs: dict[type[Any], type[msgspec.Struct]] = {}
        self._builds: dict[type[msgspec.Struct], Build] = {}

    def struct_of(self, cls: type[Any], *, tag: str | None = None) -> type[msgspec.Struct]:
        """The struct of a dataclass; its JSON object has that "type", if there is a tag."""
        struct = self._structs.get(cls)
        if struct is None:
            struct = self._structs[cls] = self._define(cls, tag)
            self._builds[struct] = self._plan(cls, struct)
        return struct

    def build(self, value: msgspec.Struct) -> Any:
        """The dataclass of a struct."""
        return self._builds[type(value)](value)

    # ------------------------------------------------------------------ the struct
    def _define(self, cls: type[Any], tag: str | None) -> type[msgspec.Struct]:
        hints = typing.get_type_hints(cls)
        own = dict(self._own_fields.get(cls, {}))
        fields: list[Any] = []
        for f in dataclasses.fields(cls):
            kind = own.pop(f.name) if f.name in own else self._wire_type(hints[f.name])
            if kind is None:
                continue
            if f.default is not dataclasses.MISSING:
                fields.append((f.name, kind, f.default))
            elif f.default_factory is not dataclasses.MISSING:
                fields.append((f.name, kind, msgspec.field(default_factory=f.default_factory)))
            else:
                fields.append((f.name, kind, msgspec.UNSET) if _may_be_unset(kind) else (f.name, kind))
        fields += [(name, kind, msgspec.UNSET) for name, kind in own.items()]
        tagging: dict[str, Any] = {} if tag is None else {"tag_field": "type", "tag": tag}
        return msgspec.defstruct(cls.__name__, fields, kw_only=True, forbid_unknown_fields=True, gc=False, **tagging)

    def _wire_type(self, hint: Any) -> Any:
        """What stands on the wire for an annotation."""
        if hint is float:
            return int | float  # a whole number stays what it was
        if hint in self._plain:
            return dict[str, Any]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.struct_of(hint)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is None or origin is typing.Literal:
            return hint
        inner = tuple(argument if argument is Ellipsis else self._wire_type(argument) for argument in arguments)
        if origin in (typing.Union, types.UnionType):
            return typing.Union[inner]  # noqa: UP007 - there is no other way to write a union of a tuple
        if origin is Sequence:
            return list[inner]  # type: ignore[valid-type]
        if origin is Mapping:
            return dict[inner]  # type: ignore[misc, valid-type]
        return origin[inner]

    # ------------------------------------------------------------------ the way back
    def _plan(self, cls: type[Any], struct: type[msgspec.Struct]) -> Build:
        hints = typing.get_type_hints(cls)
        names = struct.__struct_fields__
        nested = [
            (index, build) for index, name in enumerate(names) if name in hints and (build := self._build_of(hints[name])) is not None
        ]
        make = self._build.get(cls, cls)
        astuple = msgspec.structs.astuple
        if not nested:
            return lambda value: make(*astuple(value))

        def build_all(value: Any) -> Any:
            fields = list(astuple(value))
            for index, build in nested:
                fields[index] = build(fields[index])
            return make(*fields)

        return build_all

    def _build_of(self, hint: Any) -> Build | None:
        """How to build what a field holds; None: nothing is left to build."""
        if hint in self._plain:
            return self._plain[hint]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._builds[self.struct_of(hint)]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        inner = next(filter(None, map(self._build_of, arguments)), None)
        if inner is None:
            return None
        if origin in (typing.Union, types.UnionType):
            return lambda value: None if value is None else inner(value)
        assert origin is list, f"{hint}: dataclasses are read alone, in a list, or where there may be none"
        return lambda values: [inner(value) for value in values]


class StructReader:
    """Reads lines whose "type" says which of some dataclasses they are."""

    def __init__(self, types: Mapping[str, type[Any]], structs: CheckedStructs) -> None:
        union: Any = typing.Union[tuple(structs.struct_of(cls, tag=tag) for tag, cls in types.items())]  # noqa: UP007 - see above
        self._decoder = msgspec.json.Decoder(union)
        self._structs = structs

    def read(self, line: bytes | str) -> Any:
        """Raises ValueError (msgspec's, with the field) for a line that is none of them, and what building them raises."""
        return self._structs.build(self._decoder.decode(line))


def explain(exc: Exception) -> str:
    """What was wrong, with the field first where one is told."""
    if not isinstance(exc, msgspec.ValidationError):
        return f"{type(exc).__name__}: {exc}"
    text, _, place = str(exc).rpartition(" - at `$")
    return f"{place.lstrip('.').rstrip('`')}: {text}" if text else str(exc)


def dataclass_fields(cls: type[Any]) -> dict[str, type[Any]]:
    """The fields of a dataclass that hold another one (or None), and its type."""
    found: dict[str, type[Any]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[name] = kind
    return found


def _may_be_unset(kind: Any) -> bool:
    return msgspec.UnsetType in typing.get_args(kind)
