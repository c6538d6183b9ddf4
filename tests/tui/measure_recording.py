"""How long a long recording takes to open and to go about in, and what the viewer's memory does meanwhile.

    python -m tests.tui.measure_recording --steps 100000 --running 64
    python -m tests.tui.measure_recording --steps 400000 --running 8 --memory

A made-up engine writes the recording first (64 running requests, 10 000 KV blocks, a snapshot every so many steps as the real one
does). Then: the file is looked through, the program is started on it in a terminal, and far jumps go to random places. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import os
import pty
import random
import sys
import tempfile
import time
from pathlib import Path

from aioengine.engine.loop.core_events import _STEP_WORK, SNAPSHOT_WORK
from aioengine.engine.loop.engine_snapshot import build_snapshot
from aioengine.events.recording.index import RecordingIndex
from aioengine.events.sources.file import FileSource
from aioengine.events.step_event import Event
from aioengine.events.wire import encode, encode_header
from aioengine_tui.model.state import DashboardState
from tests.tui.measure_viewer import HEADER, LargeEngine


def write_recording(path: Path, *, num_steps: int, num_running: int) -> None:
    engine = LargeEngine(num_requests=num_running)
    with path.open("wb") as file:
        file.write(encode_header(HEADER))
        interval = SNAPSHOT_WORK // (_STEP_WORK + num_running)
        for index in range(num_steps):
            if index and index % interval == 0:
                file.write(encode(_snapshot(engine)))
            file.writelines(encode(event) for event in engine.step())


def _snapshot(engine: LargeEngine) -> Event:
    snapshot = build_snapshot(engine.scheduler, in_flight=[], paused=False, text_source=None)
    return dataclasses.replace(snapshot, time=engine.now)


def measure_start(path: Path) -> float:
    """Seconds from the start of `aioengine top FILE` to the first picture of an event."""
    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(sys.executable, [sys.executable, "-m", "aioengine", "top", str(path)])
    seen = b""
    while b"step " not in seen and b"req-" not in seen:
        seen += os.read(terminal, 65536)
    took = time.perf_counter() - start
    os.write(terminal, b"q")
    with contextlib.suppress(OSError):  # the terminal closes with the program
        while os.read(terminal, 65536):
            pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return took


async def measure_jumps(path: Path, *, count: int) -> list[float]:
    """Seconds from a jump to the state that is to be shown, of jumps to random steps."""
    rng = random.Random(0)
    seconds: list[float] = []
    async with FileSource(path, make_state=DashboardState, playing=False) as source:
        await source.seek_fraction(1.0)
        last_step = source.length // 2
        for _ in range(count):
            step_id = rng.randint(1, last_step)
            start = time.perf_counter()
            await source.seek_step(step_id)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def measure_memory(*, num_steps: int, num_running: int) -> list[float]:
    """MB of this process at ten places of so many steps, each folded as it comes; the engine beside it forgets what has ended."""
    state, engine, sizes = DashboardState(), LargeEngine(num_requests=num_running), []
    state.apply(HEADER)
    for number in range(1, num_steps + 1):
        for event in engine.step():
            state.apply(event)
        if number % (num_steps // 10) == 0:
            engine.forget_ended()
            sizes.append(_resident_mb())
    return sizes


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--running", type=int, default=64, help="requests (default: 64)")
    parser.add_argument("--jumps", type=int, default=40)
    parser.add_argument("--file", type=Path, help="keep the recording here, and use it if it is there")
    parser.add_argument("--memory", action="store_true", help="no file: fold the steps as they come, and say how large the process is")
    args = parser.parse_args()
    if args.memory:
        print("MB:", " ".join(f"{size:.1f}" for size in measure_memory(num_steps=args.steps, num_running=args.running)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "long.jsonl"
        if not path.exists():
            write_recording(path, num_steps=args.steps, num_running=args.running)
        print(f"{path.stat().st_size / 1e6:.0f} MB")
        start = time.perf_counter()
        index = RecordingIndex(path)
        index.scan()
        print(f"looked through in {time.perf_counter() - start:.2f} s: {index.num_events} events")
        print(f"the first picture after {measure_start(path):.2f} s, of which starting Python and the program are most")
        gc.freeze()  # as the program does
        gc.set_threshold(50_000, 20, 20)
        seconds = asyncio.run(measure_jumps(path, count=args.jumps))
        print(f"a far jump: median {seconds[len(seconds) // 2] * 1e3:.0f} ms, longest {seconds[-1] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
