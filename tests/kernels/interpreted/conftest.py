"""Every kernel on NumPy, against float64. Triton's interpreter is chosen when triton is first imported, so a process is in it or not.

These are tests like all others: collected once, named and chosen one by one. Only where they run is special: a process that is not
in the interpreter starts one that is, once, and has it run each of them when its turn comes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_PIPE = "AIOENGINE_INTERPRETER_PIPE"  # in the environment of the other process: the number of its end

collect_ignore = [] if importlib.util.find_spec("triton") is not None else [path.name for path in HERE.glob("test_*.py")]

if IS_INTERPRETED:
    from aioengine_kernels import interpreter

    interpreter.install()


class InterpreterProcess:
    """A pytest in the interpreter, with all tests of this folder, that runs those that it is asked for."""

    def __init__(self) -> None:
        self._pipe, other_end = Pipe()
        selection = [str(HERE), "-q", "-m", "", "-n0", "-p", "no:cacheprovider", "--import-mode=importlib"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *selection],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", _PIPE: str(other_end.fileno())},
            pass_fds=[other_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        other_end.close()

    def run(self, nodeid: str) -> list[dict[str, Any]]:
        """What is to be reported of a test. Raises EOFError if the process ends meanwhile."""
        with contextlib.suppress(BrokenPipeError):  # then nothing can be received either
            self._pipe.send(nodeid)
        reports: list[dict[str, Any]] = self._pipe.recv()
        return reports

    def close(self) -> None:
        self._pipe.close()  # which ends it
        self._process.wait()


PROCESS = pytest.StashKey[InterpreterProcess]()


def is_here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


# ---------------------------------------------------------------------------------------------------- in the other process
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if _PIPE not in os.environ:
        return None
    tests = {item.nodeid: item for item in session.items}
    with Connection(int(os.environ[_PIPE])) as pipe, contextlib.suppress(EOFError):
        while True:
            item = tests[pipe.recv()]
            reports = runtestprotocol(item, log=False, nextitem=None)
            pipe.send([session.config.hook.pytest_report_to_serializable(config=session.config, report=report) for report in reports])
    return True


# ---------------------------------------------------------------------------------------------------- in this one
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_here(item) and not IS_INTERPRETED:
            item.add_marker(pytest.mark.timeout(0))  # the other process watches over it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if IS_INTERPRETED or not is_here(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_there(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # Nothing was set up here for it, but what the test before it shares with it was left standing for it.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def run_there(item: pytest.Item) -> list[pytest.TestReport]:
    stash, hook = item.config.stash, item.config.hook
    if PROCESS not in stash:
        stash[PROCESS] = InterpreterProcess()
    try:
        reports = stash[PROCESS].run(item.nodeid)
    except EOFError:
        stash[PROCESS].close()
        del stash[PROCESS]
        what = "the process in Triton's interpreter ended"
        return [pytest.TestReport(item.nodeid, item.location, dict(item.keywords), "failed", what, "call")]
    return [hook.pytest_report_from_serializable(config=item.config, data=report) for report in reports]


def pytest_unconfigure(config: pytest.Config) -> None:
    if PROCESS in config.stash:
        config.stash[PROCESS].close()
