"""How far a decode step is from the least time that this machine allows. CPU only.

The floor of a step is the larger of: the bytes it has to read (weights once, the keys and values of every request) over
the measured read bandwidth; and its multiplications over the measured peak of the instruction that the kernels use (integer dot
products: one digit of an activation for fast weights, two for exact ones; float32 for attention). Everything is measured in this
process, with the same threads, as `aioengine bench kernels --roofline` does.

    python benchmarks/step_floor.py --weights fast exact --batch 1 8 32
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
from dataclasses import dataclass

import torch

from aioengine import AsyncEngine, SamplingParams
from aioengine.checkpoint.gguf import GGUFFile
from aioengine.events.step_event import StepResultEvent
from aioengine.models.info import resolve_model
from aioengine.resolved_config import ModelInfo
from aioengine_kernels.cpu.peak import measure_peak

PROMPT_LEN = 128
NUM_STEPS = 64
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the floor is made of, measured here."""

    read_bytes_s: float
    float32_flops: float
    int8_flops: float


def measure_machine() -> Machine:
    peak = measure_peak(num_threads=torch.get_num_threads(), budget_s=1.0)
    # Plain C++ multiplies by float32 in its exact mode, and by integers no faster.
    return Machine(peak.read_bytes_s, peak.float32_ops_s, peak.int8_ops_s or peak.float32_ops_s)


async def measure_step(model: str, *, weights: str, batch: int) -> tuple[float, float, AsyncEngine]:
    """Seconds of a decode step with `batch` requests: on the worker, and from one result to the next."""
    worker_s: list[float] = []
    ends: list[float] = []
    engine = AsyncEngine(model, weights=weights, max_num_seqs=batch, max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    async with engine:
        with engine.events() as events:
            prompts = [[1000 + 7 * request + position for position in range(PROMPT_LEN)] for request in range(batch)]
            await engine.generate_batch(prompts, params, progress=False)
            for event in events.drain():
                if isinstance(event, StepResultEvent) and len(event.num_new_tokens) == batch and event.sample_end and event.execute_start:
                    worker_s.append(event.sample_end - event.execute_start)
                    ends.append(event.sample_end)
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return statistics.median(worker_s[4:]), statistics.median(gaps[4:]), engine


def matrix_sizes(model: str) -> tuple[float, float]:
    """(bytes, weights) of the matrices that a decode step multiplies with; a tied embedding counts once, as the head."""
    tensors = [tensor for path in resolve_model(model).weights for tensor in GGUFFile(path).tensors() if len(tensor.shape) == 2]
    return float(sum(tensor.info.num_bytes for tensor in tensors)), float(sum(tensor.shape[0] * tensor.shape[1] for tensor in tensors))


def floor_s(
    machine: Machine, info: ModelInfo, *, weights: str, batch: int, kv_cache_dtype: str, sizes: tuple[float, float]
) -> tuple[float, str]:
    """The least seconds of a decode step, and what bounds it."""
    num_bytes, num_weights = sizes
    context = PROMPT_LEN + NUM_STEPS / 2
    kv_values = 2 * info.num_layers * info.num_kv_heads * info.head_dim * context * batch
    attention_flops = 4 * info.num_layers * info.num_heads * info.head_dim * context * batch
    peak = machine.int8_flops / (1 if weights == "fast" else 2)
    memory = (num_bytes + kv_values * KV_BYTES[kv_cache_dtype]) / machine.read_bytes_s
    arithmetic = 2 * num_weights * batch / peak + attention_flops / machine.float32_flops
    return max(memory, arithmetic), "memory" if memory > arithmetic else "arithmetic"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a model whose weights are a GGUF file (default: smollm2)")
    parser.add_argument("--weights", nargs="+", choices=("exact", "fast"), default=["exact", "fast"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    machine = measure_machine()
    print(
        f"reads {machine.read_bytes_s / 1e9:.1f} GB/s, float32 {machine.float32_flops / 1e9:.0f} GFLOP/s, "
        f"int8 {machine.int8_flops / 1e9:.0f} GOP/s, {torch.get_num_threads()} threads"
    )
    sizes = matrix_sizes(args.model)
    print("weights  batch  floor ms  bound       worker ms  ratio  step ms  ratio")
    for weights in args.weights:
        for batch in args.batch:
            worker, step, engine = asyncio.run(measure_step(args.model, weights=weights, batch=batch))
            config = engine.resolved_config
            floor, bound = floor_s(
                machine, config.model, weights=weights, batch=batch, kv_cache_dtype=config.worker.kv_cache_dtype, sizes=sizes
            )
            print(
                f"{weights:<8} {batch:>5} {1e3 * floor:>9.2f}  {bound:<10} {1e3 * worker:>10.2f} {worker / floor:>6.2f} "
                f"{1e3 * step:>8.2f} {step / floor:>6.2f}"
            )


if __name__ == "__main__":
    main()
