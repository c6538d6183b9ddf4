"""Records the run that docs/tour.md follows: three chats with one system prompt, in a cache that is too small for them.

    python docs/record_tour.py             # writes docs/tour.jsonl, and the frames in tour.md anew
    python docs/record_tour.py --frames    # the frames only

The frames in tour.md are printed from the recording, and a test compares them with it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from aioengine import AsyncEngine, SamplingParams, StepEvent
from aioengine.core.scheduler_output import CachedRequestData, NewRequestData
from aioengine.events.recording.reader import read_recording
from aioengine.events.step_event import Event

RECORDING = Path(__file__).with_name("tour.jsonl")
PAGE = Path(__file__).with_name("tour.md")
SYSTEM = "You are a friendly guide in a science museum. Answer every question in two short sentences that a child understands."
# What is asked, and in answer to which step: a request that comes later finds the system prompt in the prefix cache.
QUESTIONS = {"sky": ("Why is the sky blue?", 0), "bread": ("What makes bread rise?", 4), "whale": ("How do whales breathe?", 5)}
FRAME = re.compile(r"(<!-- frame (\d+) -->\n```text\n).*?(```\n)", re.DOTALL)


async def record(path: Path) -> None:
    async with AsyncEngine(
        "smollm2",
        record=path,
        publish_text=True,
        weights="exact",
        max_num_seqs=3,
        max_num_batched_tokens=32,
        num_kv_cache_blocks=11,  # one of them is the null block
        max_model_len=128,
        prefix_caching_seed="tour",
    ) as engine:
        asked: dict[str, asyncio.Task[None]] = {}
        with engine.events() as events:
            _ask(engine, asked, step_id=0)
            async for event in events:
                if isinstance(event, StepEvent):
                    _ask(engine, asked, step_id=event.step_id)
                if len(asked) == len(QUESTIONS) and all(task.done() for task in asked.values()):
                    break
        await asyncio.gather(*asked.values())


def _ask(engine: AsyncEngine, asked: dict[str, asyncio.Task[None]], *, step_id: int) -> None:
    for name, (question, after_step) in QUESTIONS.items():
        if name not in asked and after_step <= step_id:
            asked[name] = asyncio.create_task(_client(engine, name, question))


async def _client(engine: AsyncEngine, name: str, question: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    async for _ in engine.generate(messages, SamplingParams(max_tokens=36, temperature=0.0), request_id=name):
        pass


def frame(events: Iterable[Event], step_id: int) -> str:
    """What the scheduler told the worker for one step, field by field; a long list of ids as its length and beginning."""
    event = next(event for event in events if isinstance(event, StepEvent) and event.step_id == step_id)
    output = event.output
    lines = [f"SchedulerOutput(step_id={output.step_id}"]
    lines += [f"  new     {_new(request)}" for request in output.scheduled_new_reqs]
    lines += [f"  cached  {line}" for line in _cached(output.scheduled_cached_reqs)]
    lines.append(f"  num_scheduled_tokens        {output.num_scheduled_tokens}")
    lines.append(f"  total_num_scheduled_tokens  {output.total_num_scheduled_tokens} of {event.token_budget}")
    lines.append(f"  preempted_req_ids           {_names(output.preempted_req_ids)}")
    lines.append(f"  finished_req_ids            {_names(output.finished_req_ids)})")
    lines.append(
        f"admission stopped by {event.admission_stop}; {event.stats.num_free_blocks} of {event.stats.num_total_blocks} blocks free"
    )
    return "\n".join(lines) + "\n"


def _new(request: NewRequestData) -> str:
    ids = request.prompt_token_ids
    prompt = f"prompt_token_ids=[{ids[0]}, {ids[1]}, ... {len(ids)} in all]"
    return f"{request.req_id}: {prompt}, block_ids={request.block_ids}, num_computed_tokens={request.num_computed_tokens}"


def _cached(data: CachedRequestData) -> list[str]:
    rows = zip(data.req_ids, data.new_block_ids, data.num_computed_tokens, strict=True)
    return [
        f"{req_id}: new_block_ids={blocks}, num_computed_tokens={computed}{', resumed' if req_id in data.resumed_req_ids else ''}"
        for req_id, blocks, computed in rows
    ]


def _names(req_ids: frozenset[str]) -> str:
    return f"{{{', '.join(sorted(req_ids))}}}"


def with_frames(page: str, events: list[Event]) -> str:
    """The page with each of its frames printed from the recording."""
    return FRAME.sub(lambda found: found[1] + frame(events, int(found[2])) + found[3], page)


def main() -> None:
    if "--frames" not in sys.argv[1:]:
        asyncio.run(record(RECORDING))
        text = RECORDING.read_text(encoding="utf-8")
        RECORDING.write_text(text.replace(str(Path.home()), "~"), encoding="utf-8")  # where the model lies is nobody's business
    PAGE.write_text(with_frames(PAGE.read_text(encoding="utf-8"), read_recording(RECORDING).events), encoding="utf-8")


if __name__ == "__main__":
    main()
