"""`aioengine demo`: several prompts at once through one engine, streamed live, with a summary of what the engine did."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass

from aioengine.commands.demo_view import DemoView, LiveView, PlainView
from aioengine.commands.runtime import run, started_engine
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.events.bus import Subscription
from aioengine.events.step_event import Event, StepEvent
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams

# The same beginning for all of them, several KV blocks long: only the first request computes it, the others find it in
# the prefix cache.
SYSTEM_PROMPT = (
    "You are a friendly and knowledgeable assistant. Answer the question of the user in two or three short sentences. "
    "Use plain words that a curious twelve-year-old understands, give one concrete example where it helps, and do not "
    "repeat the question."
)
PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France, and what is it known for?",
    "How does a bicycle stay upright?",
    "What makes bread rise?",
    "Why do cats purr?",
    "What is a prime number?",
    "How do plants make their food?",
    "Write a haiku about the sea.",
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    config: EngineConfig
    params: SamplingParams
    publish: PublishOptions
    plain: bool
    start_time: float  # perf_counter() when the command began


class StepMeter:
    """Folds the engine's events into the figures that the demo shows."""

    def __init__(self) -> None:
        self.num_steps = 0  # that computed tokens
        self.num_scheduled_tokens = 0
        self.num_running = 0
        self.num_waiting = 0
        self.num_used_blocks = 0
        self.peak_used_blocks = 0
        self.num_total_blocks = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def add(self, event: Event) -> None:
        if isinstance(event, StepEvent) and not event.output.is_cleanup_only:
            self.num_steps += 1
            self.num_scheduled_tokens += event.output.total_num_scheduled_tokens
        stats = event.stats
        self.num_running, self.num_waiting = stats.num_running_reqs, stats.num_waiting_reqs
        self.num_used_blocks, self.num_total_blocks = stats.num_used_blocks, stats.num_total_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, stats.num_used_blocks)
        self.num_preemptions = stats.num_preemptions
        self.prefix_cache_queries, self.prefix_cache_hits = stats.prefix_cache_queries, stats.prefix_cache_hits

    def gauges(self) -> str:
        return (
            f"step {self.num_steps}  running {self.num_running}  waiting {self.num_waiting}  "
            f"KV blocks {self.num_used_blocks}/{self.num_total_blocks}  preemptions {self.num_preemptions}"
        )


def demo(settings: DemoSettings) -> None:
    run(_demo(settings))


async def _demo(settings: DemoSettings) -> None:
    meter = StepMeter()
    async with started_engine(settings.config, settings.publish) as engine:
        startup_s = time.perf_counter() - settings.start_time
        live = sys.stdout.isatty() and not settings.plain
        view: DemoView = LiveView(PROMPTS, meter.gauges) if live else PlainView(PROMPTS)
        with engine.events() as events, view:
            watcher = asyncio.create_task(_watch(events, meter))
            start = time.perf_counter()
            outputs = await _generate_all(engine, view, settings.params)
            elapsed_s = time.perf_counter() - start
            events.close()
            await watcher
    print(summary(outputs, meter, elapsed_s=elapsed_s, startup_s=startup_s))


async def _watch(events: Subscription, meter: StepMeter) -> None:
    async for event in events:
        meter.add(event)


async def _generate_all(engine: AsyncEngine, view: DemoView, params: SamplingParams) -> list[RequestOutput]:
    refresher = asyncio.create_task(view.keep_fresh())
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_generate(engine, view, i, params)) for i in range(len(PROMPTS))]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # one cause, and the others were cancelled because of it
    finally:
        refresher.cancel()
    return [task.result() for task in tasks]


async def _generate(engine: AsyncEngine, view: DemoView, index: int, params: SamplingParams) -> RequestOutput:
    question = PROMPTS[index]
    # A model without a chat template gets the same text, system prompt first.
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    prompt = messages if engine.tokenizer.has_chat_template else f"{SYSTEM_PROMPT}\n\nQuestion: {question}\nAnswer:"
    last: RequestOutput | None = None
    async for last in engine.generate(prompt, params):
        view.update(index, last)
    assert last is not None, "a request that ends without error has an output"
    return last


def summary(outputs: list[RequestOutput], meter: StepMeter, *, elapsed_s: float, startup_s: float) -> str:
    num_tokens = sum(len(output.token_ids) for output in outputs)
    ttfts = [output.metrics.time_to_first_token_s or 0.0 for output in outputs]
    queries = meter.prefix_cache_queries
    hit_rate = meter.prefix_cache_hits / queries if queries else 0.0
    return f"""\

{len(outputs)} prompts at once, {num_tokens} tokens in {elapsed_s:.1f} s
  throughput     {num_tokens / elapsed_s:.1f} tokens/s
  first token    p50 {statistics.median(ttfts):.2f} s, max {max(ttfts):.2f} s
  steps          {meter.num_steps}, {meter.num_scheduled_tokens / max(meter.num_steps, 1):.1f} tokens a step
  KV blocks      {meter.peak_used_blocks} at peak, of {meter.num_total_blocks}
  prefix cache   {meter.prefix_cache_hits} of {queries} prompt tokens found ({hit_rate:.0%})
  preemptions    {meter.num_preemptions}
  start-up       {startup_s:.1f} s"""
