"""What `generate()` returns: the outputs of one request, to be iterated over."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from aioengine.engine.event_loops import need_running_loop, running_loop, start_eagerly, wrong_loop
from aioengine.engine.outputs.deadline import Deadline
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.errors import AioEngineError
from aioengine.outputs import RequestOutput


class RequestOwner(Protocol):
    """Whoever submitted the request of a stream, and ends it."""

    def drop(self, collector: OutputCollector) -> None:
        """The consumer is gone: end its request, if it has not ended."""

    def time_out(self, collector: OutputCollector) -> int | None:
        """End what has not ended; how many output tokens that has, None if there is nothing to end."""


Submit = Callable[[], Coroutine[Any, Any, tuple[OutputCollector, RequestOwner]]]
"""Prepares a request, which may take long, and hands it to the engine in its last moment."""


class _Submission:
    """The request behind a stream, from the first iteration on. Everything here is called in its event loop."""

    __slots__ = ("_owner", "_preparing", "_watched", "collector", "deadline", "is_left", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, deadline: Deadline) -> None:
        self.loop = loop
        self.deadline = deadline
        self.collector: OutputCollector | None = None
        self.is_left = False
        self._owner: RequestOwner | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._watched: tuple[asyncio.Task[Any], Callable[[asyncio.Task[Any]], None]] | None = None

    def begin(self, submit: Submit) -> None:
        """Prepare and submit the request. Raises what `submit` raises if it does so without waiting."""
        task = start_eagerly(self._run(submit))
        if task is not None:
            task.add_done_callback(_see_exception)
            self.deadline.limit(task)
            self._preparing = task

    async def _run(self, submit: Submit) -> None:
        self.collector, owner = await submit()
        self._owner = owner
        self.deadline.start(partial(owner.time_out, self.collector))

    async def prepared(self) -> OutputCollector:
        """Wait until the request is submitted. Raises what that raises; whoever is cancelled here does not cancel it."""
        if self.collector is None:
            assert self._preparing is not None
            await asyncio.wait([self._preparing])
            if self._preparing.cancelled() and self.deadline.expired:
                raise self.deadline.error()
            if self._preparing.cancelled() and self.is_left:
                raise AioEngineError("the stream was closed while its prompt was being prepared")
            self._preparing.result()
            assert self.collector is not None
        return self.collector

    def watch(self, task: asyncio.Task[Any], on_end: Callable[[asyncio.Task[Any]], None]) -> None:
        """Call `on_end` when `task` ends, unless the stream has ended before."""
        if self._watched is None or self._watched[0] is not task:
            self._unwatch()
            self._watched = task, on_end
            task.add_done_callback(on_end)

    def _unwatch(self) -> None:
        if self._watched is not None:
            task, on_end = self._watched
            self._watched = None
            task.remove_done_callback(on_end)

    def leave(self) -> None:
        """Nobody reads on: the request ends with the reason "abort", if it has not ended."""
        self.is_left = True
        self.deadline.cancel()
        self._unwatch()
        if self._owner is not None:
            assert self.collector is not None
            self._owner.drop(self.collector)
        elif self._preparing is not None:
            self._preparing.cancel()

    def leave_soon(self) -> None:
        """As `leave`, from any thread, and while anything else runs, as a finalizer does."""
        with contextlib.suppress(RuntimeError):  # the event loop was closed, and with it the request ended
            self.loop.call_soon_threadsafe(self.leave)


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request: an async iterator, and an async context manager that ends the request.

    Nothing happens before the first iteration. The last output has a `finish_reason`; after it, and after an error, the
    iteration is over (`StopAsyncIteration`), however often it is asked again. It never ends in silence.

    The request is aborted when

    - an `async for` over the stream is left in any way: its end, `break`, `return`, an exception, the cancellation of its task,
      also if the stream is still referenced;
    - `aclose()` is called, or an `async with` over the stream is left;
    - a task that reads by `anext()` is cancelled while it waits for its second or a later output, ends of that, and nobody has
      read on;
    - nobody refers to the stream any more, nor to a task that was made of its `anext()`.

    A single `anext(stream)` may be cancelled: `await asyncio.wait_for(anext(stream), 0.2)` that times out, or a cancelled task
    that consists of it, leaves the request running, and the next `anext(stream)` returns what has come meanwhile. So does
    an `asyncio.timeout()` around it. Nothing is lost, nothing comes twice.

    What was aborted in one of these ways, but for `aclose()`, can still be read to its end: an output with the finish_reason
    "abort", or an AioEngineError if its prompt was still being prepared. One reader at a time: a second `anext()` while one
    waits raises AioEngineError. `call_when_ready()` and `take_ready()` are for programs that serve many streams and want
    no task to be woken for each output.
    """

    __slots__ = (
        "__weakref__",
        "_collector",
        "_engine",
        "_is_over",
        "_is_read",
        "_loop",
        "_num_loops",
        "_reader",
        "_submission",
        "_submit",
        "_timeout",
    )

    def __init__(self, submit: Submit, *, timeout: float | None, engine: object) -> None:
        self._submit: Submit | None = submit
        self._timeout = timeout
        self._engine: object = engine  # an engine whose stream is read must not be garbage-collected
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submission: _Submission | None = None
        self._collector: OutputCollector | None = None
        self._is_over = False
        self._is_read = False  # somebody is in `__anext__`
        self._reader: weakref.ref[asyncio.Task[Any]] | None = None  # the task that got the last output, see `_note_cancelled`
        self._num_loops = 0

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        self._num_loops += 1
        return _Loop(self, self._num_loops)

    def __anext__(self) -> Coroutine[Any, Any, RequestOutput]:
        return _Next(self)

    async def _next(self, loop_object: _Loop | None) -> RequestOutput:
        """The next output. loop_object: must live as long as this runs."""
        if self._is_read:
            raise AioEngineError("this stream is being read by another task: a stream has one reader at a time")
        if self._is_over:
            raise StopAsyncIteration
        loop = running_loop()
        if loop is None or loop is not self._loop:
            self._enter(loop)
        self._is_read = True
        try:
            collector = self._collector
            if collector is None:
                collector = await self._begin()
            if not collector.is_ready:
                await collector.wait()
            output = self._take(collector)
        except asyncio.CancelledError:
            self._note_cancelled()
            raise
        except BaseException:
            self._end()
            raise
        finally:
            self._is_read = False
            del loop_object  # else the traceback of an exception would keep it, and what hangs on its end, alive
        return output

    def _enter(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """The first iteration, or one in the wrong event loop."""
        if self._loop is not None:
            raise wrong_loop(self._loop, loop, "anext() of a stream")
        self._loop = need_running_loop("anext() of a stream")

    async def _begin(self) -> OutputCollector:
        """Submit the request, or wait until a former call, which was cancelled, has done so."""
        submission = self._submission
        if submission is None:
            assert self._submit is not None
            assert self._loop is not None
            submit, self._submit = self._submit, None
            submission = self._submission = _Submission(self._loop, Deadline(self._timeout))
            submission.begin(submit)
        self._collector = await submission.prepared()
        return self._collector

    def _take(self, collector: OutputCollector) -> RequestOutput:
        output = self._take_now(collector)
        if self._reader is None and not self._is_over:
            task = asyncio.current_task()
            self._reader = None if task is None else weakref.ref(task)
        return output

    def _take_now(self, collector: OutputCollector) -> RequestOutput:
        submission = self._submission
        assert submission is not None
        if submission.deadline.expired:
            raise submission.deadline.error()
        output = collector.take_now()
        if collector.finished:
            self._end()
        return output

    # ------------------------------------------------------------------ being told, instead of waiting
    def call_when_ready(self, on_ready: Callable[[], None]) -> None:
        """From now on `on_ready` is called when `take_ready()` has something to return, once until that is called, and nobody
        waits. It is called from within the engine's step: it makes a note, and leaves the taking to a later turn of the loop.

        A task that is woken for each output costs more than the output. The first output is waited for with `anext()`, which
        submits the request. Raises AioEngineError before that, and in another event loop. A stream that has ended calls nobody.
        """
        if not self._is_over:
            self._begun("call_when_ready()").call_when_ready(on_ready)

    def take_ready(self) -> RequestOutput | None:
        """What has come, without waiting; None if there is nothing new, or nothing follows. Raises what `anext()` raises, and
        AioEngineError before the first output was read.
        """
        if self._is_over:
            return None
        collector = self._begun("take_ready()")
        if not collector.is_ready:
            return None
        try:
            return self._take_now(collector)
        except BaseException:
            self._end()
            raise

    def _begun(self, call: str) -> OutputCollector:
        loop, collector = running_loop(), self._collector
        if self._loop is not None and loop is not self._loop:
            raise wrong_loop(self._loop, loop, f"{call} of a stream")
        if collector is None or self._is_read:
            raise AioEngineError(f"{call} needs a stream whose first output was read, and which nobody is reading")
        return collector

    def _end(self) -> None:
        """Nothing follows."""
        self._is_over = True
        submission, self._submission = self._submission, None
        self._collector = self._engine = self._submit = None
        if submission is not None:
            submission.leave()

    # ------------------------------------------------------------------ who leaves, and who only stops waiting
    def _note_cancelled(self) -> None:
        """`anext()` was cancelled. By a timeout around it, or together with the task that reads: only the end of the task tells.

        A task that got an output before and now ends of its cancellation was the reader. One that got none may be a single
        `anext()` with a timeout, for which `asyncio.wait_for` of Python 3.11 makes a task of its own.
        """
        task, reader = asyncio.current_task(), self._reader
        self._reader = None
        if task is not None and reader is not None and reader() is task and self._submission is not None:
            self._submission.watch(task, partial(_on_reader_end, weakref.ref(self)))

    def _on_reader_end(self) -> None:
        has_another_reader = self._is_read or self._reader is not None
        if self._submission is not None and not has_another_reader:
            self._submission.leave()

    def _leave_loop(self, number: int) -> None:
        """An `async for` was left. In any thread, at any point: its iterator was garbage-collected."""
        submission = self._submission
        if submission is not None and number == self._num_loops:
            submission.leave_soon()

    def __del__(self) -> None:
        submission = getattr(self, "_submission", None)
        if submission is not None:
            submission.leave_soon()

    async def aclose(self) -> None:
        """End the request, if it has not ended, and the stream. Idempotent; may be called from any event loop."""
        self._is_over = True
        self._submit = None
        submission = self._submission
        if submission is None:
            return
        if not self._is_read:  # else whoever reads takes the end, and clears up
            self._submission = self._collector = self._engine = None
        if running_loop() is submission.loop:
            submission.leave()
        else:
            submission.leave_soon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()


class _Loop(AsyncIterator[RequestOutput]):
    """What an `async for` holds as long as it runs, and nobody else does: its end is the end of the loop."""

    __slots__ = ("_number", "_stream")

    def __init__(self, stream: OutputStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, RequestOutput]:
        return self._stream._next(self)

    def __del__(self) -> None:
        self._stream._leave_loop(self._number)


class _Next(Coroutine[Any, Any, RequestOutput]):
    """One `anext(stream)`. It holds the stream also when it is done, as the `anext()` of an async generator does: a task that is
    made of it, and still referenced, keeps the request running.
    """

    __name__ = "OutputStream.__anext__"  # how asyncio shows a task that is made of it
    __slots__ = ("_coroutine", "_stream")

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream
        self._coroutine = stream._next(None)

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *args: Any) -> Any:
        return self._coroutine.throw(*args)

    def close(self) -> None:
        self._coroutine.close()


def _on_reader_end(stream: weakref.ref[OutputStream], task: asyncio.Task[Any]) -> None:
    living = stream()
    if living is not None and (task.cancelled() or task.exception() is not None):
        living._on_reader_end()


def _see_exception(task: asyncio.Task[Any]) -> None:
    """Whoever waited for it may be gone; asyncio would log an exception that nobody has seen."""
    if not task.cancelled():
        task.exception()
