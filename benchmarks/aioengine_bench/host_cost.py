"""What one step costs the scheduler alone: schedule() and update_from_output() for N requests that decode.

The same procedure as for vLLM's scheduler in `benchmarks/peers/vllm_host_cost.py`: prompts of 64 tokens, blocks of 16,
prefix caching on, no invariants, the worker's answer built outside the clock. Run as a process of its own:
`python -m aioengine_bench.host_cost 32 256 1024` prints one line of JSON for each.

`--admission 512 2000` instead: requests whose prompts of these lengths are cached come one after the other, each with two
tokens of its own and one to generate. CPU time from the tokens of a request to its end, hashing included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

import orjson

from aioengine.core.scheduler import Scheduler
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig, SchedulerConfig
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


def measure_admission(prompt_len: int, *, num_requests: int = 400) -> dict[str, str | int | float]:
    """Microseconds of CPU time that a request costs whose prompt is cached but for the last block."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=prompt_len + 64, max_model_len=prompt_len + 64),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        num_kv_cache_blocks=4 * (prompt_len // BLOCK_SIZE) + 100,
    )
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, seed=0)
    spent_s: list[float] = []
    for index in range(num_requests):
        prompt = [1000 + position % 30000 for position in range(prompt_len)] + [index, index + 1]  # no token is an object of another's
        start = time.thread_time()
        scheduler.add_request(Request(f"r{index}", prompt, sampling_params=params))
        output = scheduler.schedule()
        scheduled = time.thread_time()
        assert output is not None
        assert len(output.scheduled_new_reqs) == 1
        assert index == 0 or output.scheduled_new_reqs[0].num_computed_tokens >= prompt_len - BLOCK_SIZE
        answer = ModelRunnerOutput([f"r{index}"], {f"r{index}": 0}, [[5]])
        answered = time.thread_time()
        scheduler.update_from_output(output, answer)
        spent_s.append(scheduled - start + time.thread_time() - answered)
        assert not scheduler.running
        scheduler.take_report()
    return {"engine": "aioengine", "prompt_len": prompt_len, **_least_and_median("admission", spent_s)}


def _least_and_median(name: str, values_s: list[float]) -> dict[str, float]:
    return {f"{name}_min_us": min(values_s) * 1e6, f"{name}_median_us": statistics.median(values_s) * 1e6}


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
    parser.add_argument("num_reqs", type=int, nargs="*")
    parser.add_argument("--num-steps", type=int, default=200)
    parser.add_argument("--admission", type=int, nargs="+", default=[], metavar="PROMPT_LEN", help="admission of cached prompts")
    args = parser.parse_args()
    for prompt_len in args.admission:
        gc.collect()
        print(orjson.dumps(measure_admission(prompt_len)).decode(), flush=True)
    for num_reqs in args.num_reqs:
        gc.collect()
        print(orjson.dumps(measure(num_reqs, num_steps=args.num_steps)).decode(), flush=True)


if __name__ == "__main__":
    main()
