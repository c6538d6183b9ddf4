"""Writes every event of an engine to a file, without ever making a step wait for the disk."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from aioengine.events.recording.locked_file import RecordingFile
from aioengine.events.step_event import Event
from aioengine.events.wire import WireHeader, encode, encode_header
from aioengine.printable import get_logger

logger = get_logger(__name__)

_WRITE_INTERVAL_S = 0.1  # at most this much is lost if the process is killed
_DEFAULT_MAX_BUFFERED_BYTES = 64 << 20  # over 6,000 steps of 256 requests


class StepRecorder:
    """An observer of the bus (`bus.add_observer(recorder)`) that appends each event to a file of JSON lines.

    An event is encoded where it is published, which costs a fixed 10-20 us for a step of 256 requests, and written by a
    thread of its own, ten times a second: a disk that stalls fills a bounded buffer instead of stopping the engine.
    Encoding in that thread too would cost the loop as much (the GIL is held either way) and double its worst stall,
    because the hand-over of the GIL comes on top. What does not fit into the buffer is dropped and counted.

    An event that cannot be encoded (`encode` takes any that an engine publishes) is left out and counted; the recording goes on.

    path: where to, or a `RecordingFile` that was opened before. Raises ConfigError if it cannot be recorded to. A later failure
    (disk full) is logged once, kept in `error`, and ends the recording; the engine runs on.
    """

    def __init__(
        self, path: str | Path | RecordingFile, header: WireHeader, *, max_buffered_bytes: int = _DEFAULT_MAX_BUFFERED_BYTES
    ) -> None:
        self._file = path if isinstance(path, RecordingFile) else RecordingFile(path)
        self.path = self._file.path
        self.header = header
        self.num_events = 0  # taken in, not counting those that are left out
        self.num_dropped = 0  # left out: the disk was too slow, or they could not be encoded
        self.error: OSError | None = None
        self._num_failed = 0
        self._max_buffered_bytes = max_buffered_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes_in = 0  # written by the publishing thread only
        self._num_bytes_out = 0  # written by the writer thread only
        self._closing = threading.Event()
        self._file.begin(encode_header(header))
        self._thread = threading.Thread(target=self._write_loop, name="aioengine-recorder", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take in one event. Called in the thread that publishes. Never raises."""
        if self._closing.is_set() or self.error is not None:
            return
        try:
            line = encode(event, include_prompts=self.header.include_prompts)
        except Exception:
            self._num_failed += 1
            self.num_dropped += 1
            if self._num_failed == 1:
                logger.exception("an event could not be encoded and is missing in %s; later ones are counted only", self.path)
            return
        if self._num_bytes_in + len(line) - self._num_bytes_out > self._max_buffered_bytes:
            self.num_dropped += 1
            return
        self._num_bytes_in += len(line)
        self._lines.append(line)
        self.num_events += 1

    def close(self) -> None:
        """Write what is buffered and close the file. Idempotent; never raises, see `error`."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        self._file.close()
        num_slow = self.num_dropped - self._num_failed
        if num_slow:
            logger.warning("%d events are missing in %s: the disk was too slow", num_slow, self.path)
        if self._num_failed:
            logger.warning("%d events are missing in %s: they could not be encoded", self._num_failed, self.path)

    def _write_loop(self) -> None:
        try:
            while not self._closing.wait(_WRITE_INTERVAL_S):
                self._write_pending()
            self._write_pending()  # what came between the last write and close()
        except OSError as exc:
            self.error = exc
            logger.error("the recording %s ends here: %s", self.path, exc)

    def _write_pending(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        pending = memoryview(b"".join(lines))
        size = len(pending)
        while pending:
            pending = pending[self._file.write(pending) :]
        self._num_bytes_out += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
