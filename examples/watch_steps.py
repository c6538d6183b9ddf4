"""What the scheduler decides, as it decides it: who gets how many tokens, and why nobody further was admitted."""

import asyncio

from aioengine import AsyncEngine, SamplingParams, StepEvent
from aioengine.events.bus import Subscription


async def watch(events: Subscription) -> None:
    async for event in events:
        if isinstance(event, StepEvent):
            tokens = " ".join(f"{req_id}:{count}" for req_id, count in event.output.num_scheduled_tokens.items())
            print(f"step {event.step_id:3}  {event.stats.kv_cache_usage:4.0%} of KV  stop: {event.admission_stop:12}  {tokens}")


async def main() -> None:
    async with AsyncEngine("smollm2", max_num_seqs=2, max_num_batched_tokens=16) as engine:
        with engine.events() as events:
            watcher = asyncio.create_task(watch(events))
            prompts = ["One sentence about bread:", "One sentence about the sea, and one about ships:", "Why?"]
            await engine.generate_batch(prompts, SamplingParams(max_tokens=6))
        await watcher


if __name__ == "__main__":
    asyncio.run(main())
