"""One engine on a virtual clock: the real scheduler, with as many steps in flight as `EngineCore` has, and costs in place of work."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.loop.core_events import CoreEvents
from aioengine.errors import InvalidRequestError
from aioengine.events.bus import StepBus
from aioengine.outputs import EngineCoreOutput, ModelRunnerOutput, WorkerTiming
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.simulate.cost import HostCost, StepCost, StepFeatures

_SAMPLED, _NOTHING = [1], list[int]()  # of every request in every step; nobody writes to them

OnOutputs = Callable[[list[EngineCoreOutput], float], None]


class Replica:
    """Owns a scheduler and its clock. Calls come in the order of their times; `next_time` says when it has to be called again."""

    def __init__(
        self,
        scheduler: SchedulerConfig,
        *,
        cache: CacheConfig,
        num_kv_cache_blocks: int,
        cost: StepCost,
        host: HostCost,
        on_outputs: OnOutputs,
        bus: StepBus | None = None,
    ) -> None:
        self.scheduler = Scheduler(scheduler, cache=cache, num_kv_cache_blocks=num_kv_cache_blocks)
        self.num_steps = 0
        self.num_outstanding_tokens = 0  # of requests that have not ended: prompts and outputs together
        self._block_size = cache.block_size
        self._depth = scheduler.max_concurrent_batches
        self._cost, self._host = cost, host
        self._on_outputs = on_outputs
        self._events = None if bus is None else CoreEvents(self.scheduler, bus, text_source=None)
        self._features = StepFeatures()
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, WorkerTiming]] = deque()
        self._worker_free = self._host_free = 0.0
        self._sizes: dict[str, int] = {}

    @property
    def next_time(self) -> float | None:
        """When the oldest step will have been taken in; None: nothing runs."""
        if not self._in_flight:
            return None
        return max(self._in_flight[0][2].execute_end + self._host.wake_s, self._host_free)

    def add(self, arrival: Arrival) -> str | None:
        """A request comes; `run` must follow. Returns why it can never run, or None."""
        if arrival.prompt_len >= self.scheduler.config.max_model_len:  # in words that are the same for all such requests: they are counted
            return f"the prompt is longer than max_model_len allows ({self.scheduler.config.max_model_len})"
        request = arrival.make_request(block_size=self._block_size)
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            return f"it needs more KV blocks than there are ({self.scheduler.kv_cache_manager.block_pool.num_total_blocks})"
        self._sizes[arrival.request_id] = arrival.prompt_len + arrival.max_tokens
        self.num_outstanding_tokens += arrival.prompt_len + arrival.max_tokens
        if self._events is not None:
            self._events.note_added(request, prompt=None)
        return None

    def run(self, now: float) -> None:
        """Schedule as many steps as may be in flight."""
        while len(self._in_flight) < self._depth:
            output = self.scheduler.schedule()
            if output is None:
                return
            start = max(now, self._host_free)
            end = self._host_free = start + self._host.schedule_s
            features, samples = self._features(output)
            execute_start = max(end, self._worker_free)
            self._worker_free = execute_start + (self._cost(features) if output.total_num_scheduled_tokens else 0.0)
            req_ids = list(samples)
            result = ModelRunnerOutput(
                req_ids,
                dict(zip(req_ids, range(len(req_ids)), strict=True)),
                [_SAMPLED if is_end else _NOTHING for is_end in samples.values()],
            )
            times = WorkerTiming(execute_start, self._worker_free, self._worker_free, self._worker_free)
            self._in_flight.append((output, result, times))
            self.num_steps += 1
            if self._events is not None:
                self._events.publish_step(output, queue_depth=len(self._in_flight), schedule_start=start, schedule_end=end)
            else:
                self.scheduler.drop_report()  # nobody reads it, and it must not pile up

    def update(self, now: float) -> None:
        """Take in the oldest step; `run` must follow."""
        output, result, times = self._in_flight.popleft()
        if self._events is not None:
            self._events.note_update()
        outputs = self.scheduler.update_from_output(output, result)
        update_end = self._host_free = max(now, self._host_free) + self._host.update_s
        for core_output in outputs:
            if core_output.finish_reason is not None:
                self.num_outstanding_tokens -= self._sizes.pop(core_output.request_id)
                if self._events is not None:
                    self._events.note_finished(core_output.request_id, core_output.finish_reason, core_output.stop_reason, by="ended")
        self._on_outputs(outputs, update_end)
        if self._events is not None:
            self._events.publish_result(
                output.step_id,
                outputs,
                result=dataclasses.replace(result, timing=times),
                masks=None,
                queue_depth=len(self._in_flight),
                update_start=now,
                update_end=update_end,
            )
        else:
            self.scheduler.drop_report()

    def num_cached_blocks_of(self, arrival: Arrival) -> int:
        """How many blocks of a prompt, from its beginning, the prefix cache has: for routing."""
        hashes = arrival.hashes(self._block_size)
        return len(self.scheduler.kv_cache_manager.find_hits(hashes, len(hashes))[0])
