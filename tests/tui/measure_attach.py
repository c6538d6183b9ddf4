"""What a dashboard costs the engine that it watches: the same work with and without one attached, in turns.

    python -m tests.tui.measure_attach

The engine runs its step loop on an executor that waits instead of computing, so that all of the cost is the engine's own;
the dashboard is `aioengine top` in a terminal of its own. A pair is one run without it and one with it, in alternating order.
Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from aioengine import AsyncEngine, SamplingParams
from aioengine.testing import FakeExecutor
from tests.tui.measure_viewer import ViewerProcess

NUM_BLOCKS = 10_000
MAX_TOKENS = 100


async def one_run(engine: AsyncEngine, num_requests: int) -> tuple[float, float]:
    """(tokens a second, CPU seconds of this process a step)."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [[(index + place) % 250 for place in range(8)] for index in range(num_requests)]
    start, cpu_start, first_step = time.perf_counter(), time.process_time(), engine.snapshot().step_id
    await engine.generate_batch(prompts, params, progress=False)
    seconds, cpu_seconds, num_steps = time.perf_counter() - start, time.process_time() - cpu_start, engine.snapshot().step_id - first_step
    return num_requests * MAX_TOKENS / seconds, cpu_seconds / num_steps


async def watched_run(engine: AsyncEngine, address: Path, num_requests: int) -> tuple[float, float]:
    viewer = ViewerProcess(address, columns=80, lines=24, refresh=4.0)
    try:
        while not engine.bus.has_observers:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # its start-up takes a core of its own
        return await one_run(engine, num_requests)
    finally:
        await asyncio.to_thread(viewer.stop)
        while engine.bus.has_observers:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def measure(*, num_pairs: int, num_requests: int, forward_s: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The runs without and with a dashboard, pair by pair."""
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "engine.sock"
        engine = AsyncEngine(
            executor=FakeExecutor(num_blocks=NUM_BLOCKS + 1, forward_s=forward_s),
            max_num_seqs=num_requests,
            max_num_batched_tokens=8 * num_requests,
            max_model_len=1024,
            events=address,
        )
        async with engine:
            await one_run(engine, num_requests)
            plain, watched = [], []
            for index in range(num_pairs):
                if index % 2:
                    watched.append(await watched_run(engine, address, num_requests))
                plain.append(await one_run(engine, num_requests))
                if index % 2 == 0:
                    watched.append(await watched_run(engine, address, num_requests))
    return plain, watched


def describe(name: str, plain: Sequence[float], watched: Sequence[float], unit: str, scale: float) -> str:
    ratios = sorted(after / before for before, after in zip(plain, watched, strict=True))
    lowest, _, highest = statistics.quantiles(ratios, n=4)
    return (
        f"{name}: without {statistics.median(plain) * scale:.2f}, with {statistics.median(watched) * scale:.2f} {unit}; "
        f"median of the ratios {statistics.median(ratios):.4f} (quartiles {lowest:.4f} to {highest:.4f}, {len(ratios)} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="(default: 12)")
    parser.add_argument("--requests", type=int, default=64, help="running at once (default: 64)")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="what the executor waits a step (default: 20)")
    args = parser.parse_args()
    plain, watched = asyncio.run(measure(num_pairs=args.pairs, num_requests=args.requests, forward_s=args.forward_ms / 1000))
    print(describe("throughput", [run[0] for run in plain], [run[0] for run in watched], "tokens/s", 1.0))
    print(describe("engine's CPU", [run[1] for run in plain], [run[1] for run in watched], "ms a step", 1000.0))


if __name__ == "__main__":
    main()
