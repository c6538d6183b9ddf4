"""Two replicas behind vllm-router, all of them processes: where prefixes go, and what the end of one replica costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replicas.processes import LongRequests, Replica, complete, free_port, num_running, running, wait_for

ROUTER = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.replicas,
    pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed: pip install vllm-router==0.1.17"),
    pytest.mark.timeout(180),
]
FAMILIES = ["The quick brown fox jumps over the lazy dog. " * 12, "Once upon a midnight dreary, while I pondered. " * 12]


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    both = [Replica(letter, tmp_path) for letter in "ab"]
    wait_for(lambda: all(replica.is_ready for replica in both))
    yield both
    for replica in both:
        replica.kill()


@pytest.fixture
def router(replicas: list[Replica]) -> Iterator[str]:
    port = free_port()
    # As docs/scaling.md has it. A replica whose /health fails once is left out: a draining one says so at once.
    options = ["--policy", "cache_aware", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    options += ["--health-success-threshold", "1", "--cb-failure-threshold", "1", "--prometheus-port", str(free_port())]
    assert ROUTER is not None
    with running([ROUTER, "--worker-urls", *(replica.url for replica in replicas), "--host", "127.0.0.1", "--port", str(port), *options]):
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(url))
        yield url


def answers(url: str) -> bool:
    try:
        return bool(complete(url, "hello"))
    except OSError:
        return False


def test_prompts_with_a_prefix_in_common_stay_together(router: str) -> None:
    by_family = [{complete(router, f"{family} Question {i}?")[0] for i in range(6)} for family in FAMILIES]
    assert [len(letters) for letters in by_family] == [1, 1], by_family


def spread(router: str, replicas: list[Replica], *, max_tokens: int) -> LongRequests:
    """Long requests of which both replicas have some."""
    requests = LongRequests(router, [f"{i} " + chr(97 + i) * 400 for i in range(8)], max_tokens=max_tokens)
    wait_for(lambda: all(num_running(replica) > 0 for replica in replicas) and sum(map(num_running, replicas)) == 8)
    return requests


def test_a_killed_replica_loses_its_own_requests_and_no_other(router: str, replicas: list[Replica]) -> None:
    requests = spread(router, replicas, max_tokens=200)
    lost, kept = map(num_running, replicas)
    replicas[0].kill()
    ends = requests.wait()
    assert ends["b"] >= kept
    assert ends["b"] + ends["-"] == 8, "who was on the killed one failed, or was begun anew on the other"
    assert ends["-"] <= lost
    wait_for(lambda: answers(router), within_s=10)
    assert {complete(router, f"After {i} {'x' * i}")[0] for i in range(6)} == {"b"}


def test_a_draining_replica_finishes_what_it_has_and_gets_nothing_new(router: str, replicas: list[Replica]) -> None:
    requests = spread(router, replicas, max_tokens=250)
    had, others = map(num_running, replicas)
    replicas[0].drain()
    wait_for(lambda: not replicas[0].is_ready)
    new = [complete(router, f"{family} while it drains {i}")[0] for family in FAMILIES for i in range(3)]
    assert set(new) == {"b"}
    assert requests.wait() == {"a": had, "b": others}
    assert replicas[0].process.wait(20) == 0
