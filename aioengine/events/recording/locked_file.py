"""The file of a recording: a regular file that one engine at a time writes to."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from aioengine.errors import ConfigError
from aioengine.printable import get_logger, printable

try:
    import fcntl
except ImportError:  # Windows; there another opener is not noticed
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def release(fd: int) -> None:
    """Let go of the lock on a file, if there is one, and of the file."""
    if fcntl is not None:  # a child process may have inherited the file, and with it the lock
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class RecordingFile:
    """Opens the file and holds a lock on it until `close()`. What is in it stays until `begin()` writes the first line.

    So an engine finds out at its start that it cannot record, and one that does not start leaves an older recording alone.
    The lock is of the file, not of its name or of this process: it does not matter how another engine came to it.

    Raises ConfigError if something else than a regular file is there, if it cannot be written to, or if another engine
    records to it.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = Path(path)
            self._fd, self._is_new = self._open()
        except ConfigError:
            raise
        except (ValueError, TypeError) as exc:  # a NUL or half of a surrogate pair in the name; no name at all
            raise ConfigError(f"cannot record to {printable(repr(path))}: {exc}") from exc
        except OSError as exc:
            raise self._error(exc) from exc
        try:
            self._lock()
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self, first_line: bytes) -> None:
        """Empty the file and write `first_line`. Raises ConfigError, and then the file is closed."""
        try:
            os.ftruncate(self._fd, 0)
            self.write(first_line)
        except OSError as exc:
            self.close()
            raise self._error(exc) from exc
        self._is_new = False

    def write(self, data: bytes | memoryview) -> int:
        """Append; returns how many bytes were written, which may be fewer than asked. Raises OSError."""
        return os.write(self._fd, data)

    def close(self) -> None:
        """Let go of the lock and of the file; one that this made and that nothing was written to is removed. Idempotent."""
        if self._fd < 0:
            return
        if self._is_new:
            with contextlib.suppress(OSError):
                self.path.unlink()
        release(self._fd)
        self._fd = -1

    def _open(self) -> tuple[int, bool]:
        """A descriptor, and whether the file is new."""
        # Without O_NONBLOCK a pipe that nobody reads would be waited for; Windows knows none of these flags.
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with contextlib.suppress(FileExistsError):
            return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        self._check_kind(self.path.lstat().st_mode)
        fd = os.open(self.path, flags | os.O_CREAT, 0o666)
        try:
            self._check_kind(os.fstat(fd).st_mode)
        except BaseException:
            os.close(fd)
            raise
        return fd, False

    def _check_kind(self, mode: int) -> None:
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFREG:
            return
        hint = f" to {printable(str(self.path.readlink()))}: name the file itself" if kind == stat.S_IFLNK else ", no regular file"
        raise ConfigError(f"cannot record to {self._name}: it is {_KINDS.get(kind, 'something else')}{hint}")

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(f"cannot record to {self._name}: another engine records there") from None
            logger.warning("%s is on a file system without locks (%s): another engine that records there is not noticed", self.path, exc)

    @property
    def _name(self) -> str:
        return printable(str(self.path))

    def _error(self, exc: OSError) -> ConfigError:
        return ConfigError(f"cannot record to {self._name}: {exc.strerror or exc}")
