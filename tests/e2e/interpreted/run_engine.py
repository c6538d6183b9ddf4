"""Runs requests through a whole engine and prints what came out, as JSON: model folder, attention backend, requests,
engine options.

In a process of its own, because Triton's interpreter is chosen when triton is first imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import torch

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.core.scheduler_output import SchedulerOutput


async def run(folder: str, backend: str, requests: list[dict[str, Any]], changes: dict[str, Any]) -> dict[str, Any]:
    """`num_kv_cache_blocks` is so small that requests are preempted, and no prompt fits into one step."""
    options: dict[str, Any] = {"max_model_len": 128, "num_kv_cache_blocks": 8, "long_prefill_token_threshold": 16, "max_num_seqs": 4}
    log = StepLog(warm_up=not changes)
    async with AsyncEngine(
        folder, device="cpu", dtype="float32", attention_backend=backend, check_invariants=True, num_threads=1, **(options | changes)
    ) as engine:
        log.steps.clear()  # what was launched before the first request: the warm-up
        before = log.num_variants()
        params = [SamplingParams(**request["params"]) for request in requests]
        outputs = await engine.generate_batch([request["prompt"] for request in requests], params, progress=False)
        return {
            "outputs": [describe(output) for output in outputs],
            "num_preemptions": engine.stats().num_preemptions,
            "steps": log.steps,
            "variants": [before, log.num_variants()],
        }


class StepLog:
    """In the interpreter: the kernels that each step launches; and the variants of them, which a GPU would have compiled."""

    def __init__(self, *, warm_up: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        if os.environ.get("TRITON_INTERPRET") != "1":
            return
        from aioengine.worker.device import InterpreterDevice
        from aioengine.worker.model_runner import ModelRunner
        from aioengine_kernels.launcher import Kernel

        InterpreterDevice.compiles_kernels = warm_up  # as a GPU is
        launch, execute_model, steps = Kernel.launch, ModelRunner.execute_model, self.steps

        def noted_launch(kernel: Kernel, grid: tuple[int, ...], /, *arguments: Any, **constants: Any) -> None:
            if steps:
                steps[-1]["launches"].append(kernel.name)
            launch(kernel, grid, *arguments, **constants)

        def noted_step(runner: ModelRunner, out: SchedulerOutput) -> None:
            lengths = list(out.num_scheduled_tokens.values())
            num_ones = lengths.count(1)
            steps.append({"decodes": num_ones, "chunks": len(lengths) - num_ones, "launches": []})
            execute_model(runner, out)

        Kernel.launch = noted_launch  # type: ignore[method-assign]
        ModelRunner.execute_model = noted_step  # type: ignore[method-assign,assignment]

    def num_variants(self) -> dict[str, int]:
        if os.environ.get("TRITON_INTERPRET") != "1":
            return {}
        from aioengine_kernels.launcher import count_variants

        return count_variants()


def describe(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [[(token, entry.logprob, entry.rank) for token, entry in place.items()] for place in completion.logprobs or []]
    return {"token_ids": completion.token_ids, "finish_reason": completion.finish_reason, "logprobs": logprobs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from aioengine_kernels import interpreter

        interpreter.install()
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])))))
