from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.errors import EngineDeadError
from aioengine.executor.base import Executor, GrammarOutput
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ModelInfo, ResolvedConfig

INFO = ModelInfo("tiny", "nowhere", "TinyModel", 10, 64, 1, 1, 1, 8, "float32", frozenset())
CONFIG: ResolvedConfig = EngineConfig(device="cpu").resolve(INFO, cuda_available=False, free_memory_bytes=1 << 30)


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, [], CachedRequestData(), {}, 0)


class RecordingWorker:
    """Notes what it is asked, and in which thread; can be made to fail or to wait."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads = {threading.get_ident()}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail_at: int | None = None

    def _note(self, call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def load_model(self) -> None:
        self._note("load")

    def determine_num_kv_cache_blocks(self) -> int:
        self._note("determine")
        return 12

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self._note(("initialize", num_blocks))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        self._note(("execute", scheduler_output.step_id))
        if scheduler_output.step_id == self.fail_at:
            raise ValueError("the forward broke")

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput:
        self._note(("sample", grammar_output))
        return ModelRunnerOutput(["r"], {"r": 0}, [[len(self.calls)]])

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def add(self, a: int, b: int) -> int:
        return a + b


class Setup:
    def __init__(self) -> None:
        self.worker: RecordingWorker | None = None
        self.executor = UniProcExecutor(CONFIG, worker_factory=self._make)

    def _make(self) -> RecordingWorker:
        self.worker = RecordingWorker()
        return self.worker

    def started(self) -> RecordingWorker:
        self.executor.load_model().result(5)
        assert self.worker is not None
        return self.worker


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    if setup.worker is not None:
        setup.worker.gate.set()
    setup.executor.shutdown()


def test_is_an_executor(setup: Setup) -> None:
    assert isinstance(setup.executor, Executor)


def test_start_up_and_steps_run_in_order_in_one_other_thread(setup: Setup) -> None:
    executor = setup.executor
    grammar = GrammarOutput({})
    futures: list[Any] = [executor.load_model(), executor.determine_num_kv_cache_blocks(), executor.initialize_kv_cache(12)]
    for step_id in range(1, 4):
        futures += [executor.execute_model(step(step_id)), executor.sample_tokens(grammar if step_id == 2 else None)]
    results = [future.result(5) for future in futures]
    assert setup.worker is not None
    assert setup.worker.calls == [
        "load",
        "determine",
        ("initialize", 12),
        ("execute", 1),
        ("sample", None),
        ("execute", 2),
        ("sample", grammar),
        ("execute", 3),
        ("sample", None),
    ]
    assert results[1] == 12
    assert [results[i].sampled_token_ids for i in (4, 6, 8)] == [[[5]], [[7]], [[9]]]
    assert len(setup.worker.threads) == 1
    assert threading.get_ident() not in setup.worker.threads
    executor.check_health()


def test_submitting_does_not_wait_for_the_worker(setup: Setup) -> None:
    worker = setup.started()
    worker.gate.clear()
    futures = [setup.executor.execute_model(step(i)) for i in range(50)]
    assert worker.entered.wait(5)
    assert not any(future.done() for future in futures)
    worker.gate.set()
    assert all(future.result(5) is None for future in futures)


def test_a_failed_step_fails_itself_and_every_later_step(setup: Setup) -> None:
    worker = setup.started()
    worker.fail_at = 2
    futures: list[Any] = []
    for step_id in (1, 2, 3):
        futures += [setup.executor.execute_model(step(step_id)), setup.executor.sample_tokens()]
    assert futures[1].result(5).req_ids == ["r"]
    with pytest.raises(ValueError, match="the forward broke") as broken:
        futures[2].result(5)
    for future in futures[3:]:
        with pytest.raises(EngineDeadError, match="the forward broke") as dead:
            future.result(5)
        assert dead.value.__cause__ is broken.value
    assert ("execute", 3) not in worker.calls
    with pytest.raises(EngineDeadError, match="the forward broke") as unhealthy:
        setup.executor.check_health()
    assert unhealthy.value.__cause__ is broken.value


def test_a_worker_that_cannot_be_made_fails_the_first_call() -> None:
    def make() -> RecordingWorker:
        raise RuntimeError("no such device")

    executor = UniProcExecutor(CONFIG, worker_factory=make)
    with pytest.raises(RuntimeError, match="no such device"):
        executor.load_model().result(5)
    executor.shutdown()


@pytest.mark.parametrize("method", ["add", RecordingWorker.add], ids=["name", "callable"])
def test_collective_rpc(setup: Setup, method: Callable[..., Any] | str) -> None:
    assert setup.executor.collective_rpc(method, 2, 3).result(5) == [5]


def test_an_rpc_that_fails_leaves_the_steps_alone(setup: Setup) -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        setup.executor.collective_rpc("no_such_method").result(5)
    setup.executor.check_health()
    assert setup.executor.execute_model(step(1)).result(5) is None


def test_shutdown_waits_for_the_running_call_and_cancels_the_rest(setup: Setup) -> None:
    worker = setup.started()
    worker.gate.clear()
    running = setup.executor.execute_model(step(1))
    waiting: list[Any] = [setup.executor.sample_tokens(), setup.executor.execute_model(step(2))]
    assert worker.entered.wait(5)
    threading.Timer(0.05, worker.gate.set).start()
    setup.executor.shutdown()
    assert running.result(0) is None
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(0)
    assert worker.calls == ["load", ("execute", 1), "shutdown"]
    assert not any(thread.name.startswith("aioengine-worker") for thread in threading.enumerate())


def test_shutdown_is_idempotent_from_several_threads_and_without_a_worker(setup: Setup) -> None:
    worker = setup.started()
    threads = [threading.Thread(target=setup.executor.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert worker.calls.count("shutdown") == 1
    never_used = UniProcExecutor(CONFIG, worker_factory=RecordingWorker)
    never_used.shutdown()
    never_used.shutdown()


def test_after_shutdown_everything_fails_through_its_future(setup: Setup) -> None:
    setup.started()
    setup.executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        setup.executor.check_health()
    for future in (setup.executor.execute_model(step(1)), setup.executor.sample_tokens(), setup.executor.load_model()):
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(0)


def test_shutdown_lets_go_of_the_worker(setup: Setup) -> None:
    reference = weakref.ref(setup.started())
    setup.executor.shutdown()
    setup.worker = None
    gc.collect()
    assert reference() is None


@pytest.mark.alone
def test_an_idle_executor_uses_no_cpu(setup: Setup) -> None:
    setup.started()
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_needs_exactly_one_source_of_workers() -> None:
    with pytest.raises(TypeError, match="either files or worker_factory"):
        UniProcExecutor(CONFIG)
