"""For all tests. What stands here runs before anything imports torch."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

# OpenMP threads that spin while they wait make every test several times slower as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores as it is
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Engines of tests are not in the list of `aioengine top` of whoever runs them, and leave nothing where it looks.
os.environ["AIOENGINE_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="aioengine-tests-")
atexit.register(shutil.rmtree, os.environ["AIOENGINE_RUNTIME_DIR"], ignore_errors=True)

LOCKS = pytest.StashKey["Locks"]()


class Locks:
    """Between the workers of one `pytest -n`: a test that measures time (marker `alone`) has the machine to itself.

    Everybody passes the gate and then holds the floor, many at a time or one alone. Who wants it alone waits for it within the
    gate, so that nobody gets in before.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._floor = (os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o600) for name in ("gate", "floor"))

    def take_floor(self, *, alone: bool) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def leave_floor(self) -> None:
        fcntl.flock(self._floor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._gate)
        os.close(self._floor)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a worker's folder for temporary files is one of those in the session's
        config.stash[LOCKS] = Locks(Path(config.option.basetemp).parent)


def pytest_unconfigure(config: pytest.Config) -> None:
    if LOCKS in config.stash:
        config.stash[LOCKS].close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    locks = item.config.stash.get(LOCKS, None)
    if locks is None:
        return (yield)
    locks.take_floor(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        locks.leave_floor()
