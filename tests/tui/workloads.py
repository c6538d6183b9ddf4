"""Workloads that the real scheduler runs on a made-up clock: recorded, read back, and run again with another setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.sources.base import SourceStatus, StreamItem
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.testing import FakeExecutor, make_scheduler
from aioengine_tui.model.state import DashboardState
from tests.tui.support import BLOCK_SIZE, HEADER, MadeUpEngine

_BASE_S, _PER_TOKEN_S = 0.008, 0.0004
_HOST_S = 0.001


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as a recording tells of it."""

    request_id: str
    time: float  # seconds after the first one
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run can be repeated with; the names are the engine's."""

    num_kv_cache_blocks: int = 200
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    options: dict[str, Any] = field(default_factory=dict)  # further ones of the scheduler

    def changed(self, name: str, value: int) -> Settings:
        if name in ("num_kv_cache_blocks", "max_num_seqs", "max_num_batched_tokens"):
            return dataclasses.replace(self, **cast(dict[str, Any], {name: value}))
        return dataclasses.replace(self, options={**self.options, name: value})


class WorkloadEngine(MadeUpEngine):
    """A step takes a base time and a time for each token."""

    def __init__(self, settings: Settings, *, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks=settings.num_kv_cache_blocks)
        self.settings = settings
        self.scheduler = make_scheduler(
            num_kv_cache_blocks=settings.num_kv_cache_blocks, block_size=BLOCK_SIZE, max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens, max_model_len=4096, check_invariants=False,
            enable_prefix_caching=enable_prefix_caching, **settings.options,
        )  # fmt: skip
        self.executor = FakeExecutor(num_blocks=settings.num_kv_cache_blocks, block_size=BLOCK_SIZE)
        self.executor.load_model().result()
        self.executor.initialize_kv_cache(settings.num_kv_cache_blocks).result()

    def add_with_priority(self, request_id: str, priority: int, *, num_prompt_tokens: int, max_tokens: int) -> None:
        self.add(request_id, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        request = self.scheduler.requests[request_id]
        self.scheduler.waiting.remove(request)
        request.priority = priority
        self.scheduler.waiting.add(request)
        self._added[-1] = dataclasses.replace(self._added[-1], priority=priority)

    @property
    def header(self) -> WireHeader:
        scheduler = {
            "max_num_seqs": self.settings.max_num_seqs, "max_num_batched_tokens": self.settings.max_num_batched_tokens,
            "long_prefill_token_threshold": 0, "policy": "fcfs", **self.settings.options,
        }  # fmt: skip
        return dataclasses.replace(HEADER, include_prompts=True, config={**HEADER.config, "scheduler": scheduler})

    def _step(self, output: SchedulerOutput) -> list[StreamItem]:
        start = self.now
        scheduled, result = super()._step(output)
        assert isinstance(scheduled, StepEvent)
        assert isinstance(result, StepResultEvent)
        begin = start + _HOST_S
        end = begin + _BASE_S + _PER_TOKEN_S * output.total_num_scheduled_tokens
        self.now = end + _HOST_S
        return [
            dataclasses.replace(scheduled, token_budget=self.settings.max_num_batched_tokens),
            dataclasses.replace(
                result, time=self.now, execute_start=begin, execute_end=end, sample_start=end, sample_end=end, update_start=end,
                update_end=self.now,
            ),
        ]  # fmt: skip


def run_workload(
    arrivals: Sequence[Arrival],
    settings: Settings,
    *,
    each_step: Callable[[WorkloadEngine, list[StreamItem]], None] | None = None,
    enable_prefix_caching: bool = True,
) -> list[StreamItem]:
    """Run it to its end. each_step is called after every step with the events of that step."""
    engine = WorkloadEngine(settings, enable_prefix_caching=enable_prefix_caching)
    items: list[StreamItem] = [engine.header, SourceStatus("live", "test")]
    waiting = sorted(arrivals, key=lambda arrival: arrival.time)
    try:
        while waiting or engine.scheduler.has_work:
            if not engine.scheduler.has_work and waiting:
                engine.now = max(engine.now, HEADER.perf_counter + waiting[0].time)
            while waiting and HEADER.perf_counter + waiting[0].time <= engine.now:
                arrival = waiting.pop(0)
                engine.add(
                    arrival.request_id, num_prompt_tokens=len(arrival.prompt), max_tokens=arrival.max_tokens, prompt=list(arrival.prompt)
                )
            events = engine.run(1)
            items += events
            if each_step is not None:
                each_step(engine, events)
    finally:
        engine.executor.shutdown()
    return items


def workload_of(items: Iterable[StreamItem]) -> list[Arrival]:
    """The requests of a recording, so that they can be run again."""
    infos, prompts = {}, {}
    for item in items:
        if isinstance(item, StepEvent | StepResultEvent):
            infos.update({info.request_id: info for info in item.added})
        if isinstance(item, StepEvent):
            prompts.update({new.req_id: tuple(new.prompt_token_ids) for new in item.output.scheduled_new_reqs})
    first = min(info.arrival_time for info in infos.values())
    return [
        Arrival(request_id, info.arrival_time - first, prompts[request_id], info.max_tokens, info.priority)
        for request_id, info in infos.items()
    ]


def fold_all(items: Iterable[StreamItem]) -> DashboardState:
    state = DashboardState()
    for item in items:
        state.apply(item)
    return state


def made_up_prompt(number: int, length: int) -> tuple[int, ...]:
    """Token ids that no other number's prompt begins with."""
    return tuple((number * 7919 + index * 31 + 1) % 250 for index in range(length))
