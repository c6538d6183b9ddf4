"""A varied run of an engine without a model, with everything that observers saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aioengine import AsyncEngine, SamplingParams
from aioengine.events.step_event import EngineSnapshot, Event
from aioengine.events.wire import WireHeader
from aioengine.kv_cache_groups import group_layers
from aioengine.testing import FakeExecutor, FakeTokenizer, in_virtual_time, make_model_info


@dataclass(frozen=True, slots=True)
class Run:
    header: WireHeader
    events: list[Event]
    snapshots: list[EngineSnapshot]  # one right after each event


async def run_workload(engine: AsyncEngine, *, num_requests: int, seed: int = 0) -> None:
    """Shared prefixes, chunks, more requests than blocks, stop strings and dropped streams."""
    rng = random.Random(seed)

    async def one(index: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        prompt = "shared prefix " * rng.randint(0, 2) + "x" * rng.randint(1, 40)
        params = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0, stop=("e",) if index % 5 == 0 else ())
        stream = engine.generate(prompt, params, request_id=f"r{index}")
        num_outputs = 0
        async for _ in stream:
            num_outputs += 1
            if index % 7 == 3 and num_outputs > 3:
                break
        await stream.aclose()

    await asyncio.gather(*(one(index) for index in range(num_requests)))


async def settle(engine: AsyncEngine) -> None:
    """Wait until the worker has forgotten everybody."""
    for _ in range(500):
        snapshot = engine.snapshot()
        if not snapshot.requests and not snapshot.lingering and not snapshot.num_in_flight:
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the engine did not become idle")


def make_engine(
    *,
    forward_s: float = 0.0005,
    record: Path | None = None,
    in_loop: bool = False,
    layer_windows: Sequence[int | None] = (None,),
    **options: object,
) -> AsyncEngine:
    small: dict[str, object] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 150,
        "block_size": 4,
        "check_invariants": True,
        "publish_text": True,
    }
    model_info = make_model_info(layer_windows=layer_windows)
    num_blocks = 1 + 35 * len(group_layers(layer_windows))
    return AsyncEngine(
        executor=FakeExecutor(num_blocks=num_blocks, block_size=4, forward_s=forward_s, in_loop=in_loop, model_info=model_info),
        tokenizer=FakeTokenizer(),
        record=record,
        **{**small, **options},  # type: ignore[arg-type]
    )


@in_virtual_time
async def make_run(*, num_requests: int = 30, record: Path | None = None, layer_windows: Sequence[int | None] = (None,)) -> Run:
    """The same in every process: nothing depends on how fast anything is."""
    events: list[Event] = []
    snapshots: list[EngineSnapshot] = []
    engine = make_engine(record=record, in_loop=True, layer_windows=layer_windows)

    def observe(event: Event) -> None:
        events.append(event)
        snapshots.append(engine.snapshot())

    async with engine:
        engine.bus.add_observer(observe)
        await run_workload(engine, num_requests=num_requests)
        await settle(engine)
        header = engine.wire_header
        engine.bus.remove_observer(observe)
    return Run(header, events, snapshots)
