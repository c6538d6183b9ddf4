"""`aioengine bench overhead`: what the engine itself costs a step, with no model behind it.

The real step loop runs on an executor that computes nothing. Its own events and two timed seams (the bus, the output
processor) tell where the time of a step goes: schedule, update, output processing, publishing, and the rest (building
events, futures, the event loop). What the executor takes is subtracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aioengine.core.scheduler import Scheduler
from aioengine.engine.loop.engine_core import EngineCore, RequestEnd
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.output_processor import OutputProcessor
from aioengine.engine.processed_input import ProcessedInput
from aioengine.events.address import socket_folder
from aioengine.events.bus import StepBus
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.server import EventServer
from aioengine.events.step_event import Event, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.outputs import EngineCoreOutput
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeTokenizer
from aioengine_bench import console
from aioengine_bench.metrics import percentile
from aioengine_bench.null_executor import NullExecutor
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.settings import OverheadSettings
from aioengine_bench.viewer import watching_process

Mode = Literal["decode", "mixed"]
Watcher = Literal["nobody", "subscriber", "recorder", "dashboard"]

MODES: tuple[Mode, ...] = ("decode", "mixed")
WATCHERS: tuple[Watcher, ...] = ("nobody", "subscriber", "recorder", "dashboard")
PHASES = ("schedule", "update", "output", "publish", "rest", "total")

_PROMPT_LEN = 64
_BLOCK_SIZE = 16
_MIXED_MAX_TOKENS = 32  # so that in every step a thirty-second of the requests end and others begin
_NUM_WARMUP_STEPS = 20


_RESULT_KEYS = ("date", "benchmark", "num_steps", "rows", "growth", "interrupted", "environment")


@dataclass(frozen=True, slots=True)
class OverheadCase:
    """One row. decode: every request takes one token a step. mixed: requests end and others begin all the time.

    with_consumers: a task a request takes every output, as programs do; else outputs are only put into their collectors.
    """

    num_reqs: int
    mode: Mode = "decode"
    watcher: Watcher = "nobody"
    async_scheduling: bool = True
    with_consumers: bool = False
    forward_s: float = 0.0


class TimedBus(StepBus):
    """Times publishing, and takes the other times from the events themselves. Sets `done` after `num_steps` steps."""

    __slots__ = ("_num_steps", "done", "publish_s", "schedule_s", "step_ends", "update_s")

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.done = asyncio.Event()
        self.publish_s: list[float] = []  # one a step: its two events
        self.schedule_s: list[float] = []
        self.update_s: list[float] = []
        self.step_ends: list[float] = []
        self._num_steps = num_steps

    def publish(self, event: Event) -> None:
        start = time.perf_counter()
        super().publish(event)
        end = time.perf_counter()
        if isinstance(event, StepEvent):
            self.schedule_s.append(event.schedule_end - event.schedule_start)
            self.publish_s.append(end - start)
        elif isinstance(event, StepResultEvent):
            self.update_s.append(event.update_end - event.update_start)
            self.publish_s[len(self.step_ends)] += end - start  # steps come back in order
            self.step_ends.append(end)
            if len(self.step_ends) == self._num_steps:
                self.done.set()


class OverheadRig:
    """The core of an engine with `case.num_reqs` requests that run for ever, or follow one another."""

    def __init__(self, case: OverheadCase, *, num_steps: int) -> None:
        self.case = case
        self.executor = NullExecutor(forward_s=case.forward_s)
        self.bus = TimedBus(num_steps)
        self.output_s: list[float] = []
        self._max_tokens = _MIXED_MAX_TOKENS if case.mode == "mixed" else num_steps + 1000
        self._numbers = itertools.count()
        self._tokenizer = FakeTokenizer()
        self._processor = OutputProcessor(self._tokenizer)
        self._consumers: set[asyncio.Task[None]] = set()
        blocks_a_request = -(-(_PROMPT_LEN + min(self._max_tokens, num_steps + 10)) // _BLOCK_SIZE) + 1
        self.core = EngineCore(
            Scheduler(
                SchedulerConfig(
                    max_num_seqs=case.num_reqs,
                    max_num_batched_tokens=case.num_reqs + max(512, 2 * case.num_reqs),
                    max_model_len=_PROMPT_LEN + self._max_tokens + 1,
                    async_scheduling=case.async_scheduling,
                ),
                cache=CacheConfig(block_size=_BLOCK_SIZE),
                num_kv_cache_blocks=case.num_reqs * 2 * blocks_a_request + 2 + (self._max_tokens // _BLOCK_SIZE),
            ),
            self.executor,
            bus=self.bus,
            on_outputs=self._on_outputs,
            on_failure=self._on_failure,
        )

    def add_request(self) -> None:
        number = next(self._numbers)
        # The first four tokens spell the number: no two prompts share a cached block.
        token_ids = [32 + (number // 95 ** (index % 4) + index * 7) % 95 for index in range(_PROMPT_LEN)]
        request_id = f"request-{number}"
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=self._max_tokens, ignore_eos=True)
        processed = ProcessedInput(token_ids, params, None)
        collector = self._processor.add_request(request_id, request_id, processed, now=time.perf_counter(), final_only=False)
        self.core.add_request(Request(request_id, token_ids, sampling_params=params))
        if self.case.with_consumers:
            task = asyncio.get_running_loop().create_task(_consume(collector))
            self._consumers.add(task)
            task.add_done_callback(self._consumers.discard)

    def _on_outputs(self, outputs: list[EngineCoreOutput]) -> list[RequestEnd]:
        start = time.perf_counter()
        ends = self._processor.process_outputs(outputs)
        self.output_s.append(time.perf_counter() - start)
        for output in outputs:
            if output.finish_reason is not None:
                self.add_request()
        return ends

    def _on_failure(self, error: BaseException) -> None:
        self.bus.done.set()

    async def close(self) -> None:
        await self.core.stop()
        self._processor.abort([f"request-{number}" for number in range(next(self._numbers))])
        for task in list(self._consumers):
            task.cancel()
        await asyncio.gather(*self._consumers, return_exceptions=True)
        self.executor.shutdown()
        self.bus.close()


async def _consume(collector: OutputCollector) -> None:
    while not (await collector.take()).finished:
        pass


@contextlib.asynccontextmanager
async def _watched(rig: OverheadRig) -> AsyncIterator[None]:
    """The watcher of the case, for the time of the block."""
    header = WireHeader.create("none")
    with socket_folder() as folder:
        match rig.case.watcher:
            case "nobody":
                yield
            case "subscriber":
                with rig.bus.subscribe():
                    yield
            case "recorder":
                with StepRecorder(Path(folder) / "steps.jsonl", header) as recorder:
                    rig.bus.add_observer(recorder)
                    yield
            case "dashboard":
                server = EventServer(Path(folder) / "socket")
                await server.start(bus=rig.bus, header=header, snapshot=rig.core.make_snapshot)
                async with watching_process(str(Path(folder) / "socket")):
                    yield
                await server.close()


async def run_case(case: OverheadCase, *, num_steps: int) -> dict[str, Any]:
    """One row: microseconds a step, by phase."""
    total_steps = num_steps + _NUM_WARMUP_STEPS
    rig = OverheadRig(case, num_steps=total_steps)
    gc.collect()
    async with _watched(rig):
        for _ in range(case.num_reqs):
            rig.add_request()
        rig.core.start()
        await rig.bus.done.wait()
        error = rig.core.error
        await rig.close()
    if error is not None:
        raise error
    return {
        "num_reqs": case.num_reqs,
        "mode": case.mode,
        "watcher": case.watcher,
        "async_scheduling": case.async_scheduling,
        "with_consumers": case.with_consumers,
        "forward_ms": case.forward_s * 1000,
        **_phases(rig, slice(_NUM_WARMUP_STEPS, total_steps)),
    }


def _phases(rig: OverheadRig, window: slice) -> dict[str, Any]:
    """Microseconds of each phase, of the rest, and of a whole step without what the executor took.

    The 10th percentile of the steps: an undisturbed step, where a median of a busy machine tells of its other jobs.
    """
    bus = rig.bus
    # Where steps overlap, a step is taken in after the next but one was scheduled: those two make up one period.
    ahead = 1 if rig.case.async_scheduling else 0
    executor_s = rig.executor.step_s or [0.0] * (len(bus.schedule_s) + 1)
    steps = [
        _StepTimes(
            schedule=bus.schedule_s[index + ahead],
            update=bus.update_s[index],
            output=rig.output_s[index],
            publish=bus.publish_s[index],
            total=bus.step_ends[index] - bus.step_ends[index - 1] - executor_s[index + ahead],
        )
        for index in range(max(1, window.start), min(window.stop, len(bus.schedule_s) - ahead))
    ]
    figures = {name: _quiet_us([getattr(step, name) for step in steps]) for name in ("schedule", "update", "output", "publish", "total")}
    total = figures.pop("total")
    return {
        **{f"{name}_us": value for name, value in figures.items()},
        # With a forward to wait for, most of the rest would be waiting.
        "rest_us": None if rig.case.forward_s else _quiet_us([step.rest for step in steps]),
        "total_us": total,
        "total_us_per_request": total / rig.case.num_reqs,
        "median_total_us": (percentile([step.total for step in steps], 50) or 0.0) * 1e6,
    }


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """One period of the loop, in seconds."""

    schedule: float
    update: float
    output: float
    publish: float
    total: float

    @property
    def rest(self) -> float:
        return max(0.0, self.total - self.schedule - self.update - self.output - self.publish)


def _quiet_us(seconds: Sequence[float]) -> float:
    value = percentile(seconds, 10)
    assert value is not None
    return value * 1e6


def cases(settings: OverheadSettings) -> list[OverheadCase]:
    rows = [OverheadCase(num_reqs, mode) for mode in MODES for num_reqs in settings.num_reqs]
    largest = max((n for n in settings.num_reqs if n <= 256), default=max(settings.num_reqs))
    rows += [OverheadCase(largest, watcher=watcher) for watcher in WATCHERS[1:]]
    rows += [OverheadCase(num_reqs, with_consumers=True) for num_reqs in settings.num_reqs]
    rows += [OverheadCase(largest, async_scheduling=overlap, forward_s=settings.forward_ms / 1000) for overlap in (True, False)]
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the plain decode rows grow: microseconds a further request between the two largest sizes and the two before.

    Linear growth gives a ratio of about 1 (caches make it somewhat more); quadratic growth would give the ratio of sizes.
    """
    plain = sorted(
        (row["num_reqs"], row["total_us"])
        for row in rows
        if row["mode"] == "decode" and row["watcher"] == "nobody" and not row["with_consumers"] and not row["forward_ms"]
    )
    slopes = [(t2 - t1) / (n2 - n1) for (n1, t1), (n2, t2) in itertools.pairwise(plain) if n2 > n1]
    ratio = slopes[-1] / slopes[-2] if len(slopes) > 1 and slopes[-2] > 0 else None
    return {"us_per_further_request": slopes, "last_ratio": ratio}


async def overhead(settings: OverheadSettings) -> bool:
    """Run, print, save. True if it was interrupted: the result, saved all the same, is partial."""
    date = timestamp()
    default_name = file_name(["overhead"], date)
    check_saving(settings.save, _RESULT_KEYS, default_name=default_name)
    rows: list[dict[str, Any]] = []
    interrupted = False
    todo = cases(settings)
    with console.progress_bar(len(todo), description="overhead", unit="case", disable=settings.disable_progress) as bar:
        try:
            for case in todo:
                rows.append(await run_case(case, num_steps=settings.num_steps))
                bar.update()
        except asyncio.CancelledError:
            interrupted = True
    result: dict[str, Any] = {
        "date": date,
        "benchmark": "overhead",
        "num_steps": settings.num_steps,
        "rows": rows,
        "growth": growth(rows),
        "interrupted": interrupted,
        "environment": environment(),
    }
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    print(format_rows(rows), file=out)
    slopes = ", ".join(f"{slope:.2f}" for slope in result["growth"]["us_per_further_request"])
    print(f"\nDecode, nobody watching: {slopes or '-'} us for each further request, from size to size.", file=out)
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)
    return interrupted


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["case (us a step)", "requests", *PHASES, "us/request", "median"]
    lines = []
    for row in rows:
        name = row["mode"]
        if row["watcher"] != "nobody":
            name += f", {row['watcher']}"
        if row["with_consumers"]:
            name += ", consumers"
        if row["forward_ms"]:
            name += f", {row['forward_ms']:g} ms forward, overlap {'on' if row['async_scheduling'] else 'off'}"
        values = [console.number(row[f"{phase}_us"], 1) for phase in PHASES]
        lines.append(
            [name, str(row["num_reqs"]), *values, console.number(row["total_us_per_request"], 2), console.number(row["median_total_us"], 1)]
        )
    return console.table(columns, lines)
