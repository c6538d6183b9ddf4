"""Reads a whole recording back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aioengine.events.step_event import Event
from aioengine.events.wire import WireError, WireHeader, decode, decode_header


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording in memory: what `read_recording` returns."""

    header: WireHeader
    events: list[Event]


def read_recording(path: str | Path) -> Recording:
    """Read a file that `StepRecorder` wrote.

    A last line without its newline is what a killed engine leaves behind; it is ignored. Raises WireError, with file and
    line number, for any other line that is no event, for a newer schema, and for a file that cannot be read.
    """
    path = Path(path)
    lines = _numbered_lines(path)
    number, first = next(lines, (1, b""))
    events: list[Event] = []
    try:
        header = decode_header(first)
        for number, line in lines:  # noqa: B007 - the number is for the message below
            events.append(decode(line, schema_version=header.schema_version))
    except WireError as exc:
        raise WireError(f"{path}, line {number}: {exc}") from exc
    return Recording(header, events)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The complete lines of the file, counted from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
    except OSError as exc:
        raise WireError(f"cannot read {path}: {exc.strerror}") from exc
