"""How engines of one user are found without an address: each that publishes leaves a note in a folder of that user's.

The folder is `$AIOENGINE_RUNTIME_DIR`, else `aioengine` in `$XDG_RUNTIME_DIR`, else `aioengine-UID` in the folder for temporary
files. It is only used if it belongs to this user and nobody else can enter it: a note names a socket, and whoever could write
notes could lead a viewer to another's engine. A note is locked while its engine lives; one that nobody holds is removed by
whoever finds it. Tokens are never in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from aioengine.errors import ConfigError
from aioengine.events.recording.locked_file import release
from aioengine.events.wire import WireHeader
from aioengine.printable import get_logger, printable

try:
    import fcntl
except ImportError:  # Windows, which has no Unix sockets of this kind either
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

AUTO = "auto"
"""As an address to publish at: a socket in the folder."""

_MAX_NOTE_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """What a note says."""

    address: str  # a socket's path, or tcp:HOST:PORT
    pid: int
    model: str
    engine_version: str
    unix_time: float  # when it began to publish


def runtime_folder() -> Path:
    """Where the notes are. It need not exist."""
    if chosen := os.environ.get("AIOENGINE_RUNTIME_DIR"):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "aioengine"
    return Path(tempfile.gettempdir()) / f"aioengine-{os.getuid()}"


def make_folder() -> Path:
    """The folder, made if it is not there (0700). Raises ConfigError if it is not this user's alone."""
    folder = runtime_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make the folder {folder}, where engines are found: {exc.strerror or exc}") from exc
    if (why := _what_is_wrong_with(folder)) is not None:
        raise ConfigError(f"the folder {folder}, where engines are found, {why}")
    return folder


def auto_address() -> Path:
    """A socket's path in the folder that no other engine has. Raises ConfigError."""
    folder, pid = make_folder(), os.getpid()
    names = (f"{pid}{suffix}.sock" for suffix in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(path for name in names if not (path := folder / name).exists())


def _what_is_wrong_with(folder: Path) -> str | None:
    try:
        status = folder.lstat()
    except OSError as exc:
        return f"cannot be looked at: {exc.strerror or exc}"
    if not stat.S_ISDIR(status.st_mode):
        return "is no folder"
    if status.st_uid != os.getuid():
        return f"belongs to another user ({status.st_uid})"
    if status.st_mode & 0o077:
        return f"can be entered by other users (mode {stat.S_IMODE(status.st_mode):o}, 700 is wanted)"
    return None


class Announcement:
    """The note of one engine, from `__init__` until `withdraw()`. Raises ConfigError or OSError if it cannot be left."""

    def __init__(self, address: str, header: WireHeader) -> None:
        folder = make_folder()
        note = LiveEngine(address, os.getpid(), header.model, header.engine_version, header.unix_time)
        self._fd, name = tempfile.mkstemp(prefix=f".{note.pid}-", dir=folder)  # 0600
        self.path = Path(name)
        try:
            if fcntl is not None:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.write(self._fd, json.dumps(asdict(note)).encode())
            # Under its own name only when it is whole and locked: a reader takes what it can lock for abandoned.
            self.path = self.path.rename(folder / (self.path.name[1:] + ".json"))
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        release(self._fd)
        self._fd = -1


def announce(address: str, header: WireHeader) -> Announcement | None:
    """Leave a note; None, and a line in the log, where that cannot be: an engine that is not found is still at its address."""
    try:
        return Announcement(address, header)
    except (ConfigError, OSError) as exc:
        logger.info("this engine is not in the list of `aioengine top`: %s", exc)
        return None


def find_engines() -> list[LiveEngine]:
    """The engines of this user that publish now, the oldest first. Notes of dead ones, and their sockets, are removed.

    Raises ConfigError if the folder is not this user's alone.
    """
    folder = runtime_folder()
    if not folder.exists():
        return []
    if (why := _what_is_wrong_with(folder)) is not None:
        raise ConfigError(f"the folder {folder}, where engines are found, {why}")
    found = [engine for path in sorted(folder.glob("*.json")) if (engine := _read_note(path)) is not None]
    return sorted(found, key=lambda engine: engine.unix_time)


def _read_note(path: Path) -> LiveEngine | None:
    """None for what is no note, or is one of a dead engine."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None  # it ended just now
    try:
        engine = _parse(os.read(fd, _MAX_NOTE_BYTES))
        if _is_abandoned(fd, engine):
            _remove(path, engine)
            return None
        return engine
    finally:
        os.close(fd)


def _parse(data: bytes) -> LiveEngine | None:
    try:
        note = json.loads(data)
        return LiveEngine(str(note["address"]), int(note["pid"]), str(note["model"]), str(note["engine_version"]), float(note["unix_time"]))
    except (ValueError, TypeError, KeyError):
        return None


def _is_abandoned(fd: int, engine: LiveEngine | None) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return engine is None or not _is_alive(engine.pid)  # a child of a dead engine may hold the lock
        return True  # closing the file gives it back
    return engine is None or not _is_alive(engine.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _remove(path: Path, engine: LiveEngine | None) -> None:
    logger.debug("removing what a dead engine left behind: %s", printable(str(path)))
    with contextlib.suppress(OSError):
        path.unlink()
    # Of sockets only those in this folder, which are nobody else's: at a path of the user's another engine may listen by now.
    if engine is not None and Path(engine.address).parent == path.parent and Path(engine.address).suffix == ".sock":
        with contextlib.suppress(OSError):
            Path(engine.address).unlink()
