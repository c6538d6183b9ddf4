"""What telling the ranks of a model what to do costs a step, in bytes and in microseconds: python benchmarks/control_path.py

The real scheduler decides steps of N running requests, and the real executor sends them to ranks, which are processes of this
machine whose worker computes nothing. Compared with the same worker in a thread (uniproc). One step at a time: with two in flight
most of this is hidden behind the forward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from aioengine.checkpoint.files import ModelFiles
from aioengine.config import EngineConfig
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.executor.base import Executor
from aioengine.executor.multiproc import LocalRanks
from aioengine.executor.rank import run_rank
from aioengine.executor.rank_messages import dump
from aioengine.executor.ranks import RanksExecutor
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ResolvedConfig
from aioengine.testing.builders import make_model_info, make_request, make_scheduler
from aioengine_bench.null_executor import StepSampler

_NUM_WARMUP_STEPS = 20
_FILES = ModelFiles(name="none", folder=Path(), weights=(), format="safetensors")


class NullWorker:
    """Knows who samples, and nothing else."""

    def __init__(self) -> None:
        self._sampler = StepSampler()
        self._executed: deque[SchedulerOutput] = deque()

    def load_model(self) -> None:
        """There is none."""

    def determine_num_kv_cache_blocks(self) -> int:
        return 1 << 16

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._executed.append(scheduler_output)

    def sample_tokens(self, grammar_output: object = None) -> ModelRunnerOutput:
        return self._sampler(self._executed.popleft())

    def shutdown(self) -> None:
        """Holds nothing."""


def make_config(size: int) -> ResolvedConfig:
    config = EngineConfig(tensor_parallel_size=size, num_threads=1, distributed_executor_backend="multiproc")
    return config.resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 32)


def running_requests(num_reqs: int) -> Scheduler:
    scheduler = make_scheduler(
        num_kv_cache_blocks=num_reqs * 64 + 1,
        block_size=16,
        check_invariants=False,
        max_num_seqs=num_reqs,
        max_num_batched_tokens=num_reqs * 64,
        max_model_len=1024,
    )
    for _ in range(num_reqs):
        scheduler.add_request(make_request(48, max_tokens=900, ignore_eos=True))
    return scheduler


def measure(executor: Executor, num_reqs: int, num_steps: int) -> tuple[list[float], list[int], list[int]]:
    """Of each decode step: microseconds from the first call to the result; bytes to one rank; bytes back from rank 0."""
    scheduler = running_requests(num_reqs)
    executor.load_model().result()
    micros, sent, answered = [], [], []
    for step in range(num_steps + _NUM_WARMUP_STEPS):
        output = scheduler.schedule()
        assert output is not None
        start = time.perf_counter()
        executed, sampled = executor.execute_model(output), executor.sample_tokens()
        result = sampled.result()
        took = time.perf_counter() - start
        executed.result()
        scheduler.update_from_output(output, result)
        if step >= _NUM_WARMUP_STEPS:
            micros.append(took * 1e6)
            sent.append(len(dump((step, "execute_model", (output,)))) + len(dump((step, "sample_tokens", ()))))
            answered.append(len(dump((step, True, None))) + len(dump((step, True, result))))
    executor.shutdown()
    return micros, sent, answered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--num-steps", type=int, default=200)
    args = parser.parse_args()
    executors: dict[str, Callable[[], Executor]] = {"uniproc": partial(UniProcExecutor, make_config(1), worker_factory=NullWorker)}
    for size in args.sizes:
        launcher = LocalRanks(_FILES, program="control_path")
        executors[f"{size} ranks"] = partial(RanksExecutor, make_config(size), launcher)
    print("requests  executor   median us  p90 us  bytes a rank  bytes back")
    for num_reqs in args.num_reqs:
        for name, make in executors.items():
            micros, sent, answered = measure(make(), num_reqs, args.num_steps)
            p90 = statistics.quantiles(micros, n=10)[-1]
            middle = f"{statistics.median(micros):9.0f} {p90:7.0f}"
            print(f"{num_reqs:8} {name:>9}   {middle} {statistics.median(sent):13.0f} {statistics.median(answered):11.0f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdigit():  # a rank: the descriptor of its connection
        run_rank(Connection(int(sys.argv[1])), make_worker=NullWorker)
    else:
        main()
