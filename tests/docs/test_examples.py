"""Every program in examples/ does what its first line says."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
MAX_LINES = 40

pytestmark = pytest.mark.model


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example as `python NAME ARGUMENTS` does; returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def test_all_are_short_tested_here_and_shown_in_the_docs() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    tests = (ROOT / "tests/docs/test_examples.py").read_text(encoding="utf-8")
    assert len(NAMES) == 11
    assert [name for name in NAMES if len((EXAMPLES / name).read_text().splitlines()) >= MAX_LINES] == []
    assert [name for name in NAMES if f'"examples/{name}"' not in page or f'("{name}"' not in tests] == []


def test_stream(run: Callable[..., str]) -> None:
    text, _, last = run("stream.py").rstrip().rpartition("\n")
    assert len(text) > 50
    assert re.fullmatch(r"\[(length|stop), first token after \d+\.\d\d s]", last)


def test_batch(run: Callable[..., str]) -> None:
    animals = [line.split(":")[0] for line in run("batch.py").splitlines() if re.match("[a-z]+:", line)]
    assert animals == ["cat", "dog", "horse", "whale", "bee", "owl", "fox", "frog"]


def test_structured_output(run: Callable[..., str]) -> None:
    assert re.search(r", \d+, likes (music|books|football)$", run("structured_output.py").rstrip())


def test_tools(run: Callable[..., str], server_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_URL", f"http://127.0.0.1:{server_port}/v1")
    call, _, answer = run("tools.py").partition("\n")
    assert re.fullmatch(r"get_weather\(\{.*}\) -> It is \d+ degrees in (Paris|Rome|Oslo)\.", call)
    assert answer.strip()


def test_watch_steps(run: Callable[..., str]) -> None:
    steps = [line for line in run("watch_steps.py").splitlines() if line.startswith("step ")]
    assert len(steps) > 6
    assert any("stop: max_num_seqs" in line for line in steps)  # two may run, and three came


def test_logits_processor(run: Callable[..., str]) -> None:
    without, with_rule = run("logits_processor.py").splitlines()
    assert without.split("=", 1)[1] != with_rule.split("=", 1)[1]


def test_fake_engine_test() -> None:
    load("fake_engine_test.py")["test_every_text_gets_a_summary_in_its_order"]()


def test_serve_and_mount() -> None:
    with TestClient(load("serve_and_mount.py")["app"], base_url="http://127.0.0.1") as client:
        assert client.get("/").text.startswith("0 requests run")
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}
        assert client.post("/llm/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] > 0


def test_fastapi_app() -> None:
    with TestClient(load("fastapi_app.py")["app"], base_url="http://127.0.0.1") as client:
        assert len(client.get("/tale", params={"about": "ships", "max_tokens": 8}).text) > 5
        assert client.get("/llm/v1/models").json()["data"]


def test_read_recording(run: Callable[..., str]) -> None:
    out = run("read_recording.py", str(ROOT / "docs/tour.jsonl"))
    assert "1 preemptions" in out
    assert "whale waited: " in out
    header = json.loads((ROOT / "docs/tour.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert header["schema_version"] >= 2


def test_ray_serve() -> None:
    """What it is beside others: tests/replicas/test_ray_serve.py."""
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install aioengine[ray-serve]")
    assert load("ray_serve.py")["app"] is not None
