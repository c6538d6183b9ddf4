"""Results that arrive later: their order, their errors, and that nobody waits who should not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.errors import EngineDeadError
from aioengine.executor.base import GrammarOutput
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ModelInfo
from aioengine.worker.pipeline.async_output import AsyncOutput, OutputThread

INFO = ModelInfo("tiny", "nowhere", "TinyModel", 10, 64, 1, 1, 1, 8, "float32", frozenset())
CONFIG = EngineConfig(device="cpu").resolve(INFO, cuda_available=False, free_memory_bytes=1 << 30)


def output(step: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(["r"], {"r": 0}, [[step]])


class DeviceStep:
    """A step on a device that ends when it is told to; `wait` is what sleeps in its event."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.event = threading.Event()
        self.error: Exception | None = None
        self.waited_in: str | None = None

    def wait(self) -> int:
        self.waited_in = threading.current_thread().name
        assert self.event.wait(10)
        if self.error is not None:
            raise self.error
        return self.step


class LazyWorker:
    """Enqueues and never waits: every sampled step is a `DeviceStep`, but for those in `at_once`."""

    def __init__(self) -> None:
        self.steps: list[DeviceStep] = []
        self.executed: list[int] = []
        self.at_once: set[int] = set()
        self.was_shut_down = False

    def load_model(self) -> None: ...

    def determine_num_kv_cache_blocks(self) -> int:
        return 2

    def initialize_kv_cache(self, num_blocks: int) -> None: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.executed.append(scheduler_output.step_id)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[Any]:
        step = self.executed[-1]
        if step in self.at_once:
            return output(step)
        self.steps.append(DeviceStep(step))
        return AsyncOutput(self.steps[-1], output)

    def shutdown(self) -> None:
        assert all(step.event.is_set() for step in self.steps), "the worker went while its device was at work"
        self.was_shut_down = True


@pytest.fixture
def worker() -> LazyWorker:
    return LazyWorker()


@pytest.fixture
def executor(worker: LazyWorker) -> Iterator[UniProcExecutor]:
    executor = UniProcExecutor(CONFIG, worker_factory=lambda: worker)
    yield executor
    for step in worker.steps:
        step.event.set()
    executor.shutdown()


def run_step(executor: UniProcExecutor, step: int) -> tuple[Any, Any]:
    return executor.execute_model(SchedulerOutput(step, [], CachedRequestData(), {}, 0)), executor.sample_tokens()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited 5 s in vain"
        time.sleep(0.001)


def test_the_worker_goes_on_while_the_device_is_at_work(executor: UniProcExecutor, worker: LazyWorker) -> None:
    futures = [run_step(executor, step)[1] for step in (1, 2)]
    wait_until(lambda: worker.executed == [1, 2])
    assert not any(future.done() for future in futures)
    worker.steps[0].event.set()
    assert futures[0].result(5) == output(1)
    assert not futures[1].done()
    worker.steps[1].event.set()
    assert futures[1].result(5) == output(2)
    assert {step.waited_in for step in worker.steps} == {"aioengine-worker-output"}


def test_results_come_in_the_order_of_the_steps(executor: UniProcExecutor, worker: LazyWorker) -> None:
    """Also when a later step is done first, and for a step that had nothing to wait for."""
    worker.at_once = {3}
    done: list[int] = []
    futures = [run_step(executor, step)[1] for step in (1, 2, 3, 4)]
    for step, future in enumerate(futures, start=1):
        future.add_done_callback(lambda _, step=step: done.append(step))
    wait_until(lambda: len(worker.steps) == 3)
    for device_step in reversed(worker.steps):
        device_step.event.set()
    assert [future.result(5).sampled_token_ids[0][0] for future in futures] == [1, 2, 3, 4]
    wait_until(lambda: len(done) == 4)
    assert done == [1, 2, 3, 4]


def test_a_worker_that_waits_by_itself_needs_no_second_thread(executor: UniProcExecutor, worker: LazyWorker) -> None:
    worker.at_once = {1, 2}
    assert [run_step(executor, step)[1].result(5) for step in (1, 2)] == [output(1), output(2)]
    assert not any(thread.name == "aioengine-worker-output" for thread in threading.enumerate())


def test_an_error_on_the_device_fails_its_step_and_all_later_ones(executor: UniProcExecutor, worker: LazyWorker) -> None:
    (_, first), (_, second) = run_step(executor, 1), run_step(executor, 2)
    wait_until(lambda: len(worker.steps) == 2)
    worker.steps[1].error = RuntimeError("an illegal memory access was encountered")
    for step in worker.steps:
        step.event.set()
    assert first.result(5) == output(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        second.result(5)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        executor.check_health()
    for future in run_step(executor, 3):
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            future.result(5)


def test_shutdown_waits_for_the_device_and_cancels_what_was_not_enqueued(executor: UniProcExecutor, worker: LazyWorker) -> None:
    _, on_the_device = run_step(executor, 1)
    wait_until(lambda: len(worker.steps) == 1)
    gate = threading.Event()
    executor.collective_rpc(lambda _: gate.wait(5))
    _, waiting = run_step(executor, 2)
    threading.Timer(0.05, gate.set).start()
    threading.Timer(0.1, worker.steps[0].event.set).start()
    executor.shutdown()
    assert on_the_device.result(0) == output(1)
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert worker.was_shut_down
    assert not any(thread.name == "aioengine-worker-output" for thread in threading.enumerate())


def test_the_output_thread_keeps_nothing_alive_while_it_sleeps() -> None:
    import gc
    import weakref
    from concurrent.futures import Future

    thread = OutputThread(on_failure=lambda error: None)
    step = DeviceStep(1)
    step.event.set()
    reference = weakref.ref(step)
    future: Future[ModelRunnerOutput] = Future()
    future.set_running_or_notify_cancel()
    thread.resolve(AsyncOutput(step, output), future)
    assert future.result(5) == output(1)
    del step
    wait_until(lambda: gc.collect() >= 0 and reference() is None)
    thread.shutdown()
