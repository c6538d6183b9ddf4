"""Engines are found without an address, and dead ones are not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine.errors import ConfigError
from aioengine.events.bus import StepBus
from aioengine.events.discovery import Announcement, announce, find_engines, make_folder
from aioengine.events.server import EventServer
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader

ROOT = Path(__file__).resolve().parents[2]
HEADER = WireHeader("0.1.0", "tiny", {}, 1000.0, 0.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run" / "aioengine"
    monkeypatch.setenv("AIOENGINE_RUNTIME_DIR", str(path))
    return path


def _no_snapshot() -> EngineSnapshot:
    raise AssertionError("nobody attaches")


async def test_a_server_is_found_from_start_to_close_whatever_its_address(folder: Path, tmp_path: Path) -> None:
    own = EventServer(tmp_path / "e.sock")
    auto = EventServer("auto")
    assert find_engines() == []
    await own.start(bus=StepBus(), header=HEADER, snapshot=_no_snapshot)
    await auto.start(bus=StepBus(), header=WireHeader("0.1.0", "other", {}, 2000.0, 0.0), snapshot=_no_snapshot)
    found = find_engines()
    assert [(engine.address, engine.model, engine.pid) for engine in found] == [
        (str(tmp_path / "e.sock"), "tiny", os.getpid()),
        (str(folder / f"{os.getpid()}.sock"), "other", os.getpid()),
    ]
    await own.close()
    assert [engine.model for engine in find_engines()] == ["other"]
    auto.abandon()
    assert find_engines() == []
    assert not os.listdir(folder)


def test_two_engines_of_a_process_have_two_sockets(folder: Path) -> None:
    first, second = EventServer("auto"), EventServer("auto")
    assert first.address != second.address
    first.abandon()
    second.abandon()


def test_nobody_else_can_look_into_the_folder_or_a_note(folder: Path) -> None:
    note = Announcement("/tmp/e.sock", HEADER)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(note.path.stat().st_mode) == 0o600
    note.withdraw()
    note.withdraw()


def test_a_folder_that_others_can_enter_is_neither_written_to_nor_believed(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="can be entered by other users"):
        find_engines()
    assert announce("/tmp/e.sock", HEADER) is None
    assert list(folder.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no folder"):
        make_folder()


def test_what_a_killed_engine_left_behind_is_removed(folder: Path) -> None:
    script = """
import time
from aioengine.events.discovery import Announcement, auto_address
from aioengine.events.address import bind, parse_address
from aioengine.events.wire import WireHeader
path = auto_address()
server = bind(parse_address(path))
note = Announcement(str(path), WireHeader("0.1.0", "victim", {}, 1.0, 0.0))
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert [engine.model for engine in find_engines()] == ["victim"]
    assert len(list(folder.iterdir())) == 2
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert find_engines() == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"address": 1}', '{"address": "a", "pid": "x", "model": "m"}'])
def test_a_damaged_note_is_no_engine(folder: Path, text: str) -> None:
    make_folder()
    (folder / "1.json").write_text(text)
    assert find_engines() == []


def test_a_socket_elsewhere_is_left_alone(folder: Path, tmp_path: Path) -> None:
    """At a path that the user chose another engine may listen by now."""
    make_folder()
    other = tmp_path / "mine.sock"
    other.touch()
    (folder / "7.json").write_text(f'{{"address": "{other}", "pid": 999999999, "model": "m", "engine_version": "0", "unix_time": 1}}')
    assert find_engines() == []
    assert other.exists()
