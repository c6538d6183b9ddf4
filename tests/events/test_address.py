"""What an engine can publish at, and what is refused at its start."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import ConfigError
from aioengine.events.address import bind, parse_address, socket_folder
from aioengine.events.server import EventServer
from aioengine.testing import FakeExecutor, FakeTokenizer


@pytest.mark.parametrize(
    "address", ["a\0b", "a\ud800", 7, "tcp:h:\u00b2", "tcp:h:70000", "tcp:127.0.0.1:65536", "tcp:\x1b[2J:x", "x" * 200, "unix:a\0b"]
)
async def test_what_is_no_address_is_a_config_error(address: Any) -> None:
    with pytest.raises(ConfigError):
        await AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer(), events=address, events_token="t").start()


def test_a_token_is_not_shown_and_must_be_text() -> None:
    assert "S3CRET" not in repr(PublishOptions(events="tcp:127.0.0.1:0", events_token="S3CRET"))
    with pytest.raises(ConfigError, match=r"token .* is not valid Unicode"):
        EventServer("tcp:127.0.0.1:0", token="\ud800")


def test_the_temporary_folder_of_a_socket_is_short_enough_whatever_tmpdir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, tmp_path / ("x" * 120)):
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with socket_folder() as name:
            bind(parse_address(f"{name}/events.sock")).close()
