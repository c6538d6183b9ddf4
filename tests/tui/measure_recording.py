"""How long a long recording takes to open and to go about in, and what the viewer's memory does meanwhile.

    python -m tests.tui.measure_recording --steps 100000 --running 64

A made-up engine writes the recording first (64 running requests, 10 000 KV blocks, a snapshot every so many steps as the real one
does). Then: the file is looked through; far jumps to random places; every event is folded once, with the memory of the
process at ten places on the way. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

from aioengine.engine.loop.core_events import _STEP_WORK, SNAPSHOT_WORK
from aioengine.engine.loop.engine_snapshot import build_snapshot
from aioengine.events.recording.index import RecordingIndex
from aioengine.events.sources.file import FileSource
from aioengine.events.step_event import Event
from aioengine.events.wire import decode, encode, encode_header
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
    import dataclasses

    snapshot = build_snapshot(engine.scheduler, in_flight=[], paused=False, text_source=None)
    return dataclasses.replace(snapshot, time=engine.now)


async def measure_jumps(path: Path, *, count: int) -> list[float]:
    """Seconds from a jump to the state that is to be shown, of jumps to random steps."""
    rng = random.Random(0)
    seconds = []
    async with FileSource(path, make_state=DashboardState, playing=False) as source:
        await source.seek_fraction(1.0)
        last_step = source.length // 2
        for _ in range(count):
            step_id = rng.randint(1, last_step)
            start = time.perf_counter()
            await source.seek_step(step_id)
            seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def measure_memory(path: Path, *, num_events: int) -> list[float]:
    """MB of this process, at ten places of a whole playing."""
    state, sizes = DashboardState(), []
    with path.open("rb") as file:
        file.readline()
        state.apply(HEADER)
        for number, line in enumerate(file, start=1):
            state.apply(decode(line))
            if number % (num_events // 10) == 0:
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
    parser.add_argument("--memory", action="store_true", help="fold all of it too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "long.jsonl"
        if not path.exists():
            write_recording(path, num_steps=args.steps, num_running=args.running)
        print(f"{path.stat().st_size / 1e6:.0f} MB")
        start = time.perf_counter()
        index = RecordingIndex(path)
        index.scan()
        print(f"looked through in {time.perf_counter() - start:.2f} s: {index.num_events} events")
        seconds = asyncio.run(measure_jumps(path, count=args.jumps))
        print(f"a far jump: median {seconds[len(seconds) // 2] * 1e3:.0f} ms, longest {seconds[-1] * 1e3:.0f} ms")
        if args.memory:
            print("MB while playing:", " ".join(f"{size:.0f}" for size in measure_memory(path, num_events=index.num_events)))


if __name__ == "__main__":
    main()
