"""Costs fitted to one kind of traffic predict others: against the live engine, whose work takes known times on a virtual clock.

All but the time that work takes is real: the engine's loop, two steps in flight, streams, the load generator. What a step and a call
of the scheduler take is known, with noise, and it is not known to the fit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.recording.reader import read_recording
from aioengine.replay.recording import read_settings
from aioengine.testing import FakeExecutor, FakeTokenizer, VirtualTimeLoop, in_virtual_time, make_model_info
from aioengine_bench.client import EngineClient
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.load import LoadGenerator
from aioengine_bench.metrics import summarize
from aioengine_bench.simulate.arrivals import Arrival, block_hashes
from aioengine_bench.simulate.cost import LinearCost, StepFeatures, fit
from aioengine_bench.simulate.plan import Plan
from aioengine_bench.simulate.run import DetailedRecorder
from aioengine_bench.simulate.run_plan import run_plan
from aioengine_bench.simulate.traces import read_trace
from aioengine_bench.specs import SamplingSpec
from tests.covering import LEFT_TO_CI

AZURE = Path(__file__).with_name("data") / "azure_excerpt.csv"
BLOCK_SIZE = 16
KEYS = ("median_ttft_ms", "p90_ttft_ms", "median_tpot_ms", "median_e2el_ms")
# About those of a small model on two cores: a step, a token, a request, a sampled one, a pair of tokens, a token of context.
COST = LinearCost((2.5e-3, 2.2e-4, 1.5e-4, 2e-4, 1.2e-7, 4e-7))
SCHEDULE_S, UPDATE_S = 2e-4, 5e-4
Traffic = list[tuple[float, list[int], int]]  # when, prompt, tokens of the answer


class CostedExecutor(FakeExecutor):
    """Each step takes what COST says, give or take 5 %."""

    def __init__(self) -> None:
        shape = {"num_layers": 30, "num_heads": 9, "head_dim": 64, "layer_windows": ()}  # SmolLM2-135M's
        info = dataclasses.replace(make_model_info(max_position_embeddings=8192), **shape)  # type: ignore[arg-type]
        super().__init__(num_blocks=4096, block_size=BLOCK_SIZE, in_loop=True, model_info=info)
        self._features = StepFeatures()
        self._noise = random.Random(7)
        self._seconds: dict[int, float] = {}

    def _time_of(self, output: SchedulerOutput) -> float:
        seconds = COST(self._features(output)[0]) * self._noise.gauss(1.0, 0.05) if output.total_num_scheduled_tokens else 0.0
        self._seconds[output.step_id] = seconds
        return seconds

    def _execute(self, output: SchedulerOutput) -> None:
        super()._execute(output)
        step = self._executed[-1]
        self._executed[-1] = dataclasses.replace(step, execute_start=step.execute_end - self._seconds.pop(output.step_id))


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(97, 123) for _ in range(length)]


def make_traffic(kind: str) -> Traffic:
    """In tokens as the workloads of `bench compare`, and the first minutes of the Azure trace at an eighth of its rate."""
    rng = random.Random(kind)
    if kind == "mixed":
        return [(0.0, prompt(rng, rng.randint(16, 400)), rng.randint(8, 150)) for _ in range(64)]
    if kind == "shared_prefix":
        shared = prompt(rng, 512)
        return [(0.0, shared + prompt(rng, rng.randint(16, 48)), 64) for _ in range(32)]
    if kind == "long":
        return [(0.0, prompt(rng, 1024), 32) for _ in range(8)]
    return [(a.time * 8, prompt(rng, a.prompt_len), a.max_tokens) for a in read_trace(AZURE).arrivals[:40]]


def run_live(kind: str, *, record: Path | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures of the engine, by the virtual clock."""

    @in_virtual_time
    async def run() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)

        def takes(function: Any, seconds: float) -> Any:
            def call(*args: Any) -> Any:
                result = function(*args)
                if result is not None:
                    loop._jump(seconds)
                return result

            return call

        with monkeypatch.context() as patch:
            patch.setattr(time, "perf_counter", loop.time)
            patch.setattr(Scheduler, "schedule", takes(Scheduler.schedule, SCHEDULE_S))
            patch.setattr(Scheduler, "update_from_output", takes(Scheduler.update_from_output, UPDATE_S))
            engine = AsyncEngine(executor=CostedExecutor(), tokenizer=FakeTokenizer(), record=record, block_size=BLOCK_SIZE)
            async with engine:
                traffic = make_traffic(kind)
                requests = [BenchRequest(token_ids, max_tokens) for _, token_ids, max_tokens in traffic]
                client = EngineClient(engine, SamplingSpec())
                load = await LoadGenerator(client).run(requests, [due for due, _, _ in traffic])
        return summarize(load.records, duration=load.duration, percentiles=(90,))

    return run()


def predict(kind: str, plan: Plan) -> dict[str, Any]:
    arrivals = [
        Arrival(index, due, len(token_ids), max_tokens, block_hashes=block_hashes(token_ids, BLOCK_SIZE))
        for index, (due, token_ids, max_tokens) in enumerate(make_traffic(kind))
    ]
    recorder = DetailedRecorder()
    run_plan(plan, arrivals, recorder)
    return summarize(recorder.records, percentiles=(90,))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The settings of the engine, and costs from a recording of "mixed" alone."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        run_live("mixed", record=path, monkeypatch=patch)
    recording = read_recording(path)
    settings = read_settings(recording.header)
    cost, host, error = fit(recording)
    assert error < 0.06, "the noise, and no more"
    assert host.schedule_s == pytest.approx(SCHEDULE_S, rel=0.01)
    assert host.update_s == pytest.approx(UPDATE_S, rel=0.01)
    return Plan(settings.scheduler, settings.cache, settings.num_kv_cache_blocks, cost, host)


def compare(live: dict[str, Any], predicted: dict[str, Any], keys: Sequence[str] = KEYS) -> dict[str, float]:
    return {key: predicted[key] / live[key] - 1 for key in keys}


@pytest.mark.parametrize("kind", ["shared_prefix", "long", *(pytest.param(kind, marks=LEFT_TO_CI) for kind in ("mixed", "azure"))])
def test_costs_fitted_to_mixed_traffic_predict_others_within_a_tenth(fitted: Plan, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = run_live(kind, record=None, monkeypatch=monkeypatch)
    errors = compare(live, predict(kind, fitted))
    print({key: f"{error:+.1%} of {live[key]:.1f}" for key, error in errors.items()})
    assert live["failed"] == 0
    assert max(map(abs, errors.values())) < 0.1, errors
