"""Files that a user names: written as a whole or through to what the name stands for, and checked before the work begins."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from aioengine.errors import ConfigError

# Names under these folders stand for something that is open or attached: to replace them would cut it off.
_SPECIAL_FOLDERS = ("/dev/", "/proc/")


def check_writable(path: Path) -> None:
    """Raise ConfigError if `path` cannot be written: better now than after an hour of measuring. Its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode: int | None = os.stat(path).st_mode  # unlike `Path.exists` it says what is wrong with a name
        except FileNotFoundError:
            mode = None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot write {path}: {_reason(exc)}") from exc
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"cannot write {path}: it is a folder")
    if not os.access(path.parent if mode is None else path, os.W_OK):
        raise ConfigError(f"cannot write {path}: {'its folder' if mode is None else 'the file'} is not writable")


def write_file(path: Path, content: bytes) -> None:
    """Write `content`: a regular file is replaced as a whole, a link is followed, a device or a pipe is written through.

    If that fails, the content goes to a file of its own among the temporary ones, and the ConfigError says where.
    """
    _written(path, content, lambda: _write(path, content))


def append_line(path: Path, line: bytes) -> None:
    """Add a line, after the newline that the last one may lack. Fails as `write_file` does."""
    _written(path, line, lambda: _append(path, line))


def unused(path: Path) -> Path:
    """`path`, or the first of `stem-2`, `stem-3`, ... that nobody has; the file is made, so that nobody else gets it."""
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            candidate.parent.mkdir(parents=True, exist_ok=True)
            candidate.open("xb").close()
        except FileExistsError:
            number += 1
        except (OSError, ValueError) as exc:
            raise ConfigError(f"cannot write {candidate}: {_reason(exc)}") from exc
        else:
            return candidate


def _written(path: Path, content: bytes, write: Callable[[], None]) -> None:
    try:
        write()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot write {path}: {_reason(exc)}; {_rescue(content)}") from exc


def _rescue(content: bytes) -> str:
    """A finished measurement is not thrown away because its file cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(prefix="aioengine-result-", suffix=".json", delete=False) as file:
            file.write(content)
    except OSError as exc:
        return f"nor could it be kept among the temporary files: {_reason(exc)}"
    return f"what was to be written is in {file.name}"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_special(path):
        with path.open("ab") as file:  # appended: to open `/dev/stdout` for writing would empty the file that stdout goes to
            file.write(content)
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".aioengine-{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
    except PermissionError:  # a file that may be written, in a folder that may not
        target.write_bytes(content)
        return
    try:
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _append(path: Path, line: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _is_special(path) and path.exists() and path.stat().st_size and not _ends_with_newline(path):
        line = b"\n" + line
    with path.open("ab") as file:
        file.write(line)


def _is_special(path: Path) -> bool:
    return str(path.absolute()).startswith(_SPECIAL_FOLDERS) or (path.exists() and not path.is_file())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _reason(exc: Exception) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
