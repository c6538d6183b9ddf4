"""Ranks placed by Ray, on a cluster of two nodes that Ray simulates on this machine. Without Ray these tests are skipped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, SamplingParams
from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, EngineDeadError
from aioengine.executor.ray import create_ray_executor
from aioengine.testing.builders import make_model_info
from tests.e2e.test_rank_processes import GREEDY, make_engine, tokens, tokens_of
from tests.e2e.test_tensor_parallel import requests
from tests.waiting import until

# Ray's own processes and sockets warn as they please.
with_ray = [pytest.mark.ci, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = EngineConfig(distributed_executor_backend="ray").resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r'needs Ray, which cannot be imported here .*: pip install "aioengine\[ray\]"'):
        create_ray_executor(config, files=None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Each has room for one rank, so the ranks come to lie on both."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install aioengine[ray]")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray
    ray.shutdown()
    cluster.shutdown()


def engine_on_ray(model: Path, size: int = 2, **options: Any) -> AsyncEngine:
    return make_engine(model, size, distributed_executor_backend="ray", **options)


class TestOnTwoNodes:
    pytestmark = with_ray

    async def test_the_tokens_are_those_of_one_rank(self, two_nodes: Any, tiny_model: Path) -> None:
        async with engine_on_ray(tiny_model) as engine:
            executor = engine._life.executor
            assert executor is not None
            nodes = await asyncio.wrap_future(executor.collective_rpc(node_of))
            assert len(set(nodes)) == 2, "each node has room for one rank"
            prompts, params = requests(258)
            ranks = [tokens_of(output) for output in await engine.generate_batch(prompts, params, progress=False)]
        alone = await tokens(tiny_model, 1)
        assert [each[0] for each in ranks] == [each[0] for each in alone]
        assert two_nodes.available_resources().get("CPU") == 2, "the room was given back"

    async def test_a_rank_that_is_killed_ends_the_engine(self, two_nodes: Any, tiny_model: Path) -> None:
        async with engine_on_ray(tiny_model) as engine:
            executor = engine._life.executor
            assert executor is not None
            pids = await asyncio.wrap_future(executor.collective_rpc(pid_of))
            running = asyncio.ensure_future(engine.generate_batch([[5, 6, 7]] * 4, GREEDY, progress=False))
            await until(lambda: engine.stats().num_running_reqs == 4)
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(EngineDeadError) as raised:
                await asyncio.wait_for(running, 5)
        assert re.search(rf"rank 1 of 2 \(process {pids[1]} on \S+\) ended", str(raised.value)), raised.value
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))

    async def test_too_few_resources_are_refused_with_their_numbers(self, two_nodes: Any, tiny_model: Path) -> None:
        with pytest.raises(ConfigError, match=r"Ray has no room for 2 ranks of 4 CPU each: the cluster has 2 CPU"):
            await engine_on_ray(tiny_model, num_threads=4).start()
        async with engine_on_ray(tiny_model, 1) as engine:
            await engine.generate_batch([[5]], SamplingParams(max_tokens=2), progress=False)


def node_of(worker: object) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def pid_of(worker: object) -> int:
    return os.getpid()
