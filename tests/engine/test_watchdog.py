"""`step_timeout_s`: a step that does not come back ends the engine, with a message that says which, and nothing hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine import EngineDeadError, SamplingParams, StepTimeoutError
from aioengine.testing import FakeExecutor

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def stream_to_the_end(engine: Any, prompt: Any, **options: Any) -> None:
    async for _ in engine.generate(prompt, ENDLESS, **options):
        pass


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine.engine.life._STUCK_EXECUTOR_SHUTDOWN_S", 0.1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("phase", ["execute", "sample"])
@pytest.mark.parametrize("step", [1, 4])
async def test_a_step_that_never_returns(start_rig: Any, caplog: pytest.LogCaptureFixture, phase: Any, step: int, overlap: bool) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.hang_at(step, phase=phase, through_shutdown=True)
    try:
        async with start_rig(executor, step_timeout_s=0.1, async_scheduling=overlap, max_num_seqs=2) as rig:
            streams = [stream_to_the_end(rig.engine, [index], request_id=f"r{index}") for index in range(3)]
            results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)
            for error in results:
                assert isinstance(error, EngineDeadError)
                assert isinstance(error.__cause__, StepTimeoutError)
                assert f"the worker has been in step {step} for " in str(error)
                assert "step_timeout_s is 0.1; the requests of the step: 'r0'" in str(error)
            with pytest.raises(EngineDeadError, match=f"in step {step}"):
                rig.engine.check_health()
            with pytest.raises(EngineDeadError):
                await stream_to_the_end(rig.engine, [1])
            start = time.perf_counter()
            await rig.engine.shutdown()
            assert time.perf_counter() - start < 15, "it does not wait for the worker's thread"
        assert "the executor has not shut down within 0.1 s" in caplog.text
        assert f"while it handled step {step}:" in caplog.text
    finally:
        executor.release()


async def test_slow_steps_and_slow_loops_are_no_reason(start_rig: Any) -> None:
    """Each step takes a tenth of the limit and all of them many times that; and a loop that is blocked blames nobody."""
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4, forward_s=0.05), step_timeout_s=0.5) as rig:
        stream = rig.engine.generate([1], SamplingParams(temperature=0, max_tokens=15, ignore_eos=True))
        await anext(stream)
        time.sleep(0.8)  # noqa: ASYNC251 - a program that does not let the loop run
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "length"
        await rig.settle()


async def test_the_clock_of_a_step_starts_when_the_worker_turns_to_it(start_rig: Any) -> None:
    """With two steps in flight the second one is submitted long before: that time is not its own."""
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4, forward_s=0.3), step_timeout_s=0.55) as rig:
        assert rig.engine.resolved_config.scheduler.max_concurrent_batches == 2
        (output,) = await rig.engine.generate_batch([[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert output.finish_reason == "length"


async def test_an_idle_engine_has_no_timer(start_rig: Any, wait_for: Callable[..., Any]) -> None:
    async with start_rig(step_timeout_s=0.2) as rig:
        await rig.engine.generate_batch([[1, 2]])
        await rig.settle()
        core = rig.engine._life.started().core
        await wait_for(lambda: core._watchdog._timer is None)
        await asyncio.sleep(0.3)
        rig.engine.check_health()
        assert core._watchdog._timer is None
        # And it watches again afterwards.
        rig.executor.hang_at(rig.executor.outputs[-1].step_id + 1)
        with pytest.raises(EngineDeadError, match="the worker has been in step"):
            await asyncio.wait_for(stream_to_the_end(rig.engine, [1]), 30)


async def test_a_paused_engine_is_not_stuck(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=129, block_size=4), step_timeout_s=0.2) as rig:
        rig.engine.pause()
        task = asyncio.create_task(rig.engine.generate_batch([[1]], SamplingParams(max_tokens=3, ignore_eos=True)))
        await asyncio.sleep(0.5)
        rig.engine.resume()
        (output,) = await task
        assert output.finish_reason == "length"


_STUCK_PROGRAM = """
import asyncio
from aioengine import AsyncEngine, EngineDeadError, SamplingParams
from aioengine.testing import FakeExecutor

async def main():
    executor = FakeExecutor()
    executor.hang_at(2, through_shutdown=True)
    async with AsyncEngine(executor=executor, step_timeout_s=0.1) as engine:
        try:
            async for _ in engine.generate([1, 2, 3], SamplingParams(max_tokens=50)):
                pass
        except EngineDeadError as error:
            print(type(error.__cause__).__name__)

asyncio.run(main())
print("end")
"""


def test_a_process_ends_although_its_worker_never_does() -> None:
    result = subprocess.run([sys.executable, "-c", _STUCK_PROGRAM], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert result.stdout.split() == ["StepTimeoutError", "end"], result.stderr
    assert result.returncode == 0
