"""Every public method, in every wrong place: its documented result or an AioEngineError, at once, and the engine can still be
shut down. The methods are taken from the class, so a new one cannot be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import socket
import subprocess
import sys
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
from aioengine.engine.outputs.output_stream import OutputStream
from aioengine.events.recording.reader import read_recording
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
    "embed": lambda engine: engine.embed([[1, 2]]),
    "kv_connector_stats": lambda engine: engine.kv_connector_stats(),
    "load_lora": lambda engine: engine.load_lora("name", "/nowhere"),
    "lora_names": lambda engine: engine.lora_names,
    "save_prefix_cache": lambda engine: engine.save_prefix_cache(),
    "unload_lora": lambda engine: engine.unload_lora("name"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "resolved_config": lambda engine: engine.resolved_config,
    "resume": lambda engine: engine.resume(),
    "shutdown": lambda engine: engine.shutdown(),
    "snapshot": lambda engine: engine.snapshot(),
    "start": lambda engine: engine.start(),
    "stats": lambda engine: engine.stats(),
    "step": lambda engine: engine.step(),
    "submit_unattended": lambda engine: engine.submit_unattended([1, 2], SHORT),
    "read_unattended": lambda engine: engine.read_unattended("live"),
    "tokenizer": lambda engine: engine.tokenizer,
    "wire_header": lambda engine: engine.wire_header,
    "shutdown(drain=True)": lambda engine: engine.shutdown(drain=True, drain_timeout=0.5),
    # A viewer's commands, and a stream that was not started here.
    "control.abort": lambda engine: engine.control.abort("live"),
    "control.pause": lambda engine: engine.control.pause(),
    "control.resume": lambda engine: engine.control.resume(),
    "control.step": lambda engine: engine.control.step(),
    "control.read": lambda engine: engine.control.read("live"),
    "control.submit": lambda engine: engine.control.submit("a"),
    "generate.aclose": lambda engine: engine.generate([1]).aclose(),
    "generate.call_when_ready": lambda engine: engine.generate([1]).call_when_ready(print),
    "generate.take_ready": lambda engine: engine.generate([1]).take_ready(),
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
        self.background: asyncio.Task[Any] | None = None

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
    bench.executor.load_model = Future  # type: ignore[method-assign]
    bench.background = bench.loop.create_task(bench.engine.start())
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


def draining(bench: Bench) -> None:
    running(bench)
    bench.background = bench.loop.create_task(bench.engine.shutdown(drain=True))
    bench.loop.run_until_complete(asyncio.sleep(0.001))
    assert bench.engine.is_draining


def stopping(bench: Bench) -> None:
    """The executor takes its time."""
    running(bench)
    shutdown, released = bench.executor.shutdown, threading.Event()

    def wait_and_shut_down() -> None:
        released.wait(0.02)
        released.set()
        shutdown()

    bench.executor.shutdown = wait_and_shut_down  # type: ignore[method-assign]
    bench.background = bench.loop.create_task(bench.engine.shutdown())
    bench.loop.run_until_complete(asyncio.sleep(0.001))
    assert not bench.background.done()


def loop_closed_while_stopping(bench: Bench) -> None:
    stopping(bench)
    bench.close_loop()


TIMES: dict[str, Callable[[Bench], None]] = {
    function.__name__: function
    for function in (
        not_started,
        starting,
        running,
        paused,
        dead,
        draining,
        stopping,
        shut_down,
        loop_closed,
        loop_closed_while_starting,
        loop_closed_while_stopping,
    )
}
CASES = [(when, place) for when in TIMES for place in PLACES if not when.startswith("loop_closed") or place in ("another loop", "no loop")]


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
        if bench.background is not None:
            with contextlib.suppress(AioEngineError):
                bench.loop.run_until_complete(bench.background)
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


@pytest.mark.parametrize(("when", "place"), CASES)
def test_every_public_method_in_every_place_at_every_time(when: str, place: str, quiet_asyncio: None) -> None:
    for names in groups(when, place):
        with a_bench() as bench:
            TIMES[when](bench)
            for name in (name for name in names for _ in range(2)):  # and once more
                result = PLACES[place](CALLS[name], bench)
                expected = expected_outcome(name, when, place)
                if expected is not None:
                    assert isinstance(result, AioEngineError) == (expected == "error"), (name, result)
        del bench


def groups(when: str, place: str) -> list[list[str]]:
    """Calls for one engine: in the wrong place none of them may change anything, but for the end."""
    if place == "its own loop":
        return [[name] for name in CALLS if when != "paused" or not name.startswith(("generate", "embed"))]  # they would rightly wait
    ends = [name for name in CALLS if "shutdown" in name or "exit" in name]
    return [*([name] for name in ends), [name for name in CALLS if name not in ends]]


def expected_outcome(name: str, when: str, place: str) -> str | None:
    """ "error", "result", or None where the table would only repeat the code."""
    if name in ("config", "bus", "control", "is_draining", "is_paused", "num_unfinished_reqs", "generate.aclose"):
        return "result"
    if when not in ("running", "paused"):
        return None
    if name in (
        "check_health",
        "model_info",
        "resolved_config",
        "tokenizer",
        "wire_header",
        "stats",
        "abort",
        "abort_scheduled",
        "read_unattended",
        "lora_names",
    ):
        return "result"
    if name in ("start", "__aenter__"):
        return "error"
    if place == "its own loop":
        return None
    if name in ("snapshot", "events", "reset_prefix_cache"):
        return "error" if "thread" in place else "result"
    if name in ("control.abort", "control.read"):
        return None
    return "error"


# ---------------------------------------------------------------------------------------------------- one by one
async def test_another_loop_may_not_shut_the_engine_down_and_changes_nothing(start_rig: Any) -> None:
    async with start_rig(FakeExecutor(num_blocks=400, block_size=4, forward_s=0.0005)) as rig:
        stream = rig.engine.generate([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
        await anext(stream)
        with pytest.raises(AioEngineError, match=r"shutdown\(\): the engine runs in another event loop: it was started in <.*running"):
            await asyncio.to_thread(asyncio.run, rig.engine.shutdown())
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason == "length"
    assert rig.executor.is_shut_down


async def test_an_abort_from_another_thread_wakes_the_loop(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.hang_at(2)
    async with start_rig(executor) as rig:
        stream = rig.engine.generate([1, 2], ENDLESS, request_id="a")
        await anext(stream)
        ended = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)  # nothing is due in the loop now
        start = time.perf_counter()
        thread = threading.Thread(target=lambda: results.append(rig.engine.abort("a")))
        results: list[bool] = []
        thread.start()
        assert (await ended).finish_reason == "abort"
        assert time.perf_counter() - start < 0.5
        thread.join()
        assert results == [True]
        assert await asyncio.to_thread(rig.engine.abort, "a") is False
        executor.release()


@pytest.mark.parametrize("request_id", [None, 5, [], b"a"])
async def test_the_id_of_an_abort_is_a_string(rig: Any, request_id: Any) -> None:
    for abort in (rig.engine.abort, rig.engine.abort_scheduled):
        with pytest.raises(AioEngineError, match="the id of a request is a string"):
            abort(request_id)


@pytest.mark.parametrize("drain_timeout", ["1", 10**400, -(10**400), True, float("nan")])
async def test_a_drain_timeout_that_is_no_time(start_rig: Any, drain_timeout: Any) -> None:
    async with start_rig() as rig:
        with pytest.raises(AioEngineError, match="drain_timeout must be"):
            await rig.engine.shutdown(drain=True, drain_timeout=drain_timeout)


@pytest.mark.parametrize("maxlen", [0, -1, 10**30, "5", None, 1.5])
async def test_a_subscription_of_an_impossible_length(rig: Any, maxlen: Any) -> None:
    with pytest.raises(AioEngineError, match="maxlen must be an integer from 1"):
        rig.engine.events(maxlen)


def publishing(tmp_path: Path) -> dict[str, Any]:
    return {"record": tmp_path / "steps.jsonl", "events": tmp_path / "engine.sock"}


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("aioengine", "fake"))]


def nothing_is_left(executor: FakeExecutor, tmp_path: Path) -> bool:
    return executor.is_shut_down and not names_of_threads() and not (tmp_path / "engine.sock").exists()


@pytest.mark.skipif("sys.platform == 'win32'")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")  # asyncio's own
def test_after_its_loop_was_closed_another_one_frees_worker_recording_and_socket(tmp_path: Path, quiet_asyncio: None) -> None:
    executor = FakeExecutor(num_blocks=400, block_size=4, forward_s=0.0005)
    engine = AsyncEngine(executor=executor, block_size=4, **publishing(tmp_path))

    async def begin() -> socket.socket:
        await engine.start()
        viewer = socket.socket(socket.AF_UNIX)
        viewer.connect(str(tmp_path / "engine.sock"))
        stream = engine.generate([1, 2], ENDLESS)
        await anext(stream)
        await asyncio.sleep(0.01)
        return viewer

    loop = asyncio.new_event_loop()
    viewer = loop.run_until_complete(begin())
    loop.close()
    assert names_of_threads()
    with pytest.raises(EngineDeadError, match="the event loop that it was started in was closed"):
        engine.check_health()
    asyncio.run(engine.shutdown())
    assert nothing_is_left(executor, tmp_path)
    assert engine.num_unfinished_reqs == 0
    assert len(read_recording(tmp_path / "steps.jsonl").events) > 1
    viewer.settimeout(5)
    with viewer:
        while viewer.recv(1 << 16):
            pass  # it has an end
    asyncio.run(engine.shutdown(drain=True))


@pytest.mark.skipif("sys.platform == 'win32'")
@pytest.mark.parametrize("end", ["in its loop", "with its loop"])
def test_a_dropped_engine_says_so_and_cleans_up(tmp_path: Path, end: str) -> None:
    """Nothing that it started keeps it alive: its end is the end of the last reference."""
    executor = FakeExecutor(num_blocks=400, block_size=4, forward_s=0.0005)

    async def main() -> None:
        engine = AsyncEngine(executor=executor, block_size=4, **publishing(tmp_path), allow_events_control=True)
        await engine.start()
        await engine.submit_unattended([1, 2], ENDLESS)
        await asyncio.sleep(0.01)
        if end == "in its loop":
            reference = weakref.ref(engine)
            with pytest.warns(ResourceWarning, match=r"dropped without being shut down: use `async with AsyncEngine\(...\)`, or `await"):
                del engine
            await asyncio.sleep(0)
            assert reference() is None
            for _ in range(1000):
                if nothing_is_left(executor, tmp_path):
                    return
                await asyncio.sleep(0.005)
            raise AssertionError(names_of_threads())

    if end == "in its loop":
        asyncio.run(main())
    else:
        with pytest.warns(ResourceWarning, match="dropped without being shut down"):
            asyncio.run(main())
        deadline = time.monotonic() + 5
        while not nothing_is_left(executor, tmp_path) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert nothing_is_left(executor, tmp_path)
    assert len(read_recording(tmp_path / "steps.jsonl").events) > 1


async def test_an_engine_that_was_shut_down_or_never_started_ends_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    AsyncEngine(executor=FakeExecutor())
    async with AsyncEngine(executor=FakeExecutor()) as engine:
        await engine.generate_batch([[1]], SHORT)
        stream = engine.generate([1], ENDLESS)
        await anext(stream)
    unstarted = AsyncEngine(executor=FakeExecutor())
    await unstarted.shutdown()
    del engine, unstarted, stream
    gc.collect()
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_a_shutdown_that_was_cancelled_can_be_done_again(start_rig: Any) -> None:
    """As at the end of asyncio.run(), which cancels every task, also the one that stops an engine."""
    async with start_rig() as rig:
        task = asyncio.create_task(rig.engine.shutdown())
        await asyncio.sleep(0)
        for other in asyncio.all_tasks():
            if other.get_name() == "aioengine-stop":
                other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rig.engine._life.is_stopped
        await rig.engine.shutdown()
        assert rig.executor.is_shut_down


async def test_every_part_is_stopped_also_if_another_one_fails(tmp_path: Path) -> None:
    executor = FakeExecutor()
    engine = AsyncEngine(executor=executor, record=tmp_path / "steps.jsonl")
    await engine.start()
    structured_output = engine._life.started().structured_output
    shutdown = structured_output.shutdown

    def fail() -> None:
        raise OSError("no")

    structured_output.shutdown = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no"):
        await engine.shutdown()
    assert executor.is_shut_down
    assert not names_of_threads()
    structured_output.shutdown = shutdown  # type: ignore[method-assign]
    await engine.shutdown()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BaseException])
def test_whatever_is_raised_in_the_loops_task_nobody_waits_for_ever(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """A panic in a library written in Rust is no Exception; Ctrl-C may come anywhere."""
    executor = FakeExecutor(num_blocks=129, block_size=4)
    executor.fail_at(3, exception=error("stop"))
    engine = AsyncEngine(executor=executor, tokenizer=FakeTokenizer())

    async def main() -> str:
        await engine.start()
        try:
            async for _ in engine.generate([1], ENDLESS):
                pass
        except EngineDeadError as exc:
            return str(exc)
        return "nothing"

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        loop.run_until_complete(task)
    assert "the engine died of" in loop.run_until_complete(task)
    loop.run_until_complete(engine.shutdown())
    loop.close()
    assert "the engine stops" in caplog.text


PROGRAM = """
import asyncio, sys, threading
from aioengine import AsyncEngine, SamplingParams
from aioengine.testing import FakeExecutor

executor = FakeExecutor(num_blocks=400, block_size=4, forward_s=0.001)
if "hangs" in sys.argv:
    executor.hang_at(3, through_shutdown=True)
engine = AsyncEngine(executor=executor, record=sys.argv[1])

async def main():
    await engine.start()
    stream = engine.generate([1], SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)
    await asyncio.sleep(0.02)
    if "raises" in sys.argv:
        raise KeyError("no")
    if "drops" in sys.argv:
        globals().pop("engine")

if "thread" in sys.argv:
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join()
elif "closes" in sys.argv:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
else:
    asyncio.run(main())
"""


MORE_WORDS = [pytest.param(words, marks=pytest.mark.slow) for words in ("raises", "drops", "closes", "plain hangs")]


@pytest.mark.parametrize("words", ["plain", "thread", "closes drops", *MORE_WORDS])
def test_a_process_ends_whatever_was_forgotten(tmp_path: Path, words: str) -> None:
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "steps.jsonl"), *words.split()], timeout=60, capture_output=True, text=True
    )
    assert result.returncode == (words == "raises")
    # A worker that hangs is waited for, for five seconds.
    assert time.perf_counter() - start < (20 if "hangs" in words else 10)
    assert "Fatal" not in result.stderr
