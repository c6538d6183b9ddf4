"""What travels over an event socket beside the lines of a recording.

To the viewer: the header, a `Welcome`, a snapshot, then events; a `Gap` and another snapshot wherever events had to be
dropped; a `Reply` to each command. To the engine: a `Hello` first (over TCP it must hold the token), then commands, each
a line with an id of the viewer's choice. One JSON object a line in both directions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from aioengine.events.checked_structs import CheckedStructs, StructReader, explain
from aioengine.events.sources.base import Gap
from aioengine.events.step_event import SCHEMA_VERSION, Event
from aioengine.events.wire import WireError, WireHeader, decode, decode_header, dumps_anyhow

Action = Literal["pause", "resume", "step", "abort", "submit", "read"]

MAX_COMMAND_BYTES = 1 << 20
"""A longer line from a viewer ends its connection."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What this viewer may do."""

    control: bool
    can_read: bool = False  # it knows the command "read"


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants in."""

    token: str | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """Something that the engine shall do."""

    id: int
    action: Action
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a command: a result, or an error in words."""

    id: int
    result: Any = None
    error: str | None = None


# ---------------------------------------------------------------------------------------------------- lines
ServerLine = WireHeader | Event | Gap | Welcome | Reply
ClientLine = Hello | Command

_TAGS: dict[type[Any], str] = {Gap: "gap", Welcome: "welcome", Reply: "reply", Hello: "hello", Command: "command"}


def encode_line(message: Gap | Welcome | Reply | Hello | Command) -> bytes:
    """One line, newline included. What JSON has no form for is written in the nearest one."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return dumps_anyhow({"type": _TAGS[type(message)], **fields}) + b"\n"


def decode_server_line(line: bytes, *, schema_version: int = SCHEMA_VERSION) -> ServerLine:
    """A line that an engine sent, whose header had that version. Raises WireError."""
    if line.startswith(_SERVER_MESSAGES):
        return _read(_SERVER_LINES, line)  # type: ignore[no-any-return]
    return decode_header(line) if line.startswith(b'{"type":"header"') else decode(line, schema_version=schema_version)


def decode_client_line(line: bytes) -> ClientLine:
    """A line that a viewer sent, checked field by field: it may be anything. Raises WireError."""
    return _read(_CLIENT_LINES, line)  # type: ignore[no-any-return]


def _read(reader: StructReader, line: bytes) -> Any:
    try:
        return reader.read(line)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"not a message: {explain(exc)}") from exc


def _reader(*types: type[Any]) -> StructReader:
    return StructReader({_TAGS[cls]: cls for cls in types}, CheckedStructs())


_SERVER_MESSAGES = (b'{"type":"gap"', b'{"type":"welcome"', b'{"type":"reply"')
_SERVER_LINES = _reader(Gap, Welcome, Reply)
_CLIENT_LINES = _reader(Hello, Command)
