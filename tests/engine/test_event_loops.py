"""Every public method, in every wrong place: its documented result or an AioEngineError, at once, and the engine can still be
shut down. The methods are taken from the class, so a new one cannot be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from aioengine import AioEngineError, AsyncEngine, EngineDeadError, SamplingParams
from aioengine.engine.event_control import EngineController
from aioengine.engine.output_stream import OutputStream
from aioengine.events.wire import read_events
from aioengine.testing import FakeExecutor, FakeTokenizer

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
LIMIT_S = 1.0

Call = Callable[[AsyncEngine], Any]

# What to do with each public name of the class; a coroutine is awaited, or driven without an event loop where there is none.
CALLS: dict[str, Call] = {
    "__aenter__": lambda engine: engine.__aenter__(),
    "__aexit__": lambda engine: engine.__aexit__(None, None, None),
    "abort": lambda engine: engine.abort("live"),
    "abort_scheduled": lambda engine: engine.abort_scheduled("live"),
    "bus": lambda engine: engine.bus,
    "check_health": lambda engine: engine.check_health(),
    "config": lambda engine: engine.config,
    "control": lambda engine: engine.control,
    "events": lambda engine: engine.events(),
    "generate": lambda engine: anext(engine.generate([1, 2, 3], SHORT)),
    "generate_batch": lambda engine: engine.generate_batch([[1], [2]], SHORT),
    "is_draining": lambda engine: engine.is_draining,
    "is_paused": lambda engine: engine.is_paused,
    "model_info": lambda engine: engine.model_info,
    "num_unfinished_reqs": lambda engine: engine.num_unfinished_reqs,
    "pause": lambda engine: engine.pause(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "resolved_config": lambda engine: engine.resolved_config,
    "resume": lambda engine: engine.resume(),
    "shutdown": lambda engine: engine.shutdown(),
    "snapshot": lambda engine: engine.snapshot(),
    "start": lambda engine: engine.start(),
    "stats": lambda engine: engine.stats(),
    "step": lambda engine: engine.step(),
    "submit_unattended": lambda engine: engine.submit_unattended([1, 2], SHORT),
    "tokenizer": lambda engine: engine.tokenizer,
    "wire_header": lambda engine: engine.wire_header,
    "shutdown(drain=True)": lambda engine: engine.shutdown(drain=True, drain_timeout=0.5),
    # A viewer's commands, and a stream that was not started here.
    "control.abort": lambda engine: engine.control.abort("live"),
    "control.pause": lambda engine: engine.control.pause(),
    "control.resume": lambda engine: engine.control.resume(),
    "control.step": lambda engine: engine.control.step(),
    "control.submit": lambda engine: engine.control.submit("a"),
    "generate.aclose": lambda engine: engine.generate([1]).aclose(),
}


def public_names(cls: type, prefix: str = "") -> set[str]:
    return {f"{prefix}{name}" for name in dir(cls) if not name.startswith("_")}


def test_no_public_method_is_left_out() -> None:
    names = public_names(AsyncEngine) | {"__aenter__", "__aexit__"} | public_names(EngineController, "control.")
    names |= public_names(OutputStream, "generate.")
    assert {name for name in CALLS if "(" not in name} == names


# ---------------------------------------------------------------------------------------------------- the places
class Bench:
    """An engine whose event loop is held by hand."""

    def __init__(self) -> None:
        self.executor = FakeExecutor(num_blocks=400, block_size=4, max_num_seqs=8, forward_s=0.0005)
        self.engine = AsyncEngine(executor=self.executor, tokenizer=FakeTokenizer(), max_num_seqs=8, block_size=4)
        self.loop = asyncio.new_event_loop()

    async def start(self) -> None:
        """With a request that lives."""
        await self.engine.start()
        self.stream = self.engine.generate([7], ENDLESS, request_id="live")
        await anext(self.stream)

    def close_loop(self) -> None:
        """As a program does that knows nothing of the tasks in it."""
        self.loop.close()


def outcome(function: Callable[[], Any]) -> Any:
    """The result, or the error that the library raises on purpose; everything else fails the test. In at most a second."""
    start = time.perf_counter()
    try:
        result = function()
    except AioEngineError as exc:
        assert str(exc)
        result = exc
    assert time.perf_counter() - start < LIMIT_S
    return result


async def awaited(call: Call, engine: AsyncEngine) -> Any:
    result = call(engine)
    return await asyncio.wait_for(result, 2 * LIMIT_S) if inspect.isawaitable(result) else result


def driven(call: Call, engine: AsyncEngine) -> Any:
    """Without any event loop."""
    result = call(engine)
    if not isinstance(result, Coroutine):
        return result
    try:
        result.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        result.close()
    raise AssertionError("it waits for something, with no event loop to wait in")


def in_own_loop(call: Call, bench: Bench) -> Any:
    return outcome(lambda: bench.loop.run_until_complete(awaited(call, bench.engine)))


def in_another_loop(call: Call, bench: Bench) -> Any:
    return outcome(lambda: asyncio.run(awaited(call, bench.engine)))


def without_loop(call: Call, bench: Bench) -> Any:
    return outcome(lambda: driven(call, bench.engine))


def in_a_thread(place: Callable[[Call, Bench], Any]) -> Callable[[Call, Bench], Any]:
    """Meanwhile the engine's own event loop runs."""

    def run(call: Call, bench: Bench) -> Any:
        async def beside() -> Any:
            return await asyncio.to_thread(place, call, bench)

        return bench.loop.run_until_complete(beside())

    return run


PLACES: dict[str, Callable[[Call, Bench], Any]] = {
    "its own loop": in_own_loop,
    "another loop": in_another_loop,
    "no loop": without_loop,
    "another loop, in a thread": in_a_thread(in_another_loop),
    "no loop, in a thread": in_a_thread(without_loop),
}


# ---------------------------------------------------------------------------------------------------- the times
def not_started(bench: Bench) -> None:
    pass


def running(bench: Bench) -> None:
    bench.loop.run_until_complete(bench.start())


def paused(bench: Bench) -> None:
    running(bench)
    bench.loop.call_soon(bench.engine.pause)


def starting(bench: Bench) -> None:
    """For ever: the weights do not come."""
    bench.executor.load_model = Future  # type: ignore[method-assign,assignment]
    bench.starting = bench.loop.create_task(bench.engine.start())  # type: ignore[attr-defined]
    bench.loop.run_until_complete(asyncio.sleep(0.001))


def shut_down(bench: Bench) -> None:
    running(bench)
    bench.loop.run_until_complete(bench.engine.shutdown())


def dead(bench: Bench) -> None:
    bench.executor.fail_at(3)
    running(bench)

    async def die() -> None:
        with pytest.raises(EngineDeadError):
            async for _ in bench.stream:
                pass

    bench.loop.run_until_complete(die())


def loop_closed(bench: Bench) -> None:
    running(bench)
    bench.close_loop()


def loop_closed_while_starting(bench: Bench) -> None:
    starting(bench)
    bench.close_loop()


TIMES: dict[str, Callable[[Bench], None]] = {
    function.__name__: function
    for function in (not_started, running, paused, starting, shut_down, dead, loop_closed, loop_closed_while_starting)
}


@contextlib.contextmanager
def a_bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    # Whatever happened to it: where the engine belongs, or anywhere once its event loop was closed, it can be shut down.
    start = time.perf_counter()
    if bench.loop.is_closed():
        asyncio.run(bench.engine.shutdown())
    else:
        bench.loop.run_until_complete(bench.engine.shutdown())
        if hasattr(bench, "starting"):
            with contextlib.suppress(AioEngineError):
                bench.loop.run_until_complete(bench.starting)
        bench.loop.run_until_complete(asyncio.sleep(0))
        bench.loop.close()
    assert time.perf_counter() - start < LIMIT_S
    assert bench.executor.is_shut_down
    with pytest.raises(EngineDeadError):
        bench.engine.check_health()


@pytest.fixture
def quiet_asyncio(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A loop that is closed around its tasks has asyncio complain about them when they are collected: not our subject."""
    yield
    gc.collect()
    assert all("was destroyed but it is pending" in record.getMessage() for record in caplog.records if record.name == "asyncio")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("when", TIMES)
def test_every_public_method_in_every_place_at_every_time(when: str, place: str, quiet_asyncio: None) -> None:
    is_closed = when.startswith("loop_closed")
    if is_closed and "own" in place or is_closed and "thread" in place:
        pytest.skip("there is no such place")
    for name, call in CALLS.items():
        with a_bench() as bench:
            TIMES[when](bench)
            first = PLACES[place](call, bench)
            second = PLACES[place](call, bench)  # and once more
            expected = expected_outcome(name, when, place)
            if expected is not None:
                assert isinstance(first, AioEngineError) == (expected == "error"), (name, first)
                assert isinstance(second, AioEngineError) == (expected == "error"), (name, second)
        del bench


def expected_outcome(name: str, when: str, place: str) -> str | None:
    """"error", "result", or None where the table would only repeat the code."""
    if name in ("config", "bus", "control", "is_draining", "is_paused", "num_unfinished_reqs", "generate.aclose"):
        return "result"
    if when not in ("running", "paused"):
        return None
    if name in ("check_health", "model_info", "resolved_config", "tokenizer", "wire_header", "stats", "abort", "abort_scheduled"):
        return "result"
    if name in ("start", "__aenter__"):
        return "error"
    if place == "its own loop":
        return None
    if name in ("snapshot", "events", "reset_prefix_cache"):
        return "error" if "thread" in place else "result"
    if name == "control.abort":
        return None
    return "error"
