"""What travels over an event socket beside the lines of a recording.

To the viewer: the header, a `Welcome`, a snapshot, then events; a `Gap` and another snapshot wherever events had to be
dropped; a `Reply` to each command. To the engine: a `Hello` first (over TCP it must hold the token), then commands, each
a line with an id of the viewer's choice. One JSON object a line in both directions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from aioengine.errors import AioEngineError
from aioengine.events.step_event import SCHEMA_VERSION, Event
from aioengine.events.stream import Gap
from aioengine.events.wire import WireError, WireHeader, decode, decode_header, dumps_anyhow

Action = Literal["pause", "resume", "step", "abort", "submit"]
ACTIONS: tuple[Action, ...] = ("pause", "resume", "step", "abort", "submit")

MAX_COMMAND_BYTES = 1 << 20
"""A longer line from a viewer ends its connection."""


class ControlError(AioEngineError):
    """A command was refused or failed; the message says why."""


class ConnectionFailed(AioEngineError):
    """No engine answers at an address, or it does not let this viewer in; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What this viewer may do."""

    control: bool


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


class EngineControl(Protocol):
    """What a viewer may do to an engine, from wherever it watches. Each raises ControlError."""

    async def pause(self) -> None:
        """Schedule no further step until `resume()`."""

    async def resume(self) -> None: ...

    async def step(self) -> int | None:
        """Run one step of a paused engine; its id, or None if there was nothing to run."""

    async def abort(self, request_id: str) -> bool:
        """End a request, named as the events name it; False if it is not live."""

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0) -> str:
        """Start a request whose output only the events show; returns its id."""


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
    for tag, read in ((b'{"type":"gap"', Gap), (b'{"type":"welcome"', Welcome), (b'{"type":"reply"', Reply)):
        if line.startswith(tag):
            return read(**_fields(line, read))
    return decode_header(line) if line.startswith(b'{"type":"header"') else decode(line, schema_version=schema_version)


def decode_client_line(line: bytes) -> ClientLine:
    """A line that a viewer sent, checked field by field: it may be anything. Raises WireError."""
    if b'"hello"' in line[:32]:
        hello = Hello(**_fields(line, Hello))
        if not (hello.token is None or isinstance(hello.token, str)):
            raise WireError("the token is no string")
        return hello
    command = Command(**_fields(line, Command))
    if not isinstance(command.id, int) or isinstance(command.id, bool):
        raise WireError(f"the id of a command must be an integer, got {command.id!r}")
    if command.action not in ACTIONS:
        raise WireError(f"unknown command {command.action!r}; known: {', '.join(ACTIONS)}")
    if not isinstance(command.arguments, dict):
        raise WireError("the arguments of a command must be an object")
    return command


def _fields(line: bytes, cls: type[Any]) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        raise WireError(f"not JSON: {exc}") from exc
    if not isinstance(fields, dict) or fields.pop("type", None) != _TAGS[cls]:
        raise WireError(f"not a {_TAGS[cls]} message")
    names = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(fields.keys() - names)
    missing = sorted({f.name for f in dataclasses.fields(cls) if _is_required(f)} - fields.keys())
    if unknown or missing:
        raise WireError(f"a {_TAGS[cls]} message with unknown {unknown} or without {missing}")
    return fields


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
