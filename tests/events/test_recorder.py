"""Recordings: complete after close(), readable after a crash, and never in the engine's way."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.errors import ConfigError
from aioengine.events.bus import StepBus
from aioengine.events.recording.locked_file import RecordingFile
from aioengine.events.recording.reader import read_recording
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireError, WireHeader, encode
from aioengine.testing import FakeExecutor, FakeTokenizer

STATS = SchedulerStats(0, 0, 0, 10, 10, 0, 0, 0, 0)


def event(step_id: int) -> EngineSnapshot:
    return EngineSnapshot(step_id=step_id, time=float(step_id), stats=STATS, requests=[], cached_block_ids=[1, 2])


@pytest.fixture
def header() -> WireHeader:
    return WireHeader.create("tiny", {"max_num_seqs": 4})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def record(path: Path, header: WireHeader, count: int) -> None:
    bus = StepBus()
    with StepRecorder(path, header) as recorder:
        bus.add_observer(recorder)
        for i in range(count):
            bus.publish(event(i))


def test_what_was_published_is_read_back(path: Path, header: WireHeader) -> None:
    record(path, header, 500)
    recording = read_recording(path)
    assert recording.header == header
    assert recording.events == [event(i) for i in range(500)]


def test_events_reach_the_file_without_close(path: Path, header: WireHeader) -> None:
    recorder = StepRecorder(path, header)
    recorder(event(1))
    deadline = time.monotonic() + 5
    while not read_recording(path).events:
        assert time.monotonic() < deadline, "nothing was written within 5 s"
        time.sleep(0.01)
    recorder.close()


def test_closing_twice_and_recording_after_it_are_harmless(path: Path, header: WireHeader) -> None:
    recorder = StepRecorder(path, header)
    recorder(event(1))
    recorder.close()
    recorder(event(2))
    recorder.close()
    assert read_recording(path).events == [event(1)]
    assert recorder.num_events == 1


def test_a_buffer_that_is_full_drops_and_counts(path: Path, header: WireHeader, caplog: pytest.LogCaptureFixture) -> None:
    recorder = StepRecorder(path, header, max_buffered_bytes=1)
    with caplog.at_level(logging.WARNING):
        recorder(event(1))
        recorder.close()
    assert (recorder.num_events, recorder.num_dropped) == (0, 1)
    assert "1 events are missing" in caplog.text


def test_what_was_written_makes_room_in_the_buffer(path: Path, header: WireHeader) -> None:
    """A long run fills the buffer many times over."""
    room = len(encode(event(1))) * 3 // 2
    with StepRecorder(path, header, max_buffered_bytes=room) as recorder:
        for number in range(1, 5):
            recorder(event(number))
            deadline = time.monotonic() + 5
            while len(read_recording(path).events) < number:
                assert time.monotonic() < deadline, f"event {number} was not written within 5 s"
                time.sleep(0.01)
    assert (recorder.num_events, recorder.num_dropped) == (4, 0)


def test_a_torn_last_line_is_ignored(path: Path, header: WireHeader) -> None:
    record(path, header, 3)
    path.write_bytes(path.read_bytes()[:-5])
    assert read_recording(path).events == [event(0), event(1)]


def test_a_corrupt_line_in_the_middle_is_named(path: Path, header: WireHeader) -> None:
    record(path, header, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:10] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(WireError, match=r"steps\.jsonl, line 3: not JSON"):
        read_recording(path)


@pytest.mark.parametrize("content", [b"", b'{"type": "head', b"hello\n"])
def test_a_file_that_is_no_recording_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(WireError, match=r"steps\.jsonl, line 1: "):
        read_recording(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(WireError, match=r"cannot read .*steps\.jsonl: No such file"):
        read_recording(path)


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, header: WireHeader) -> None:
    with pytest.raises(ConfigError, match=r"cannot record to .*no/such/folder: No such file"):
        StepRecorder(tmp_path / "no/such/folder", header)


def test_a_full_disk_is_named_at_once(path: Path, header: WireHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        StepRecorder(path, header)


def test_a_write_that_fails_later_is_logged_and_kept(path: Path, header: WireHeader, caplog: pytest.LogCaptureFixture) -> None:
    recorder = StepRecorder(path, header)
    full = OSError(errno.ENOSPC, "No space left on device")

    def write(data: object) -> int:
        raise full

    recorder._file.write = write  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        recorder(event(1))
        recorder.close()
    assert recorder.error is full
    assert "No space left" in caplog.text


# ---------------------------------------------------------------------------------------------------- one event that cannot be written
def test_an_event_that_cannot_be_encoded_is_left_out_and_the_recording_goes_on(
    path: Path, header: WireHeader, caplog: pytest.LogCaptureFixture
) -> None:
    bus = StepBus()
    recorder = StepRecorder(path, header)
    bus.add_observer(recorder)
    bus.publish(event(1))
    for _ in range(3):
        bus.publish(object())  # type: ignore[arg-type]
    bus.publish(event(2))
    assert bus.has_observers, "the recorder was removed"
    recorder.close()
    assert read_recording(path).events == [event(1), event(2)]
    assert (recorder.num_events, recorder.num_dropped) == (2, 3)
    assert caplog.text.count("could not be encoded and is missing") == 1, "said once, counted after that"
    assert "3 events are missing" in caplog.text


# ---------------------------------------------------------------------------------------------------- one engine a file
def make_engine(record: object) -> AsyncEngine:
    return AsyncEngine(executor=FakeExecutor(num_blocks=65), tokenizer=FakeTokenizer(), record=record, publish_text=True)  # type: ignore[arg-type]


async def test_a_second_engine_is_refused_the_recording_of_the_first_by_whatever_name(tmp_path: Path) -> None:
    path, other_name = tmp_path / "steps.jsonl", tmp_path / "again.jsonl"
    async with make_engine(path) as engine:
        os.link(path, other_name)
        for name in (path, str(path), tmp_path / "." / ".." / tmp_path.name / "steps.jsonl", other_name):
            with pytest.raises(ConfigError, match=r"cannot record to .*: another engine records there"):
                await make_engine(name).start()
        await engine.generate_batch(["abc"])
    assert len(read_recording(path).events) > 3
    async with make_engine(path):  # it has let go of it
        pass


def test_another_process_is_refused_too_and_a_child_does_not_keep_the_lock(path: Path, header: WireHeader) -> None:
    script = f"""
from aioengine.errors import ConfigError
from aioengine.events.recording.locked_file import RecordingFile
try:
    RecordingFile({str(path)!r}).close()
except ConfigError as exc:
    print(exc)
"""
    with StepRecorder(path, header) as recorder:
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
        assert said == f"cannot record to {path}: another engine records there\n"
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[recorder._file._fd])
    with child:
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
        assert said == ""
        child.kill()


def _folder(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    (path.parent / "target.jsonl").write_text("kept")
    path.symlink_to(path.parent / "target.jsonl")


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "target.jsonl")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(os.fspath(path))


def _read_only(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write to any file")
    path.touch(mode=0o400)


def _is_in_no_folder(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_folder, "it is a folder"),
        (_link, r"it is a symbolic link to .*target\.jsonl: name the file itself"),
        (_dangling_link, "it is a symbolic link"),
        (os.mkfifo, "it is a pipe"),
        (_socket, "it is a socket"),
        (_read_only, "Permission denied"),
        (_is_in_no_folder, "No such file or directory"),
    ],
)
def test_a_path_that_is_no_file_is_refused_at_the_start_and_left_as_it_was(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "here" / "steps.jsonl"
    path.parent.mkdir()
    make(path)
    before = [(p, p.lstat().st_mode) for p in sorted(tmp_path.rglob("*"))]
    engine = make_engine(path)
    with pytest.raises(ConfigError, match=rf"cannot record to .*{message}"):
        asyncio.run(asyncio.wait_for(engine.start(), 5))  # a pipe that nobody reads must not be waited for
    assert [(p, p.lstat().st_mode) for p in sorted(tmp_path.rglob("*"))] == before
    target = path.parent / "target.jsonl"
    assert not target.exists() or target.read_text() == "kept"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full", "/dev/tty"])
def test_a_device_is_refused(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    with pytest.raises(ConfigError, match=rf"cannot record to {path}: it is a device, no regular file"):
        RecordingFile(path)
    assert stat.S_ISCHR(os.stat(path).st_mode)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", "", 7, b"bytes", "x" * 5000, "no/such\x1b[2J/steps"])
async def test_what_is_no_path_is_a_config_error_of_one_printable_line(path: Any) -> None:
    with pytest.raises(ConfigError, match="cannot record to") as error:
        await make_engine(path).start()
    assert str(error.value).isprintable()


def test_an_engine_that_does_not_start_leaves_an_older_recording_alone(path: Path, header: WireHeader, tmp_path: Path) -> None:
    record(path, header, 3)
    before = path.read_bytes()
    (tmp_path / "taken.sock").write_text("no socket")
    for name in (path, tmp_path / "new.jsonl"):
        engine = AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer(), record=name, events=tmp_path / "taken.sock")
        with pytest.raises(ConfigError, match="no socket is there"):
            asyncio.run(engine.start())
    assert path.read_bytes() == before
    assert not (tmp_path / "new.jsonl").exists()
