"""Results that the device is still computing: what `sample_tokens` returns where the worker's thread does not wait.

The worker's thread enqueues step N + 1 right after step N, and never asks the device anything. A second thread, which sleeps
in the event of the oldest step, turns events into results, in the order of the steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from aioengine.outputs import ModelRunnerOutput

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """Something on its way from the device."""

    def wait(self) -> R_co:
        """The result; blocks until the device has it, without holding the GIL. Called once, from any thread."""


class AsyncOutput(Generic[T]):
    """The tokens of a step that is still running, and how to make the step's result of them."""

    def __init__(self, rows: Pending[T], make_output: Callable[[T], ModelRunnerOutput]) -> None:
        self._rows = rows
        self._make_output = make_output

    def wait(self) -> ModelRunnerOutput:
        return self._make_output(self._rows.wait())


Output = ModelRunnerOutput | AsyncOutput[Any]


class OutputThread:
    """Resolves futures in the order in which they were given, each when its output has arrived.

    The thread starts with the first output and ends with `shutdown`.
    """

    def __init__(self, *, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[tuple[Output, Future[ModelRunnerOutput]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """There was an output, and there may be one that has not arrived."""
        return self._thread is not None

    def resolve(self, output: Output, future: Future[ModelRunnerOutput]) -> None:
        """Give `future`, which runs, the result of `output` or its error, after all that were given before.

        Called from one thread.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aioengine-worker-output", daemon=True)
            self._thread.start()
        self._queue.put((output, future))

    def shutdown(self) -> None:
        """Wait for the outputs that were given: what is on the device ends by itself. No `resolve` may follow."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            output, future = item
            try:
                result = output.wait() if isinstance(output, AsyncOutput) else output
            except BaseException as exc:  # whatever it is, it belongs to the step: it goes to the step's future
                self._on_failure(exc)
                future.set_exception(exc)
            else:
                future.set_result(result)
            # The thread sleeps now; it must not keep a step's memory, or the worker, alive.
            del item, output, future
