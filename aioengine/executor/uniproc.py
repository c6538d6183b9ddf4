"""The executor of one worker in one thread of this process.

Where the worker does not wait for its device, a second thread does, and hands out the results in the order of the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import EngineDeadError
from aioengine.executor.base import GrammarOutput, hand_on
from aioengine.executor.worker_thread import WorkerThread
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ResolvedConfig
from aioengine.worker.pipeline.async_output import AsyncOutput, OutputThread

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles

T = TypeVar("T")


class WorkerProtocol(Protocol):
    """What the executor calls, always from its one thread. `aioengine.worker.worker.Worker` is the real one."""

    def load_model(self) -> None: ...

    def determine_num_kv_cache_blocks(self) -> int: ...

    def initialize_kv_cache(self, num_blocks: int) -> None: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput[Any]: ...

    def shutdown(self) -> None: ...


class UniProcExecutor:
    """Runs every call in one worker thread, in the order of submission. See `Executor` for the contract.

    The thread starts with the first call and sleeps while there is none. It creates the worker itself: torch's number of
    threads and its inference mode belong to a thread. After a step has failed, every later step fails with
    EngineDeadError, since the state that it would build on is unknown.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        *,
        files: ModelFiles | None = None,
        worker_factory: Callable[[], WorkerProtocol] | None = None,  # instead of a `Worker` for `files`
    ) -> None:
        if (files is None) == (worker_factory is None):
            raise TypeError("give either files or worker_factory")
        self._config = config
        self._files = files
        self._worker_factory = worker_factory or self._create_worker
        self._worker: WorkerProtocol | None = None
        self._failure: BaseException | None = None
        self._thread = WorkerThread("aioengine-worker")
        self._outputs = OutputThread(on_failure=self._note_failure)
        self._shutdown_lock = threading.Lock()
        self._is_shut_down = False

    def load_model(self) -> Future[None]:
        return self._submit(lambda worker: worker.load_model())

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        return self._submit(lambda worker: worker.determine_num_kv_cache_blocks())

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return self._submit(lambda worker: worker.initialize_kv_cache(num_blocks))

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        return self._submit(lambda worker: worker.execute_model(scheduler_output), is_step=True)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        enqueued = self._submit(lambda worker: worker.sample_tokens(grammar_output), is_step=True)
        enqueued.add_done_callback(lambda done: hand_on(done, future, deliver=lambda result: self._deliver(result, future)))
        return future

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        def call(worker: WorkerProtocol) -> list[Any]:
            return [getattr(worker, method)(*args) if isinstance(method, str) else method(worker, *args)]

        return self._submit(call)

    def check_health(self) -> None:
        """Raise EngineDeadError after `shutdown()` or a failed step."""
        if self._is_shut_down:
            raise EngineDeadError("the executor has been shut down")
        if self._failure is not None:
            raise EngineDeadError(f"a step failed in the worker: {self._failure!r}") from self._failure

    def shutdown(self) -> None:
        """Cancel what has not started, wait for the call that runs, free the worker. Must not be called by the worker."""
        with self._shutdown_lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
            self._thread.shutdown()
            self._outputs.shutdown()
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.shutdown()

    # ------------------------------------------------------------------ internals
    def _submit(self, call: Callable[[WorkerProtocol], T], *, is_step: bool = False) -> Future[T]:
        try:
            return self._thread.submit(self._run, call, is_step)
        except RuntimeError:  # the thread takes no more work; the caller learns it where it learns everything else
            future: Future[T] = Future()
            future.set_exception(EngineDeadError("the executor has been shut down"))
            return future

    def _run(self, call: Callable[[WorkerProtocol], T], is_step: bool) -> T:
        """In the worker's thread."""
        if not is_step:
            return call(self._get_worker())
        if self._failure is not None:
            raise EngineDeadError(f"an earlier step failed in the worker: {self._failure!r}") from self._failure
        try:
            return call(self._get_worker())
        except BaseException as exc:
            self._failure = exc
            raise

    def _deliver(self, result: ModelRunnerOutput | AsyncOutput[Any], future: Future[ModelRunnerOutput]) -> None:
        if isinstance(result, AsyncOutput) or self._outputs.is_running:  # in the second case: not before older ones
            self._outputs.resolve(result, future)
        else:
            future.set_result(result)

    def _note_failure(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _get_worker(self) -> WorkerProtocol:
        if self._worker is None:
            self._worker = self._worker_factory()
        return self._worker

    def _create_worker(self) -> WorkerProtocol:
        from aioengine.worker.worker import Worker

        assert self._files is not None
        return Worker(self._config, files=self._files)
