"""Recordings of many kinds, made without a model and in virtual time, so that they are the same in every run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from aioengine import AsyncEngine, SamplingParams
from aioengine.engine.async_engine import AsyncEngine as Engine
from aioengine.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from aioengine.testing import FakeExecutor, FakeTokenizer, in_virtual_time, make_model_info, scripted
from aioengine.testing.tokens import default_next_token
from tests.tui.runs import run_workload, settle

KINDS = (
    "plain",
    "text_free",
    "guesses",
    "guesses_text_free",
    "priority",
    "structured",
    "one_step",
    "no_prefix_cache",
    "demo",
    "groups",
    "groups_text_free",
    "guesses_groups",
)


def make_engine(kind: str, path: Path) -> AsyncEngine:
    options: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 150,
        "block_size": 4,
        "publish_text": not kind.endswith("text_free"),
    }
    if kind.startswith("guesses"):
        options["num_speculative_tokens"] = 3
    if kind == "priority":
        options["scheduling_policy"] = "priority"
    if kind == "one_step":
        options["async_scheduling"] = False
    if kind == "no_prefix_cache":
        options["enable_prefix_caching"] = False
    windows: tuple[int | None, ...] = (None,)
    num_blocks = 40 if kind == "demo" else 36
    if "groups" in kind:
        windows, num_blocks = (None, 30, 30, 9), 94
    executor = FakeExecutor(
        num_blocks=num_blocks,
        block_size=4,
        forward_s=0.0005,
        in_loop=True,
        next_token=scripted("abcabcabcabc", then=97) if kind.startswith("guesses") else default_next_token,
        model_info=make_model_info(layer_windows=windows),
    )
    return AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), record=path, **options)


async def _own_traffic(engine: Engine, kind: str) -> None:
    """Salts, n = 2, second turns, repetition, resets, failures and priorities, beside the traffic of the dashboard's tests."""
    rng = random.Random(1)

    async def one(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        params: dict[str, Any] = {"max_tokens": 8 + index, "temperature": 0.0}
        if index % 4 == 0:
            params["n"] = 2
        if index % 5 == 1:
            params["repetition_detection"] = RepetitionDetectionParams(3, 1, 2)
        if index % 6 == 2:
            params["stop_token_ids"] = tuple(range(97, 123))
        if index % 3 == 1:
            params["prompt_logprobs"] = 1
        if kind == "structured" and index % 2:
            params["structured_outputs"] = StructuredOutputsParams(regex="[a-f]{3,12}")
        prompt = "second turns share this " * 2 + "y" * index
        stream = engine.generate(
            prompt, SamplingParams(**params), priority=index % 3 if kind == "priority" else 0, cache_salt="salt" if index % 7 == 3 else None
        )
        async for output in stream:
            text = output.text
        async for _ in engine.generate(prompt + text, SamplingParams(max_tokens=4, temperature=0.0)):
            pass

    async def disturb() -> None:
        for index in range(6):
            await asyncio.sleep(0.02)
            engine.reset_prefix_cache(reset_running_requests=bool(index % 2))

    await asyncio.gather(disturb(), *(one(index) for index in range(12)))


@in_virtual_time
async def make_recording(kind: str, path: Path) -> None:
    """Write the recording of a run of that kind."""
    engine = make_engine(kind, path)
    executor = engine._life.executor
    assert isinstance(executor, FakeExecutor)
    executor.fail_request("r2" if kind != "demo" else "r10", num_output_tokens=2)
    async with engine:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(run_workload(engine, num_requests=150 if kind == "demo" else 24), _own_traffic(engine, kind))
        await settle(engine)
