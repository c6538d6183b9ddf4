"""`cpu_affinity`: cores are read, held against the machine and the threads, and shared out among ranks."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from aioengine.checks.cores import format_cores
from aioengine.config import EngineConfig
from aioengine.distributed.group import SingleRank
from aioengine.errors import ConfigError
from aioengine.resolved_config import WorkerConfig
from aioengine.testing import make_model_info
from aioengine.worker.device import create_device
from aioengine.worker.rank_config import config_of_rank

pytestmark = pytest.mark.skipif("sys.platform != 'linux'")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ten cores, of which two are not this process's."""
    if "real_cores" not in request.fixturenames:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture
def real_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


class RankOf3(SingleRank):
    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def resolve(**options: Any) -> WorkerConfig:
    return EngineConfig(**options).resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 30).worker


@pytest.mark.parametrize(
    ("given", "cores", "text"),
    [("0-3, 7", (0, 1, 2, 3, 7), "0-3,7"), ([5, 1, 2], (1, 2, 5), "1-2,5"), ("4", (4,), "4"), ({3, 2}, (2, 3), "2-3"), (None, None, "")],
)
def test_cores_are_read_in_their_order(given: Any, cores: tuple[int, ...] | None, text: str) -> None:
    worker = resolve(cpu_affinity=given)
    assert worker.cpu_affinity == cores
    assert format_cores(cores or ()) == text
    assert worker.num_threads == (None if cores is None else len(cores))  # a thread a core, unless it is said otherwise


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_affinity": "6-9"}, "cpu_affinity (6-9) has core 8, but this process may use 0-7"),
        ({"cpu_affinity": "0-3", "num_threads": 5}, "cpu_affinity (0-3) must be at least 5 cores, one for each thread of 1 ranks, got 4"),
        ({"cpu_affinity": "0-4", "num_threads": 3, "tensor_parallel_size": 2}, "must be at least 6 cores, one for each thread of 2 ranks"),
        ({"cpu_affinity": "0", "tensor_parallel_size": 2}, "must be at least 2 cores"),
        (
            {"cpu_affinity": "0-1", "distributed_executor_backend": "ray"},
            'cpu_affinity (0-1) is of this machine, and "ray" runs ranks on others',
        ),
    ],
)
def test_cores_that_the_machine_or_the_threads_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(**options)


def test_a_system_that_keeps_no_thread_on_a_core_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match="needs Linux"):
        resolve(cpu_affinity="0")
    assert resolve().cpu_affinity is None


def test_each_rank_has_its_own_share() -> None:
    model = replace(make_model_info(), num_heads=6, num_kv_heads=3)
    engine = EngineConfig(cpu_affinity=tuple(range(1, 8)), tensor_parallel_size=3)
    config = engine.resolve(model, cuda_available=False, free_memory_bytes=1 << 30)
    assert config.worker.num_threads == 2
    assert [config_of_rank(config, RankOf3(rank)).worker.cpu_affinity for rank in range(3)] == [(1, 2), (3, 4), (5, 6)]


def test_the_workers_thread_and_what_it_starts_are_pinned_and_no_other(real_cores: list[int]) -> None:
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(sorted(os.sched_getaffinity(0)))

    def work() -> None:
        create_device(resolve(device="cpu", cpu_affinity=real_cores[-1:])).set_up_thread()
        look()
        started = threading.Thread(target=look)
        started.start()
        started.join()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    look()
    assert seen == [real_cores[-1:], real_cores[-1:], real_cores]


def test_cores_that_have_gone_since_are_an_error_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"cpu_affinity \(1000\) cannot be had"):
        create_device(WorkerConfig(device="cpu", dtype="float32", cpu_affinity=(1000,))).set_up_thread()
