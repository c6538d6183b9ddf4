"""How much of a core the dashboard takes: a recording of a large engine, played at its own speed in a terminal of 80x24.

    python -m tests.tui.measure_viewer

256 running requests, 10 000 KV blocks, 50 steps a second (100 events). The time is that of the whole process, reading and
decoding the recording included. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import fcntl
import os
import pty
import random
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.loop.engine_snapshot import build_snapshot
from aioengine.events.bus import StepBus
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.server import EventServer
from aioengine.events.step_event import FinishedInfo, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.testing import make_request

NUM_REQUESTS = 256
NUM_BLOCKS = 10_000
STEP_S = 0.020
HEADER = WireHeader("0", "large", {}, 0.0, 0.0)
SCREENS = {"overview": b"1", "step": b"2", "batch": b"3", "KV blocks": b"4", "log": b"5", "waterfall": b"6"}


class LargeEngine:
    """A scheduler without a worker, on a clock of its own; 256 requests run, and each that ends is followed by another."""

    def __init__(self, *, num_requests: int = NUM_REQUESTS) -> None:
        self.num_requests = num_requests
        config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=2048, max_model_len=4096)
        self.scheduler = Scheduler(config, cache=CacheConfig(block_size=16), num_kv_cache_blocks=NUM_BLOCKS + 1)
        self.now = 0.0
        self._rng = random.Random(0)
        self._number = 0
        self._added: list[RequestInfo] = []
        self._num_output_tokens: dict[str, int] = {}

    def record(self, path: Path, *, num_steps: int) -> None:
        with StepRecorder(path, HEADER, max_buffered_bytes=1 << 30) as recorder:
            for _ in range(num_steps):
                for event in self.step():
                    recorder(event)

    async def publish(self, address: Path, published: asyncio.Event) -> None:
        """The same live, at a socket, until cancelled."""
        bus, server = StepBus(), EventServer(address)
        header = dataclasses.replace(HEADER, perf_counter=time.perf_counter(), unix_time=time.time())
        self.now = due = time.perf_counter()
        await server.start(
            bus=bus, header=header, snapshot=lambda: build_snapshot(self.scheduler, in_flight=[], paused=False, text_source=None)
        )
        published.set()
        try:
            while True:
                self.now = time.perf_counter()
                for event in self.step():
                    bus.publish(event)
                due += STEP_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
        finally:
            await server.close()

    def step(self) -> tuple[StepEvent, StepResultEvent]:
        while len(self.scheduler.requests) < self.num_requests + 8:
            self._add()
        output = self.scheduler.schedule()
        assert output is not None, "there is always work"
        return self._events(output)

    def forget_ended(self) -> None:
        """What is kept here of requests that are gone."""
        self._num_output_tokens = {name: count for name, count in self._num_output_tokens.items() if name in self.scheduler.requests}

    def _add(self) -> None:
        self._number += 1
        request = make_request(
            self._rng.randint(50, 400), request_id=f"req-{self._number}", max_tokens=self._rng.randint(100, 400), ignore_eos=True
        )
        self.scheduler.add_request(request)
        self._added.append(RequestInfo(request.request_id, request.num_prompt_tokens, request.sampling_params.max_tokens or 0, self.now))

    def _events(self, output: SchedulerOutput) -> tuple[StepEvent, StepResultEvent]:
        report, start, added = self.scheduler.take_report(), self.now, self._added
        self._added = []
        scheduled = StepEvent(
            output.step_id, start + 0.001, output, self.scheduler.make_stats(), report.admission_stop, 2048, report.block_changes,
            1, start, start + 0.001, added,
        )  # fmt: skip
        req_ids = list(output.num_scheduled_tokens)
        tokens = [[7] if self.scheduler.requests[req_id].num_output_placeholders else [] for req_id in req_ids]
        sampled = ModelRunnerOutput(req_ids, {req_id: index for index, req_id in enumerate(req_ids)}, tokens)
        outputs = self.scheduler.update_from_output(output, sampled)
        finished = []
        for one in outputs:
            count = self._num_output_tokens[one.request_id] = self._num_output_tokens.get(one.request_id, 0) + len(one.new_token_ids)
            if one.finish_reason is not None:
                finished.append(FinishedInfo(one.request_id, one.finish_reason, count))
        self.now = start + STEP_S
        return scheduled, StepResultEvent(
            output.step_id, self.now, {one.request_id: 1 for one in outputs if one.new_token_ids}, self.scheduler.make_stats(),
            self.scheduler.take_report().block_changes, 0, start + 0.001, start + 0.017, start + 0.017, start + 0.019, start + 0.019,
            self.now, finished,
        )  # fmt: skip


class ViewerProcess:
    """`aioengine top ADDRESS` in a terminal of its own, whose output is counted and dropped."""

    def __init__(self, address: Path, *, columns: int, lines: int, refresh: float) -> None:
        self.num_bytes = 0
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            os.execv(sys.executable, [sys.executable, "-m", "aioengine", "top", str(address), "--refresh", f"{refresh:g}"])
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        try:
            while chunk := os.read(self._terminal, 65536):
                self.num_bytes += len(chunk)
        except OSError:
            return  # the process ended

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.press(b"q")
        os.waitpid(self._pid, 0)
        self._reader.join(timeout=5)
        os.close(self._terminal)


def measure(address: Path, *, columns: int, lines: int, seconds: float, refresh: float) -> dict[str, tuple[float, float]]:
    """Screen -> (share of a core, bytes a second to the terminal)."""
    viewer = ViewerProcess(address, columns=columns, lines=lines, refresh=refresh)
    time.sleep(4.0)  # start-up, and the indexing of the recording
    results = {}
    for screen, key in SCREENS.items():
        viewer.press(key)
        time.sleep(0.5)
        start, cpu_before, bytes_before = time.perf_counter(), viewer.cpu_seconds(), viewer.num_bytes
        time.sleep(seconds)
        elapsed = time.perf_counter() - start
        results[screen] = ((viewer.cpu_seconds() - cpu_before) / elapsed, (viewer.num_bytes - bytes_before) / elapsed)
    viewer.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="a screen (default: 8)")
    parser.add_argument("--source", choices=("file", "socket"), default="file", help="a recording, or the same live (default: file)")
    parser.add_argument("--size", default="80x24", help="of the terminal (default: 80x24)")
    parser.add_argument("--refresh", type=float, default=4.0, help="pictures a second (default: 4)")
    args = parser.parse_args()
    columns, lines = (int(part) for part in args.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / ("large.jsonl" if args.source == "file" else "large.sock")
        if args.source == "file":
            LargeEngine().record(address, num_steps=int((args.seconds + 1) * (len(SCREENS) + 1) / STEP_S) + 400)
            results = measure(address, columns=columns, lines=lines, seconds=args.seconds, refresh=args.refresh)
        else:
            results = asyncio.run(_measure_live(address, columns=columns, lines=lines, seconds=args.seconds, refresh=args.refresh))
    for screen, (share, rate) in results.items():
        print(f"{screen:<10} {share:6.1%} of a core  {rate / 1e3:6.1f} kB/s to the terminal")


async def _measure_live(address: Path, **options: Any) -> dict[str, tuple[float, float]]:
    published = asyncio.Event()
    publishing = asyncio.create_task(LargeEngine().publish(address, published))
    try:
        await published.wait()
        return await asyncio.to_thread(measure, address, **options)
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)


if __name__ == "__main__":
    main()
