"""Runs requests through a whole engine and prints what came out, as JSON: model folder, attention backend, requests.

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


async def run(folder: str, backend: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """`num_kv_cache_blocks` is so small that requests are preempted, and no prompt fits into one step."""
    options: dict[str, Any] = {"max_model_len": 128, "num_kv_cache_blocks": 8, "long_prefill_token_threshold": 16, "max_num_seqs": 4}
    async with AsyncEngine(
        folder, device="cpu", dtype="float32", attention_backend=backend, check_invariants=True, num_threads=1, **options
    ) as engine:
        params = [SamplingParams(**request["params"]) for request in requests]
        outputs = await engine.generate_batch([request["prompt"] for request in requests], params, progress=False)
        return {"outputs": [describe(output) for output in outputs], "num_preemptions": engine.stats().num_preemptions}


def describe(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = [[(token, entry.logprob, entry.rank) for token, entry in place.items()] for place in completion.logprobs or []]
    return {"token_ids": completion.token_ids, "finish_reason": completion.finish_reason, "logprobs": logprobs}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from aioengine_kernels import interpreter

        interpreter.install()
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))))
