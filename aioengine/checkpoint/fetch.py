"""Downloads that survive interruption: resumed where they stopped, checked against a sha256, visible only when whole."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from tqdm import tqdm

from aioengine.errors import ModelError
from aioengine.printable import get_logger, printable

_logger = get_logger(__name__)
_CHUNK = 1 << 20
_TIMEOUT_S = 60.0
_ATTEMPTS = 4
DEFAULT_MAX_BYTES = 64 << 30


class DownloadError(ModelError):
    """The server could not be reached, or broke off again and again. What was received is kept for the next attempt."""


def progress_bar(total: int | None, *, initial: int = 0, label: str, enabled: bool) -> tqdm[NoReturn]:
    """A bar in bytes on stderr; silent unless asked for and stderr is a terminal."""
    silent = not (enabled and sys.stderr.isatty())
    return tqdm(
        total=total, initial=initial, desc=printable(label), unit="B", unit_scale=True, unit_divisor=1024, disable=silent, leave=False
    )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(
    url: str,
    target: Path,
    *,
    sha256: str,
    label: str,
    progress: bool = True,
    retry_wait_s: float = 1.0,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> None:
    """Fetch `url` to `target`, going on from `target`.part if there is one.

    A broken connection is tried again a few times, each time from where it stopped. Raises DownloadError if that does
    not help, and ModelError if the content is not what was expected or longer than `max_bytes`: then the partial file is
    removed.
    """
    part = target.with_name(target.name + ".part")
    for attempt in range(_ATTEMPTS):
        try:
            _receive(url, part, label=label, progress=progress, max_bytes=max_bytes)
            break
        except urllib.error.HTTPError as error:
            if error.code == 416 and part.exists():  # nothing left to send: the part is whole, or longer than the file
                break
            raise DownloadError(f"cannot download {label}: the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if attempt == _ATTEMPTS - 1:
                received = part.stat().st_size if part.exists() else 0
                raise DownloadError(f"cannot download {label}: {_reason(error)}; {received} bytes are kept for the next attempt") from error
            _logger.info("downloading %s was interrupted (%s); going on", label, _reason(error))
            time.sleep(retry_wait_s * 2**attempt)
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise ModelError(f"{label} has sha256 {found}, expected {sha256}: the file was changed or damaged on the way; it was removed")
    os.replace(part, target)


def _receive(url: str, part: Path, *, label: str, progress: bool, max_bytes: int) -> None:
    """One connection: append to `part` what it lacks. Raises OSError or HTTPException when the connection breaks."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_tls_context()) as response:
        resumed = response.status == 206
        if not resumed:
            have = 0  # the server sends all of it again
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isascii() and length.isdigit() and len(length) < 20 else None
        with part.open("ab" if resumed else "wb") as file, progress_bar(total, initial=have, label=label, enabled=progress) as bar:
            received = have + _copy(response, file, bar, max_bytes=max_bytes - have)
    if received > max_bytes:
        part.unlink()
        raise ModelError(f"{label} is longer than the {max_bytes} bytes that it may have; what was received was removed")
    if total is not None and received < total:
        raise http.client.IncompleteRead(b"", total - received)


def _copy(source: http.client.HTTPResponse, target: BinaryIO, bar: tqdm[NoReturn], *, max_bytes: int) -> int:
    """Stops behind `max_bytes`: a server may send for ever."""
    count = 0
    while count <= max_bytes and (chunk := source.read1(_CHUNK)):
        target.write(chunk)
        count += len(chunk)
        bar.update(len(chunk))
    return count


def _tls_context() -> ssl.SSLContext:
    """The system's certificates, and those that pip and requests are told to trust."""
    context = ssl.create_default_context()
    bundles = [os.environ.get(name) for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")]
    with contextlib.suppress(ImportError):  # some Pythons come without certificates of their own
        import certifi

        bundles.append(certifi.where())
    for bundle in bundles:
        if bundle and Path(bundle).is_file():
            context.load_verify_locations(bundle)
    return context


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error or type(error).__name__)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place if the block succeeds and goes away if it does not."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
