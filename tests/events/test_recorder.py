"""Recordings: complete after close(), readable after a crash, and never in the engine's way."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from aioengine.core.scheduler_output import SchedulerStats
from aioengine.errors import ConfigError
from aioengine.events.bus import StepBus
from aioengine.events.recorder import StepRecorder
from aioengine.events.replay import read_recording
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireError, WireHeader

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_at_once(header: WireHeader) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        StepRecorder("/dev/full", header)


def test_a_write_that_fails_later_is_logged_and_kept(path: Path, header: WireHeader, caplog: pytest.LogCaptureFixture) -> None:
    recorder = StepRecorder(path, header)
    full = OSError(28, "No space left on device")

    class FullDisk:
        def write(self, _: object) -> int:
            raise full

        def close(self) -> None:
            """Nothing to close."""

    recorder._file.close()
    recorder._file = FullDisk()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        recorder(event(1))
        recorder.close()
    assert recorder.error is full
    assert "No space left" in caplog.text
