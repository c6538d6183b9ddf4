"""A long run under random load; see `aioengine_bench.random_load`.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 30 --model smollm2

The time is divided among several ways to run an engine (overlapped or not, by priority, with draft tokens, in chunks), each with a
small KV cache and the scheduler's books checked after every call. Without --model there is none: `FakeExecutor` checks the
worker's side of the contract and what is in each KV slot. Exit status 0: no violation and flat memory; 1: not so.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from aioengine.engine.async_engine import AsyncEngine  # noqa: E402
from aioengine.testing import FakeExecutor, FakeTokenizer  # noqa: E402
from aioengine_bench.random_load import Soak, SoakOptions, SoakReport  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "overlap, priority": {"scheduling_policy": "priority"},
    "overlap, chunks": {"max_num_batched_tokens": 16},
    "one step at a time": {"async_scheduling": False, "scheduling_policy": "priority"},
    "no prefix cache": {"enable_prefix_caching": False},
    "draft tokens": {"num_speculative_tokens": 3},
}
# Growth from the first to the last third of a way's rounds that is still flat.
MAX_TRACED_GROWTH = 1 << 20
MAX_RSS_GROWTH = 32 << 20


def make_engine(model: str | None, way: dict[str, Any], *, seed: int) -> tuple[AsyncEngine, FakeExecutor | None]:
    options: dict[str, Any] = {
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        "max_model_len": 300,
        "check_invariants": True,
        "max_num_queued_reqs": 40,
        "step_timeout_s": 60,
        "seed": seed,
        **way,
    }
    if model is not None:
        return AsyncEngine(model, num_kv_cache_blocks=40, **options), None
    executor = FakeExecutor(num_blocks=120, block_size=4, max_num_seqs=12)
    return AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), block_size=4, **options), executor


async def run_way(name: str, way: dict[str, Any], args: argparse.Namespace) -> SoakReport:
    engine, executor = make_engine(args.model, way, seed=args.seed)

    def on_round(report: SoakReport) -> None:
        if executor is not None:
            executor.outputs.clear()  # it keeps every step, for tests
        memory = f", {report.memory[-1].rss_bytes >> 20} MiB resident" if report.memory else ""
        print(f"  round {report.num_rounds}: step {report.num_steps}, {report.num_preemptions} preemptions{memory}", flush=True)

    print(f"{name}:", flush=True)
    async with engine:
        options = SoakOptions(duration_s=args.minutes * 60 / len(WAYS), seed=args.seed)
        return await Soak(engine, options, on_round=on_round).run()


def verdict(report: SoakReport) -> list[str]:
    """What is wrong, in words."""
    traced, rss = report.growth()
    wrong = list(report.violations)
    if traced > MAX_TRACED_GROWTH:
        wrong.append(f"Python objects grew by {traced / 2**20:.1f} MiB, more than {MAX_TRACED_GROWTH >> 20}")
    if rss > MAX_RSS_GROWTH:
        wrong.append(f"resident memory grew by {rss / 2**20:.1f} MiB, more than {MAX_RSS_GROWTH >> 20}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="in all (default: 30)")
    parser.add_argument("--model", help="a model's name or folder (default: none, FakeExecutor)")
    parser.add_argument("--seed", type=int, default=0, help="of the load")
    args = parser.parse_args()
    tracemalloc.start()
    failed = False
    for name, way in WAYS.items():
        report = asyncio.run(run_way(name, way, args))
        traced, rss = report.growth()
        endings = ", ".join(f"{count} {ending}" for ending, count in report.endings.most_common())
        print(f"  {report.num_steps} steps, {report.num_preemptions} preemptions, {report.num_probes} probes; {endings}")
        print(f"  memory: {traced / 1024:+.0f} KiB in Python objects, {rss / 1024:+.0f} KiB resident")
        for problem in verdict(report):
            failed = True
            print(f"  WRONG: {problem}")
    print("failed" if failed else "no violation, memory is flat")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
