"""Ranks as processes: the same tokens, and whatever becomes of a process, an error that says so and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.errors import ConfigError, EngineDeadError
from aioengine_bench.workloads import load_workload
from tests.e2e.test_tensor_parallel import requests
from tests.executor.in_ranks import fail_alone, num_held
from tests.waiting import until

QUESTIONS = [
    f"Tell me {what} about {topic}." for what in ("a story", "three facts", "the truth") for topic in ("cats", "rain", "Rome", "salt")
]
GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def rank_pids(parent: int | None = None) -> list[int]:
    """The live ranks of a process, by default of this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended
            if b"aioengine.executor.rank\0" in command and stat[0] != "Z" and int(stat[1]) == (parent or os.getpid()):
                found.append(int(entry.name))
    return sorted(found)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    assert rank_pids() == [], "a rank outlived its engine"
    if os.path.isdir("/dev/shm"):
        assert set(os.listdir("/dev/shm")) <= before, "shared memory was left"


def make_engine(model: Path, size: int = 2, **options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {"max_model_len": 256, "num_kv_cache_blocks": 100, "max_num_seqs": 8, "seed": 0, "dtype": "float32"}
    return AsyncEngine(str(model), tensor_parallel_size=size, **{"weights": "dense", **settings, **options})


async def tokens(model: Path, size: int) -> list[tuple[list[int], list[float]]]:
    async with make_engine(model, size) as engine:
        assert len(rank_pids()) == (size if size > 1 else 0)
        prompts, params = requests(258)
        return [tokens_of(output) for output in await engine.generate_batch(prompts, params, progress=False)]


def tokens_of(output: RequestOutput) -> tuple[list[int], list[float]]:
    logprobs = output.outputs[0].logprobs or []
    return output.token_ids, [entry[token_id].logprob for token_id, entry in zip(output.token_ids, logprobs, strict=True)]


async def test_processes_give_the_tokens_of_one(tiny_model: Path) -> None:
    ranks, alone = await tokens(tiny_model, 2), await tokens(tiny_model, 1)
    assert [each[0] for each in ranks] == [each[0] for each in alone]
    for ours, theirs in zip(ranks, alone, strict=True):
        assert ours[1] == pytest.approx(theirs[1], abs=1e-4)


async def dies_of(model: Path, harm: Callable[[AsyncEngine], None], *, within_s: float) -> str:
    """The cause that a request in flight is told after `harm`."""
    async with make_engine(model) as engine:
        running = asyncio.ensure_future(engine.generate_batch([[5, 6, 7]] * 4, GREEDY, progress=False))
        await until(lambda: engine.stats().num_running_reqs == 4)
        harm(engine)
        harmed = time.monotonic()
        with pytest.raises(EngineDeadError) as raised:
            await running
        took_s = time.monotonic() - harmed
        with pytest.raises(EngineDeadError):
            engine.check_health()
        await until(lambda: rank_pids() == [], within_s=5)
        assert took_s < within_s, f"it took {took_s:.1f} s to be told"
        return f"{raised.value} {raised.value.__cause__}"


async def test_a_rank_that_is_killed_ends_the_engine_with_its_name(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    cause = await dies_of(tiny_model, lambda _: os.kill(rank_pids()[1], signal.SIGKILL), within_s=5)
    assert re.search(r"rank 1 of 2 \(process \d+\) was killed by SIGKILL", cause), cause


@pytest.mark.slow
@pytest.mark.ci
async def test_a_rank_that_is_stopped_ends_the_engine_with_its_name(tiny_model: Path) -> None:
    cause = await dies_of(tiny_model, lambda _: os.kill(rank_pids()[1], signal.SIGSTOP), within_s=10)
    assert re.search(r"rank 1 of 2 \(process \d+\) has not answered for \d+ s: it is stopped", cause), cause


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 1])
async def test_an_exception_in_one_rank_ends_the_engine_with_it(rank: int, tiny_model: Path) -> None:
    def harm(engine: AsyncEngine) -> None:
        executor = engine._life.executor
        assert executor is not None
        executor.collective_rpc(fail_alone, rank)  # not waited for: another rank may be waiting for this one in a sum

    cause = await dies_of(tiny_model, harm, within_s=5)
    assert "ZeroDivisionError: this rank alone" in cause, cause


@pytest.mark.slow
@pytest.mark.ci
async def test_an_idle_engine_notices_that_a_rank_is_gone(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        os.kill(rank_pids()[0], signal.SIGKILL)

        def is_dead() -> bool:
            try:
                engine.check_health()
            except EngineDeadError as exc:
                return "rank 0 of 2" in str(exc)
            return False

        await until(is_dead, within_s=5)
        with pytest.raises(EngineDeadError, match="rank 0 of 2"):
            await engine.generate_batch([[5]], GREEDY, progress=False)


@pytest.mark.slow
@pytest.mark.ci
async def test_what_a_rank_refuses_is_raised_as_it_is(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="the KV cache of one request of max_model_len"):
        await make_engine(tiny_model, num_kv_cache_blocks=None, kv_cache_memory_bytes=4096).start()


PARENT = """
import asyncio, sys
from tests.e2e.test_rank_processes import GREEDY, Path, make_engine

async def main():
    async with make_engine(Path(sys.argv[1])) as engine:
        print("ready", flush=True)
        await engine.generate_batch([[5, 6, 7]] * 400, GREEDY, progress=False)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_end_with_the_process_that_started_them(tiny_model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tiny_model)], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        ranks = rank_pids(parent.pid)
        assert len(ranks) == 2
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks):
        assert time.monotonic() < deadline, "a rank lives on without the process that started it"
        time.sleep(0.05)


FULL = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && (cat /dev/zero > /dev/shm/all 2> /dev/null; exec "$@")'


@pytest.mark.slow
@pytest.mark.ci
def test_ranks_need_no_shared_memory(tiny_model: Path) -> None:
    """In a mount namespace whose /dev/shm is full."""
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here (it takes root)")
    program = PARENT.replace("* 400, GREEDY", "* 4, GREEDY").replace("progress=False)", "progress=False)\n        print('done')")
    command = ["unshare", "-m", "sh", "-c", FULL, "sh", sys.executable, "-c", program, str(tiny_model)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.stdout.split() == ["ready", "done"], done.stderr


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_requests", [12, 64])
async def test_three_ranks_of_the_built_in_model_give_the_tokens_of_one(num_requests: int) -> None:
    """Nine heads and three KV heads: 12 chats, and the 64 requests of "mixed"."""
    workload = load_workload("mixed")
    prompts: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = [SamplingParams(max_tokens=24, logprobs=1, temperature=0.8 * (i % 2), seed=i) for i in range(len(QUESTIONS))]
    if num_requests == 64:
        prompts = [request.prompt_token_ids for request in workload.requests]
        params = [SamplingParams(max_tokens=each.max_tokens, logprobs=1, temperature=0.0, ignore_eos=True) for each in workload.requests]
    results = []
    for size in (1, 3):
        async with make_engine(Path("smollm2"), size, num_kv_cache_blocks=1600, max_num_seqs=32, max_model_len=512) as engine:
            outputs = await engine.generate_batch(prompts, params, progress=False)
            results.append([tokens_of(output) for output in outputs])
    alone, ranks = results
    assert len(ranks) == num_requests
    assert [each[0] for each in ranks] == [each[0] for each in alone]
    for ours, theirs in zip(ranks, alone, strict=True):
        assert ours[1] == pytest.approx(theirs[1], abs=1e-4)


@pytest.mark.model
async def test_two_ranks_of_the_built_in_model_are_refused_with_the_reason() -> None:
    refused = r"tensor_parallel_size 2 does not divide the 9 attention heads and the 3 KV heads of smollm2; sizes that do: 1, 3"
    with pytest.raises(ConfigError, match=refused):
        await AsyncEngine("smollm2", tensor_parallel_size=2).start()


@pytest.mark.slow
@pytest.mark.ci
async def test_a_thousand_aborts_leave_nothing_in_any_rank(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:

        async def begin_and_leave(index: int) -> None:
            async for output in engine.generate([3 + index % 200, 4, 5], GREEDY):
                if len(output.token_ids) > index % 3:
                    break

        for first in range(0, 1000, 50):
            await asyncio.gather(*(begin_and_leave(index) for index in range(first, first + 50)))
        await until(lambda: engine._life.started().core.is_idle)
        executor = engine._life.executor
        assert executor is not None
        assert await asyncio.wrap_future(executor.collective_rpc(num_held)) == [(0, 8), (0, 8)]
