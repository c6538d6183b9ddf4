"""Recordings for `aioengine top --tour`, made when they are asked for: the real engine and scheduler over a worker without a model.

A scene takes some ten milliseconds to make and comes out the same every time: the engine runs in virtual time. What happens
and in which order is the engine's doing; only the clock is the tour's own (see `StepClock`), because a worker without a
model takes no time.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioengine.engine.async_engine import AsyncEngine
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader, encode, encode_header
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, in_virtual_time
from aioengine_tui.tour import Caption, Scene

BLOCK_SIZE = 4
_STEP_S = 1.0  # virtual seconds of a forward: `Stage.steps(n)` counts in them
_STORY = "The lamp was lit, the sea was calm, and one by one the boats came home. "
_START_TIME = 1000.0  # of every scene's clock

Happened = Callable[[StepEvent], bool]
"""Whether a step is the one that some words are about."""


@dataclass(frozen=True, slots=True)
class Cue:
    """Words that belong to the first step after that of the cue before in which something happens. None: to the beginning."""

    when: Happened | None
    text: str
    field: str | None = None  # on the frame screen: the field that they are about


@dataclass(frozen=True, slots=True)
class SceneScript:
    """What a scene does, and what is said about it."""

    name: str
    title: str
    screen: str  # the id of the view that it is watched on
    cues: tuple[Cue, ...]
    play: Callable[[Stage], Awaitable[None]]
    is_about_lanes: bool = False  # of the step screen
    num_blocks: int = 41
    options: Mapping[str, Any] = field(default_factory=dict)
    answer: str = _STORY  # what every request is answered with, over and over


class Stage:
    """The engine of a scene, as its script sees it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._asked: dict[str, asyncio.Task[None]] = {}

    async def steps(self, count: float) -> None:
        """Let about so many steps pass."""
        await asyncio.sleep(count * _STEP_S)

    def ask(self, request_id: str, prompt: str, max_tokens: int, *, priority: int = 0, **params: Any) -> None:
        """Send a request and read its stream."""
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 0, "ignore_eos": True, **params})

        async def read() -> None:
            async for _ in self.engine.generate(prompt, sampling, request_id=request_id, priority=priority):
                pass

        self._asked[request_id] = asyncio.create_task(read())

    def hang_up(self, request_id: str) -> None:
        """The client goes away."""
        self._asked[request_id].cancel()

    async def end(self) -> None:
        """Until everybody has ended and the worker has forgotten them."""
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        await self.steps(4)


def record_scene(script: SceneScript, folder: Path) -> Scene:
    """Play a scene, write its recording into `folder`, and find the steps that its words belong to."""
    header, events = _play(script)
    path = folder / f"{script.name}.jsonl"
    with path.open("wb") as file:
        file.write(encode_header(header))
        file.writelines(encode(event, include_prompts=True) for event in events)
    return Scene(script.title, script.screen, captions=place_cues(script, events), path=path, is_about_lanes=script.is_about_lanes)


def place_cues(script: SceneScript, events: list[Event]) -> tuple[Caption, ...]:
    """Raises ValueError if what some words are about does not happen."""
    steps = [event for event in events if isinstance(event, StepEvent)]
    captions: list[Caption] = []
    index = 0
    for cue in script.cues:
        if cue.when is None:
            captions.append(Caption(0, cue.text, cue.field))
            continue
        while index < len(steps) and not cue.when(steps[index]):
            index += 1
        if index == len(steps):
            raise ValueError(f"scene {script.name!r}: no step is what these words are about: {cue.text!r}")
        captions.append(Caption(steps[index].step_id, cue.text, cue.field))
        index += 1
    return tuple(captions)


@in_virtual_time
async def _play(script: SceneScript) -> tuple[WireHeader, list[Event]]:
    events: list[Event] = []
    engine = AsyncEngine(
        executor=FakeExecutor(
            num_blocks=script.num_blocks,
            block_size=BLOCK_SIZE,
            forward_s=_STEP_S,
            next_token=lambda known, num_prompt, params: script.answer.encode()[(len(known) - num_prompt) % len(script.answer)],
            in_loop=True,
        ),
        tokenizer=FakeTokenizer(),
        **{
            "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 160, "block_size": BLOCK_SIZE,
            "publish_text": True, "prefix_caching_seed": "tour", **script.options,
        },
    )  # fmt: skip
    async with engine:
        engine.bus.add_observer(events.append)
        stage = Stage(engine)
        await script.play(stage)
        await stage.end()
        header = engine.wire_header
        engine.bus.remove_observer(events.append)
    header = dataclasses.replace(header, model="tour", unix_time=0.0, perf_counter=_START_TIME, include_prompts=True)
    return header, StepClock(_START_TIME).retime(events)


class StepClock:
    """Gives events the times they would have if a forward took 8 ms and 0.3 ms a token, and the host 1 ms before and after.

    The host and the worker each do one thing after the other; a step's forward begins when it has been scheduled and the
    worker is free, and its result is taken in when it is there and the host is free. With two steps in flight they overlap.
    """

    def __init__(self, start: float) -> None:
        self._host = self._worker = start
        self._spans: dict[int, tuple[float, float, float]] = {}  # step -> start and end of its forward, end of sampling

    def retime(self, events: list[Event]) -> list[Event]:
        return [
            self._scheduled(e) if isinstance(e, StepEvent) else self._came_back(e) if isinstance(e, StepResultEvent) else e for e in events
        ]

    def _scheduled(self, event: StepEvent) -> StepEvent:
        start, end = self._host, self._host + 0.001
        self._host = end
        forward = max(self._worker, end)
        num_tokens = event.output.total_num_scheduled_tokens
        sample = forward + (0.008 + 0.0003 * num_tokens if num_tokens else 0.0)
        self._worker = sample + 0.002
        self._spans[event.step_id] = (forward, sample, self._worker)
        added = [dataclasses.replace(info, arrival_time=start) for info in event.added]
        return dataclasses.replace(event, time=end, schedule_start=start, schedule_end=end, added=added)

    def _came_back(self, event: StepResultEvent) -> StepResultEvent:
        forward, sample, sampled = self._spans.pop(event.step_id)
        start = max(self._host, sampled)
        self._host = start + 0.001
        added = [dataclasses.replace(info, arrival_time=start) for info in event.added]
        return dataclasses.replace(
            event, time=self._host, execute_start=forward, execute_end=sample, sample_start=sample, sample_end=sampled,
            update_start=start, update_end=self._host, added=added,
            grammar_start=None if event.grammar_start is None else forward + 0.001,
            grammar_end=None if event.grammar_end is None else forward + 0.0015,
        )  # fmt: skip
