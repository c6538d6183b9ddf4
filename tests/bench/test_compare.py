"""Comparisons, with runners that have no engine: the protocol, the turns, who agrees with whom, who fails."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine_bench import compare as compare_module
from aioengine_bench import peers as peers_module
from aioengine_bench.compare import agreement, compare, host_cost_rows, turn_requests
from aioengine_bench.peer_process import PeerFailedError, PeerProcess
from aioengine_bench.peers import PEERS, RUNNERS, Peer, build_environment, find_contestant, requirements, runner_path, set_up
from aioengine_bench.settings import CompareSettings
from aioengine_bench.specs import SaveOptions
from aioengine_bench.workloads import WorkloadRequest, load_workload

RUNNER = f"""
import sys, time
sys.path.insert(0, {str(RUNNERS)!r})
from protocol import Answer, serve

class Engine:
    name, version, precision, note = "fake", "1", "none", ""

    def __init__(self, settings):
        print("noise on stdout")
        self.odd = settings.get("model") == "odd"

    def run(self, requests):
        if len(requests) == 3:
            raise SystemExit("three is too many")
        answers = []
        for request in requests:
            answer = Answer()
            for index in range(request["max_tokens"]):
                answer.add(0.01 * (index + 1), [request["prompt"][0] + index + ("odd" in sys.argv)])
            answers.append(answer)
        return answers

    def close(self):
        pass

serve(Engine)
"""


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    path = tmp_path / "runner.py"
    path.write_text(RUNNER)
    return path


def requests(num: int) -> list[WorkloadRequest]:
    return [WorkloadRequest([10 * (index + 1)], 3) for index in range(num)]


def test_a_runner_answers(runner: Path) -> None:
    with PeerProcess("fake", [sys.executable, str(runner)]) as process:
        process.start({})
        assert (process.facts["version"], process.facts["startup_s"] > 0) == ("1", True)
        wall_s, records, token_ids = process.run(requests(2))
    assert wall_s >= 0
    assert token_ids == [[10, 11, 12], [20, 21, 22]]
    assert records[0].ttft == pytest.approx(0.01)
    assert records[0].itl == pytest.approx([0.01, 0.01])
    assert process.peak_rss_mb is None or process.peak_rss_mb > 1


def test_a_runner_that_ends_is_named_with_its_last_words(runner: Path) -> None:
    with PeerProcess("fake", [sys.executable, str(runner)]) as process:
        process.start({})
        with pytest.raises(PeerFailedError, match=r"fake ended with status 1(.|\n)*three is too many"):
            process.run(requests(3))


@pytest.fixture
def three_peers(runner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, one that agrees with it, one that does not."""
    names = ("aioengine", "vllm", "odd")
    peers = {name: Peer(name, "runner.py", name, own=True) for name in names}
    monkeypatch.setattr(peers_module, "PEERS", peers)
    monkeypatch.setattr(compare_module, "PEERS", peers)
    monkeypatch.setattr(compare_module, "runner_path", lambda script: runner)
    monkeypatch.setattr(compare_module, "_runner_settings", lambda settings, workload: {})
    original = PeerProcess.__init__

    def start(self: PeerProcess, name: str, command: Sequence[str]) -> None:
        original(self, name, [*command, name])

    monkeypatch.setattr(PeerProcess, "__init__", start)


@pytest.mark.usefixtures("three_peers")
def test_one_table_and_one_picture(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    picture = tmp_path / "picture.svg"
    save = SaveOptions(output_json="-")
    compare(CompareSettings(model="m", workload="single", num_runs=3, max_requests=1, picture=str(picture), save=save))
    captured = capsysbinary.readouterr()
    result: dict[str, Any] = json.loads(captured.out)
    rows = {row["engine"]: row for row in result["rows"]}
    assert list(rows) == ["aioengine", "vllm", "odd"]
    assert {name: (row["agreement"], row["agreement_of"]) for name, row in rows.items()} == {
        "aioengine": (1, 1),
        "vllm": (1, 1),
        "odd": (0, 1),
    }
    assert all(row["reference"] == "vllm" and len(row["turns"]) == 3 for row in rows.values())
    assert picture.read_text().startswith("<svg")
    order = [line.split(b",")[1].split(b":")[0].strip() for line in captured.err.splitlines() if line.startswith(b"turn")]
    assert order == [b"aioengine", b"vllm", b"odd"] * 3, "A B A B"


@pytest.mark.usefixtures("three_peers")
def test_an_engine_that_fails_is_left_out_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "turn_requests", lambda workload, turn, max_requests: requests(2 + turn))
    compare(CompareSettings(model="m", num_runs=2, engines=("aioengine", "vllm")))
    captured = capsys.readouterr()
    assert "aioengine failed: aioengine ended with status 1" in captured.err
    assert "2/2" in captured.out, "what was measured before is kept"


def test_later_turns_have_other_tokens_and_the_same_lengths() -> None:
    workload = load_workload("shared_prefix")
    first, second = (turn_requests(workload, turn, max_requests=3) for turn in (0, 1))
    assert first == workload.requests[:3]
    for before, after in zip(first, second, strict=True):
        assert len(before.prompt_token_ids) == len(after.prompt_token_ids)
        assert before.prompt_token_ids[0] != after.prompt_token_ids[0]
    assert second[0].prompt_token_ids[:512] == second[1].prompt_token_ids[:512], "what was shared is shared still"


def test_agreement() -> None:
    assert agreement([[1, 2], [3]], [[1, 2], [4]]) == 1


def test_host_cost_takes_the_least_and_the_share() -> None:
    def one(engine: str, schedule: float) -> dict[str, Any]:
        keys = ("schedule_median_us", "update_min_us", "update_median_us")
        return {"engine": engine, "num_reqs": 10, "schedule_min_us": schedule, **dict.fromkeys(keys, 20.0)}

    rows = host_cost_rows([one("aioengine", 40.0), one("vllm", 180.0), one("aioengine", 30.0)])
    assert [(row["engine"], row["min_us"], row["us_per_request"], row["share_of_vllm"]) for row in rows] == [
        ("aioengine", 50.0, 5.0, 0.25),
        ("vllm", 200.0, 20.0, 1.0),
    ]


def test_requirements_leave_out_extras_and_what_is_excluded(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1-py3-none-any.whl"
    lines = ["Name: x", "Requires-Dist: torch==2", "Requires-Dist: Torch-Audio>=1", "Requires-Dist: numpy; python_version > '3'"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "\n".join([*lines, "Requires-Dist: y; extra == 'more'"]))
    assert requirements(wheel, excluded=["torch"]) == ["Torch-Audio>=1", "numpy; python_version > '3'"]


def test_the_caller_has_the_last_word_on_a_build() -> None:
    peer = Peer("x", "x.py", "x", build_environment={"CMAKE_ARGS": "-DA=1 -DB=1", "JOBS": "2"})
    assert build_environment(peer, {"HOME": "/"}) == {"HOME": "/", "CMAKE_ARGS": "-DA=1 -DB=1", "JOBS": "2"}
    given = {"CMAKE_ARGS": "-DB=0", "JOBS": "1"}
    assert build_environment(peer, given) == {"CMAKE_ARGS": "-DA=1 -DB=1 -DB=0", "JOBS": "1"}
    assert build_environment(Peer("y", "y.py", "y"), {"HOME": "/"}) == {"HOME": "/"}


def test_packages_are_installed_one_call_each_in_the_environment_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], str]] = []

    def run(command: Sequence[str], *, check: bool, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        calls.append((list(command[4:]), env["CMAKE_ARGS"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setattr(venv, "create", lambda folder, **settings: None)
    monkeypatch.setattr(subprocess, "run", run)
    set_up(Peer("x", "x.py", "x", install=[["a"], ["b", "c"]], build_environment={"CMAKE_ARGS": "-DA=1"}), tmp_path, say=print)
    assert calls == [(["--quiet", "a"], "-DA=1"), (["--quiet", "b", "c"], "-DA=1")]


def test_every_peer_has_a_runner_that_imports_nothing_of_ours() -> None:
    for peer in PEERS.values():
        path = runner_path(peer.runner)
        names = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import) for alias in node.names}
        foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"protocol"}
        assert foreign == ({"aioengine"} if peer.own else set()), path


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"vllm is not set up in .*: run `aioengine bench compare --setup vllm` first"):
        compare(CompareSettings(model="m", engines=["vllm"], peers_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no engine 'nothing', only aioengine, vllm"):
        compare(CompareSettings(model="m", engines=["nothing"], peers_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="reference 'x' is not among"):
        compare(CompareSettings(model="m", engines=["aioengine"], reference="x", peers_dir=str(tmp_path)))
    compare(CompareSettings(model="m", list_engines=True, peers_dir=str(tmp_path)))
    assert "vllm           set up: no" in capsys.readouterr().out


def test_an_engine_is_named_with_settings_of_its_own() -> None:
    contestant = find_contestant("openvino:weight_format=int8,threads=2")
    assert (contestant.name, contestant.peer.name) == ("openvino:weight_format=int8,threads=2", "openvino")
    assert contestant.options == {"weight_format": "int8", "threads": 2}
    assert find_contestant("vllm").options == {}


@pytest.mark.parametrize("text", ["vllm:x", "vllm:=1", "vllm:x="])
def test_settings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME or NAME:OPTION=VALUE"):
        find_contestant(text)


def test_a_table_names_the_file_and_not_its_folder() -> None:
    assert compare_module._without_folders("llama.cpp:gguf=/somewhere/deep/m.Q4_0.gguf,threads=2") == "llama.cpp:gguf=m.Q4_0.gguf,threads=2"
