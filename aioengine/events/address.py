"""Where an engine publishes: a Unix socket's path, or tcp:HOST:PORT."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aioengine.errors import ConfigError

_MAX_UNIX_PATH = 107  # bytes, of sockaddr_un on Linux (103 on macOS, whose bind() says so itself)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str | Path) -> Address:
    """ "/run/e.sock", "unix:/run/e.sock", "tcp:127.0.0.1:7000", "tcp:[::1]:7000". Raises ConfigError."""
    if isinstance(text, str) and text.startswith("tcp:"):
        host, _, port = text.removeprefix("tcp:").rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ConfigError(f"{text!r} is not tcp:HOST:PORT")
        return TcpAddress(host.strip("[]"), int(port))
    try:
        path = Path(text.removeprefix("unix:") if isinstance(text, str) else text)
        name = os.fsencode(path)
    except (TypeError, ValueError) as exc:  # no path at all; half of a surrogate pair in it
        raise ConfigError(f"{text!r} is neither a socket's path nor tcp:HOST:PORT: {exc}") from exc
    if b"\0" in name:
        raise ConfigError(f"the socket path {text!r} has a NUL in it")
    if len(name) > _MAX_UNIX_PATH:
        raise ConfigError(f"the socket path {path} has {len(name)} bytes, at most {_MAX_UNIX_PATH} are possible")
    return UnixAddress(path)


def socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder (0700) for a socket of a short name: in /tmp where `TMPDIR` is so long that no socket below could be named."""
    usual = os.fsencode(tempfile.gettempdir())
    is_short = len(usual) + len("/aioengine-xxxxxxxx/events.sock") <= _MAX_UNIX_PATH
    return tempfile.TemporaryDirectory(prefix="aioengine-", dir=None if is_short else "/tmp")


def bind(address: Address) -> socket.socket:
    """A listening socket that does not block. A Unix socket can be used by its owner alone (0600) from the first moment.

    A socket file that nobody listens on is replaced. Raises ConfigError if somebody does, if the path is another kind of
    file, or if the address cannot be bound.
    """
    try:
        if isinstance(address, TcpAddress):
            return _listen(socket.create_server((address.host, address.port), family=_family(address.host)))
        _remove_stale(address.path)
        return _listen(_bind_unix(address.path))
    except OSError as exc:
        raise ConfigError(f"cannot publish at {address}: {exc.strerror or exc}") from exc


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listen(server: socket.socket) -> socket.socket:
    server.listen(16)
    server.setblocking(False)
    return server


def _bind_unix(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux gives the file the mode of the socket, so there is no moment with a wider one; elsewhere chmod() follows.
        # (The umask would do it too, but it is the whole process's.)
        with contextlib.suppress(OSError):
            os.fchmod(server.fileno(), 0o600)
        server.bind(os.fspath(path))
        path.chmod(0o600)
    except BaseException:
        server.close()
        raise
    return server


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot publish at {path}: a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its queue of connections is full: somebody listens
    raise ConfigError(f"cannot publish at {path}: another engine listens there")


def remove_socket_file(path: Path, inode: int) -> None:
    """Remove a socket file, unless another process has put its own there in the meantime."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()
