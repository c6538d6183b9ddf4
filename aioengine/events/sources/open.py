"""A source by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aioengine.events.recording.cursor import Foldable
from aioengine.events.sources.base import ConnectionFailed, StepSource
from aioengine.events.sources.file import FileSource
from aioengine.events.sources.socket import SocketSource


def open_source(
    target: str | Path,
    *,
    make_state: Callable[[], Foldable],
    token: str | None = None,
    reconnect: bool = True,
    whole_history: bool = False,
) -> StepSource:
    """A source by its name: a socket's path, "tcp:HOST:PORT", or a recording's path.

    make_state: builds the state that the cursor in a recording keeps, to go back to (`DashboardState`). whole_history: in a
    recording, fold all that was before, also for a far seek (see `RecordingCursor`).
    Raises ConfigError for an impossible address; opening the source raises ConnectionFailed or WireError.
    """
    if isinstance(target, str) and target.startswith(("tcp:", "unix:")):
        return SocketSource(target, token=token, reconnect=reconnect)
    path = Path(target)
    if path.is_socket():
        return SocketSource(str(path), token=token, reconnect=reconnect)
    if path.is_file():
        return FileSource(path, make_state=make_state, whole_history=whole_history)
    if not path.exists() and path.suffix in (".sock", ".socket"):
        raise ConnectionFailed(f"no engine publishes at {path}: there is no such socket")
    raise ConnectionFailed(f"{path} is neither a socket nor a recording" if path.exists() else f"there is no {path}")
