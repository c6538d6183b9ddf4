"""Under `pytest -n` a test that measures time has the machine to itself."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.conftest import Locks


class Worker:
    """One of the processes: a thread with locks of its own, which excludes others as a process would."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._locks = Locks(folder)
        self._is_done = threading.Event()
        self.has_floor = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(alone,), daemon=True)
        self._thread.start()

    def _run(self, alone: bool) -> None:
        self._locks.take_floor(alone=alone)
        self.has_floor.set()
        assert self._is_done.wait(30)
        self._locks.leave_floor()

    def leave(self) -> None:
        self._is_done.set()
        self._thread.join(30)
        self._locks.close()


def test_many_share_the_floor_and_who_wants_it_alone_comes_before_those_who_ask_later(tmp_path: Path) -> None:
    first, second = (Worker(tmp_path, alone=False) for _ in range(2))
    assert first.has_floor.wait(30)
    assert second.has_floor.wait(30)
    measuring = Worker(tmp_path, alone=True)
    first.leave()
    assert not measuring.has_floor.wait(0.05)
    late = Worker(tmp_path, alone=False)
    second.leave()
    # Whoever of the two came to the gate first goes first; they are never in together.
    while not (measuring.has_floor.is_set() or late.has_floor.is_set()):
        measuring.has_floor.wait(0.01)
    assert not late.has_floor.wait(0.05) or not measuring.has_floor.is_set()
    earlier, later = (measuring, late) if measuring.has_floor.is_set() else (late, measuring)
    earlier.leave()
    assert later.has_floor.wait(30)
    later.leave()
