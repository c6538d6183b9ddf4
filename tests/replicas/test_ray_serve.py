"""The example's deployment under Ray Serve, with engines that need no model: sessions, a killed replica, a replica taken away."""

from __future__ import annotations

import json
import os
import runpy
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.replicas.processes import ROOT, free_port, wait_for

pytestmark = [pytest.mark.replicas, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
OPTIONS: dict[str, Any] = {"graceful_shutdown_timeout_s": 60, "health_check_period_s": 1, "ray_actor_options": {"num_cpus": 1}}


class Deployment:
    """A number of replicas of the example, each of which answers with its own process id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.example = runpy.run_path(str(ROOT / "examples/ray_serve.py"))

    def scale(self, num_replicas: int) -> None:
        from ray import serve

        serving = self.example["serving"]

        def replica() -> Any:
            from aioengine.server.fake import ScriptedEngine
            from aioengine.server.script import parse_script

            text = f"{os.getpid()},"
            return serving(ScriptedEngine(script=parse_script(json.dumps({"tokens_per_s": 50, "answers": [{"text": text}]}))))

        options = {**self.example["OPTIONS"], **OPTIONS, "num_replicas": num_replicas}
        serve.run(serve.deployment(serve.ingress(replica)(), name="Replica", **options).bind(), name="engines")

    def ask(self, session: str, *, max_tokens: int = 8) -> int:
        """The process id of who answered. Raises OSError for any answer but 200."""
        body = {"model": "fake", "prompt": f"{session} asks", "max_tokens": max_tokens, "ignore_eos": True}
        headers = {"content-type": "application/json", "x-session-id": session}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=90) as response:
            return int(json.load(response)["choices"][0]["text"].split(",")[0])


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install aioengine[ray-serve]")
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install aioengine[ray-serve]")
    port = free_port()
    path = os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "tui"))])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    serve.start(http_options={"port": port})
    one = Deployment(f"http://127.0.0.1:{port}")
    one.scale(2)
    yield one
    serve.shutdown()
    ray.shutdown()


SESSIONS = [f"session-{i}" for i in range(12)]


def test_a_session_stays_with_its_replica(deployment: Deployment) -> None:
    first = {session: deployment.ask(session) for session in SESSIONS}
    assert len(set(first.values())) == 2
    assert {session: deployment.ask(session) for session in SESSIONS} == first


class Long:
    """A request of some seconds for each session, under way in threads."""

    def __init__(self, deployment: Deployment, *, max_tokens: int) -> None:
        self.ends: Counter[int] = Counter()  # by process id; 0: it failed
        self._threads = [threading.Thread(target=self._run, args=(deployment, session, max_tokens)) for session in SESSIONS]
        for thread in self._threads:
            thread.start()

    def _run(self, deployment: Deployment, session: str, max_tokens: int) -> None:
        try:
            self.ends[deployment.ask(session, max_tokens=max_tokens)] += 1
        except OSError:
            self.ends[0] += 1

    def wait(self) -> Counter[int]:
        for thread in self._threads:
            thread.join()
        return self.ends


def test_a_killed_replica_loses_its_own_requests_and_no_other(deployment: Deployment) -> None:
    homes = Counter(deployment.ask(session) for session in SESSIONS)
    lost, kept = list(homes)
    requests = Long(deployment, max_tokens=200)
    threading.Event().wait(1.5)  # 75 of the 200 tokens
    os.kill(lost, signal.SIGKILL)
    ends = requests.wait()
    assert ends[kept] >= homes[kept]
    assert ends[0] <= homes[lost]
    assert ends[0] + ends[kept] == len(SESSIONS)
    wait_for(lambda: len(answering(deployment)) == 2 and lost not in answering(deployment), within_s=60)


def answering(deployment: Deployment) -> set[int]:
    try:
        return {deployment.ask(session) for session in SESSIONS}
    except OSError:
        return set()


def test_a_replica_that_is_taken_away_finishes_what_it_has(deployment: Deployment) -> None:
    homes = Counter(deployment.ask(session) for session in SESSIONS)
    assert len(homes) == 2
    requests = Long(deployment, max_tokens=250)
    threading.Event().wait(1.0)
    deployment.scale(1)
    assert requests.wait() == homes
    wait_for(lambda: len(answering(deployment)) == 1)
