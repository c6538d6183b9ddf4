"""What one step costs the scheduler alone: schedule() and update_from_output() for N requests that decode.

The same procedure as for vLLM's scheduler in `benchmarks/peers/vllm_host_cost.py`: prompts of 64 tokens, blocks of 16,
prefix caching on, no invariants, the worker's answer built outside the clock. Run as a process of its own:
`python -m aioengine_bench.host_cost 32 256 1024` prints one line of JSON for each.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import orjson

from aioengine.config import CacheConfig, SchedulerConfig
from aioengine.core.scheduler import Scheduler
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request
from aioengine.sampling_params import SamplingParams
from aioengine_bench.metrics import percentile

PROMPT_LEN = 64
BLOCK_SIZE = 16
NUM_WARMUP_STEPS = 30


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds a step. The minimum is what the code costs, the median what a busy machine made of it."""

    engine: str
    num_reqs: int
    schedule_min_us: float
    schedule_median_us: float
    update_min_us: float
    update_median_us: float

    @property
    def min_us(self) -> float:
        return self.schedule_min_us + self.update_min_us


def measure(num_reqs: int, *, num_steps: int = 200) -> HostCost:
    """Drive a scheduler by hand for `num_steps` decode steps."""
    scheduler = _make_scheduler(num_reqs)
    for index in range(num_reqs):
        prompt = [(index * 7 + position) % 40000 for position in range(PROMPT_LEN)]
        params = SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0.0, seed=0)
        scheduler.add_request(Request(f"r{index}", prompt, sampling_params=params))
    schedule_s: list[float] = []
    update_s: list[float] = []
    step = 0
    while len(schedule_s) < num_steps + NUM_WARMUP_STEPS:
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        assert output is not None
        req_ids = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(req_ids, {req_id: index for index, req_id in enumerate(req_ids)}, [[100 + step] for _ in req_ids])
        answered = time.perf_counter()
        scheduler.update_from_output(output, answer)
        updated = time.perf_counter()
        scheduler.take_report()  # observers take it each step; left alone it would grow
        if output.total_num_scheduled_tokens == len(req_ids) == num_reqs:
            schedule_s.append(scheduled - start)
            update_s.append(updated - answered)
            step += 1
    return _summary(num_reqs, schedule_s[NUM_WARMUP_STEPS:], update_s[NUM_WARMUP_STEPS:])


def _make_scheduler(num_reqs: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=num_reqs, max_num_batched_tokens=max(8192, num_reqs), max_model_len=2048),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        num_kv_cache_blocks=num_reqs * 40 + 10,
    )


def _summary(num_reqs: int, schedule_s: list[float], update_s: list[float]) -> HostCost:
    def microseconds(values: list[float], percent: float) -> float:
        value = percentile(values, percent)
        assert value is not None
        return value * 1e6

    return HostCost(
        engine="aioengine",
        num_reqs=num_reqs,
        schedule_min_us=microseconds(schedule_s, 0),
        schedule_median_us=microseconds(schedule_s, 50),
        update_min_us=microseconds(update_s, 0),
        update_median_us=microseconds(update_s, 50),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure schedule() and update_from_output() for N decoding requests.")
    parser.add_argument("num_reqs", type=int, nargs="+")
    parser.add_argument("--num-steps", type=int, default=200)
    args = parser.parse_args()
    for num_reqs in args.num_reqs:
        gc.collect()
        print(orjson.dumps(measure(num_reqs, num_steps=args.num_steps)).decode(), flush=True)


if __name__ == "__main__":
    main()
