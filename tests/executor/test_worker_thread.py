from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest

from aioengine.executor.worker_thread import WorkerThread


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_calls_run_in_order_in_one_thread_that_starts_with_the_first() -> None:
    thread = WorkerThread("ordered")
    assert "ordered" not in names()
    seen: list[tuple[int, int]] = []
    futures = [thread.submit(lambda index: seen.append((index, threading.get_ident())), index) for index in range(100)]
    for future in futures:
        future.result(5)
    assert [index for index, _ in seen] == list(range(100))
    assert len({ident for _, ident in seen}) == 1
    thread.shutdown()
    thread.shutdown()
    assert "ordered" not in names()
    with pytest.raises(RuntimeError, match="'ordered' was shut down"):
        thread.submit(print)


def test_an_exception_goes_to_the_future_and_the_thread_goes_on() -> None:
    thread = WorkerThread("failing")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(5)
    with pytest.raises(SystemExit):
        thread.submit(sys.exit).result(5)
    assert thread.submit(lambda: 7).result(5) == 7
    thread.shutdown()


def test_shutdown_waits_for_the_running_call_and_cancels_the_rest() -> None:
    thread = WorkerThread("waiting")
    entered, gate = threading.Event(), threading.Event()

    def call() -> bool:
        entered.set()
        return gate.wait(5)

    running, waiting = thread.submit(call), thread.submit(print, "never")
    assert entered.wait(5)
    threading.Timer(0.05, gate.set).start()
    thread.shutdown()
    assert running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)


def test_a_cancelled_call_is_not_made() -> None:
    thread = WorkerThread("cancelling")
    gate = threading.Event()
    thread.submit(gate.wait, 5)
    calls: list[int] = []
    cancelled, last = thread.submit(calls.append, 1), thread.submit(calls.append, 2)
    assert cancelled.cancel()
    gate.set()
    last.result(5)
    assert calls == [2]
    thread.shutdown()


def test_it_ends_when_nobody_knows_it_any_more() -> None:
    thread = WorkerThread("forgotten")
    assert thread.submit(lambda: 1).result(5) == 1
    del thread
    gc.collect()
    for _ in range(500):
        if "forgotten" not in names():
            return
        time.sleep(0.01)
    raise AssertionError("the thread lives on")


def test_it_keeps_nothing_of_a_call_alive() -> None:
    class Big:
        pass

    thread = WorkerThread("light")
    big = Big()
    reference = weakref.ref(big)
    assert thread.submit(lambda value: value is not None, big).result(5)
    thread.submit(lambda: None).result(5)
    del big
    gc.collect()
    assert reference() is None
    thread.shutdown()


def test_a_process_that_forgets_it_waits_for_the_running_call_but_not_for_ever() -> None:
    program = """
import sys, threading, time
import aioengine.executor.worker_thread as module
module._EXIT_WAIT_S = 0.5
thread = module.WorkerThread("left")
entered = threading.Event()
def call():
    entered.set()
    time.sleep(float(sys.argv[1]))
    print("done", flush=True)
thread.submit(call)
entered.wait()
"""
    for duration, said in (("0.1", "done\n"), ("60", "")):
        start = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", program, duration], capture_output=True, text=True, timeout=50, check=False)
        assert (result.stdout, result.returncode) == (said, 0), result.stderr
        assert time.perf_counter() - start < 20
