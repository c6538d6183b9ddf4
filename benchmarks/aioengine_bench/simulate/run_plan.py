"""A plan, carried out: its replicas, their traffic, and where asked a recording of the first of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from aioengine.events.bus import StepBus
from aioengine.events.recording.locked_file import RecordingFile
from aioengine.events.step_event import Event
from aioengine.events.wire import WireHeader, encode, encode_header
from aioengine.testing import make_model_info
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.simulate.plan import Plan
from aioengine_bench.simulate.replica import Replica
from aioengine_bench.simulate.run import Recorder, Routing, SimulatedRun, simulate

MAX_MODEL_LEN = 1 << 20
"""Of the model that is simulated: the settings limit it."""


def run_plan(
    plan: Plan,
    arrivals: Iterable[Arrival],
    recorder: Recorder,
    *,
    routing: Routing = "round_robin",
    record: str | None = None,
    on_arrival: Callable[[], object] | None = None,
) -> tuple[SimulatedRun, list[Replica]]:
    """One simulation, told to `recorder`. record: write the events of the first replica there, in virtual time. Raises ConfigError."""
    file, bus = None, None
    if record is not None:
        file, bus = RecordingFile(record), StepBus()
        config = {
            "model": dataclasses.asdict(make_model_info(max_position_embeddings=MAX_MODEL_LEN)),
            "scheduler": dataclasses.asdict(plan.scheduler),
            "cache": dataclasses.asdict(plan.cache),
        }
        header = WireHeader.create("simulated", config, num_kv_cache_blocks=plan.num_kv_cache_blocks)
        file.begin(encode_header(dataclasses.replace(header, unix_time=0.0, perf_counter=0.0)))
        write = file.write

        def observe(event: Event) -> None:
            pending = memoryview(encode(event))
            while pending:
                pending = pending[write(pending) :]

        bus.add_observer(observe)
    try:
        replicas = [
            Replica(
                plan.scheduler,
                cache=plan.cache,
                num_kv_cache_blocks=plan.num_kv_cache_blocks,
                cost=plan.cost,
                host=plan.host,
                on_outputs=recorder.take,
                bus=bus if index == 0 else None,
            )
            for index in range(plan.replicas)
        ]
        return simulate(arrivals, replicas, recorder=recorder, routing=routing, on_arrival=on_arrival), replicas
    finally:
        if file is not None:
            file.close()
