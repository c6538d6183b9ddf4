"""Sources of events for tests of the dashboard: a made-up engine with a made-up clock, so that every screen is golden."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.sources.base import ItemStream, SourceStatus, StreamItem
from aioengine.events.step_event import FinishedInfo, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.request import RequestStatus
from aioengine.testing import FakeExecutor, make_request, make_scheduler
from aioengine_tui.model.state import DashboardState

BLOCK_SIZE = 4
BUDGET = 32
HEADER = WireHeader(
    engine_version="0.1.0",
    model="tiny",
    config={
        "worker": {"device": "cpu", "weights": "exact", "kv_cache_dtype": "float32"},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": BUDGET, "policy": "fcfs"},
        "cache": {"block_size": BLOCK_SIZE},
    },
    unix_time=0.0,
    perf_counter=1000.0,
)


class MadeUpEngine:
    """A real scheduler and the fake worker, step by step, on a clock of its own: 20 ms a step."""

    def __init__(self, *, num_blocks: int = 41, max_num_seqs: int = 8) -> None:
        self.scheduler = make_scheduler(
            num_kv_cache_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET
        )
        self.executor = FakeExecutor(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.executor.load_model().result()
        self.executor.initialize_kv_cache(num_blocks).result()
        self.now = HEADER.perf_counter
        self._added: list[RequestInfo] = []
        self._finished: list[FinishedInfo] = []
        self._num_output_tokens: dict[str, int] = {}

    def add(self, request_id: str, *, num_prompt_tokens: int, max_tokens: int, prompt: list[int] | None = None) -> None:
        request = make_request(prompt or num_prompt_tokens, request_id=request_id, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(request)
        self._added.append(RequestInfo(request_id, request.num_prompt_tokens, max_tokens, self.now))

    def abort(self, request_id: str) -> None:
        for request in self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED):
            self._finished.append(FinishedInfo(request.request_id, "abort", request.num_output_tokens))

    def run(self, num_steps: int) -> list[StreamItem]:
        """The events of up to `num_steps` steps; fewer when there is nothing left to do."""
        items: list[StreamItem] = []
        for _ in range(num_steps):
            output = self.scheduler.schedule()
            if output is None:
                break
            items += self._step(output)
        return items

    def _step(self, output: SchedulerOutput) -> list[StreamItem]:
        report, start = self.scheduler.take_report(), self.now
        added, self._added = self._added, []
        finished, self._finished = self._finished, []
        scheduled = StepEvent(
            output.step_id, start + 0.001, output, self.scheduler.make_stats(), report.admission_stop, BUDGET, report.block_changes,
            1, start, start + 0.001, added, finished, stopped_req_id=report.stopped_req_id, num_blocks_needed=report.num_blocks_needed,
        )  # fmt: skip
        self.executor.execute_model(output).result()
        sampled = self.executor.sample_tokens().result()
        outputs = self.scheduler.update_from_output(output, sampled)
        for o in outputs:
            self._num_output_tokens[o.request_id] = self._num_output_tokens.get(o.request_id, 0) + len(o.new_token_ids)
        ended = [
            FinishedInfo(o.request_id, o.finish_reason, self._num_output_tokens[o.request_id], o.stop_reason)
            for o in outputs
            if o.finish_reason is not None
        ]
        self.now = start + 0.020
        result = StepResultEvent(
            output.step_id, self.now, {o.request_id: len(o.new_token_ids) for o in outputs if o.new_token_ids},
            self.scheduler.make_stats(), self.scheduler.take_report().block_changes, 0,
            start + 0.001, start + 0.016, start + 0.016, start + 0.018, start + 0.018, self.now, ended,
        )  # fmt: skip
        return [scheduled, result]


def busy_items() -> list[StreamItem]:
    """An engine with too few blocks: chunks, a prefix-cache hit, a preemption, an abort, ended requests and waiting ones."""
    engine = MadeUpEngine()
    shared = list(range(1, 21))
    engine.add("alpha", num_prompt_tokens=20, max_tokens=40, prompt=shared)
    items = engine.run(3)
    engine.add("beta", num_prompt_tokens=24, max_tokens=30, prompt=[*shared, 101, 102, 103, 104])
    engine.add("gamma", num_prompt_tokens=50, max_tokens=20)
    engine.add("delta", num_prompt_tokens=8, max_tokens=4)
    items += engine.run(8)
    for name in ("epsilon", "zeta", "eta", "theta"):
        engine.add(name, num_prompt_tokens=30, max_tokens=25)
    items += engine.run(12)
    engine.abort("gamma")
    return [HEADER, SourceStatus("live", "test"), *items, *engine.run(4)]


def busy_state() -> DashboardState:
    return folded(busy_items())


def folded(items: Sequence[StreamItem]) -> DashboardState:
    state = DashboardState()
    for item in items:
        state.apply(item)
    return state


class ListSource(ItemStream):
    """A StepSource that yields the given items at once and then waits for what `push()` brings."""

    address = "test"

    def __init__(self, items: Sequence[StreamItem] = (), *, playback: Any = None, engine: Any = None) -> None:
        self._queue: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.push(*items)
        self.playback = playback
        self.engine = engine
        self.clock = 0.0
        self.is_open = False

    def push(self, *items: StreamItem) -> None:
        for item in items:
            self._queue.put_nowait(item)

    def now(self) -> float:
        return self.clock

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def __anext__(self) -> StreamItem:
        return await self._queue.get()
