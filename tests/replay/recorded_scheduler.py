"""A scheduler that writes down its own calls and frames, as an engine does around it: for drivers that are no engine."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from typing import Any

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.loop.core_events import CoreEvents
from aioengine.events.bus import StepBus
from aioengine.events.step_event import Event
from aioengine.events.wire import WireHeader, encode, encode_header
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig


class _NoText:
    """Token ids are published, but there is no text to them."""

    def take_new_text(self) -> dict[str, str]:
        return {}

    def text_of(self, request_id: str) -> tuple[str | None, str | None]:
        return None, None


class RecordedScheduler(Scheduler):
    """`recording()` gives the lines so far."""

    def __init__(self, config: SchedulerConfig, *, cache: CacheConfig, num_kv_cache_blocks: int, **options: Any) -> None:
        cache = dataclasses.replace(cache, prefix_caching_seed="a seed")  # the engine resolves it too, so that hashes can be had again
        super().__init__(config, cache=cache, num_kv_cache_blocks=num_kv_cache_blocks, **options)
        self._header = {
            "scheduler": dataclasses.asdict(config),
            "cache": dataclasses.asdict(cache),
            "model": {"eos_token_ids": sorted(self.eos_token_ids)},
        }
        self._seen: list[Event] = []
        bus = StepBus()
        bus.add_observer(self._seen.append)
        self._num_blocks = num_kv_cache_blocks
        self._told = CoreEvents(self, bus, text_source=_NoText())
        self._out: deque[int] = deque()

    def recording(self, *, include_prompts: bool) -> list[bytes]:
        header = WireHeader.create("machine", self._header, include_prompts=include_prompts, num_kv_cache_blocks=self._num_blocks)
        return [encode_header(header), *(encode(event, include_prompts=include_prompts) for event in self._seen)]

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._told.note_added(request, prompt=None)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, status)
        for request in ended:
            assert request.finish_reason is not None
            self._told.note_finished(request.request_id, request.finish_reason, None, by="finish")
        return ended

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self._told.note_reset(reset_running_requests=reset_running_requests)
        return super().reset_prefix_cache(reset_running_requests)

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        if output is not None:
            self._out.append(output.step_id)
            self._told.publish_step(output, queue_depth=len(self._out), schedule_start=0.0, schedule_end=0.0)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        self._out.popleft()
        self._told.note_update()
        outputs = super().update_from_output(scheduler_output, output)
        for core_output in outputs:
            if core_output.finish_reason is not None:
                self._told.note_finished(core_output.request_id, core_output.finish_reason, core_output.stop_reason, by="ended")
        step_id = scheduler_output.step_id
        self._told.publish_result(step_id, outputs, result=output, masks=None, queue_depth=len(self._out), update_start=0.0, update_end=0.0)
        return outputs
