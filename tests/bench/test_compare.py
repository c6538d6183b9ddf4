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

from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench import compare as compare_module
from aioengine_bench import peers as peers_module
from aioengine_bench.compare import agreement, compare, host_cost_rows, turn_requests
from aioengine_bench.compare_table import combined_table, load_note, mark_best, without_folders
from aioengine_bench.peer_process import PeerFailedError, PeerProcess
from aioengine_bench.peer_setup import check_checkout, cmake_arguments, requirements, set_up
from aioengine_bench.peers import PEERS, RUNNERS, STAMP, Build, Peer, find_contestant, runner_path, with_all_settings
from aioengine_bench.settings import CompareSettings
from aioengine_bench.specs import SaveOptions
from aioengine_bench.workloads import WorkloadRequest, load_workload

RUNNER = f"""
import sys, time
sys.path.insert(0, {str(RUNNERS)!r})
from protocol import Answer, serve

class Engine:
    name, version, precision, note, tells_tokens = "fake", "1", "none", "", True

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
    build = Build(target="x", cmake_args=("-DA=1",))
    assert cmake_arguments(build, {"CMAKE_ARGS": "-DA=0 -DB=2"})[-3:] == ["-DA=1", "-DA=0", "-DB=2"]


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment whose Python is the one of the tests' shell: `true` in place of pip."""

    def create(folder: Path, *, with_pip: bool, clear: bool) -> None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").unlink(missing_ok=True)
        (folder / "bin" / "python").symlink_to("/bin/echo")

    monkeypatch.setattr(venv, "create", create)


@pytest.mark.usefixtures("no_environment")
def test_a_set_up_is_finished_when_its_stamp_is_there(tmp_path: Path) -> None:
    peer, said = Peer("x", "x.py", "x", install=[["a"]]), list[str]()
    assert peer.state(tmp_path) == "no"
    (tmp_path / "x" / "bin").mkdir(parents=True)
    assert peer.state(tmp_path) == "interrupted"
    set_up(peer, tmp_path, say=said.append)
    assert peer.state(tmp_path) == "yes"
    assert any("did not finish" in line for line in said)
    set_up(peer, tmp_path, say=said.append)
    assert "is set up in" in said[-1]
    assert Peer("x", "x.py", "x", install=[["b"]]).state(tmp_path) == "outdated"
    (tmp_path / "x" / STAMP).write_text("{")
    assert peer.state(tmp_path) == "interrupted"


@pytest.mark.usefixtures("no_environment")
def test_a_set_up_that_fails_leaves_no_stamp_and_says_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer("x", "x.py", "x", build=Build(target="t"))
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such luck")')
    with pytest.raises(AioEngineError, match=r"(?s)failed with status.*no such luck"):
        set_up(peer, tmp_path, say=print, checkout=str(checkout))
    assert peer.state(tmp_path) == "interrupted"


def test_a_checkout_is_asked_for_before_anything_is_made(tmp_path: Path) -> None:
    peer = PEERS["ik_llama.cpp"]
    with pytest.raises(ConfigError, match=r"ik_llama\.cpp is built from a checkout that you have: name it with --checkout DIR"):
        check_checkout([peer], None)
    with pytest.raises(ConfigError, match=r"has no CMakeLists\.txt"):
        check_checkout([peer], str(tmp_path))
    with pytest.raises(ConfigError, match="no effect"):
        check_checkout([PEERS["vllm"]], str(tmp_path))


def test_settings_that_an_engine_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="vllm has no setting 'weigths'; it has: dtype, isa"):
        find_contestant("vllm:weigths=fast")
    with pytest.raises(ConfigError, match="openvino:weight_format is one of fp32, fp16, int8, int4, got 'int5'"):
        find_contestant("openvino:weight_format=int5")
    with pytest.raises(ConfigError, match="there is no file"):
        find_contestant("llama.cpp:gguf=/nowhere.gguf")
    with pytest.raises(ConfigError):
        find_contestant("aioengine:weigths=fast")


def test_every_setting_of_every_engine_is_one_that_it_takes() -> None:
    names = with_all_settings(list(PEERS))
    assert [find_contestant(name).name for name in names] == names
    assert {"aioengine:weights=exact", "vllm:dtype=bfloat16", "llama.cpp", "llama.cpp:quant=Q4_0"} <= set(names)
    assert with_all_settings(["vllm:dtype=float32"]) == ["vllm:dtype=float32"], "what is named with a setting is that alone"


def row(engine: str, figure: float, *, failed: int = 0) -> dict[str, Any]:
    return {"engine": engine, "output_throughput": figure, "failed": failed, "agreement": 1, "agreement_of": 2}


def test_the_best_setting_of_each_engine_is_one_that_lost_nothing() -> None:
    rows = [row("a:x=1", 5.0), row("b", 1.0), row("a:x=2", 9.0, failed=1), row("a:x=3", 4.0)]
    mark_best(rows)
    assert [one["engine"] for one in rows if one["best_of_peer"]] == ["a:x=1", "b"]


def test_one_table_of_several_results_shows_losing_rows_and_lost_requests() -> None:
    rows = [row("aioengine", 10.0), row("b:x=1", 12.5), row("b:x=2", 50.0, failed=3)]
    first = {"workload": "mixed", "rows": rows, "errors": {}, "load_note": "busy"}
    second = {"workload": "long", "rows": rows[:1], "errors": {"b:x=1": "dead"}}
    table = combined_table([first, second], markdown=True)
    assert "| aioengine | **10.0** | 1 of 2 | **10.0** |" in table
    assert "| b:x=1 | **12.5** | 1 of 2 |  |" in table
    assert "| b:x=2 | 50.0 (3 lost) | 1 of 2 |  |" in table
    assert "| best of aioengine over the best of the others | 0.80 |  |  |" in table
    assert "mixed: busy." in table
    assert "failed to run: b:x=1" in table
    with pytest.raises(ConfigError, match="two results are of the workload 'mixed'"):
        combined_table([first, first], markdown=True)


def test_a_loaded_machine_is_named() -> None:
    assert load_note(0.9, 2) is None
    assert "load average 9.0 on 2 cores" in (load_note(9.0, 2) or "")


def test_tokens_that_llama_cpp_never_streams_are_counted_by_its_own_numbers() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from llamacpp_runner import read_answer
lines = [(0.1, b'data: {"tokens": [1, 2]}'), (0.3, b'data: {"stop": true, "tokens_predicted": 5}')]
whole, cut, refused = read_answer(lines), read_answer(lines[:1]), read_answer([(0.1, b"HTTP/1.1 503 X")])
print(whole.chunks, whole.num_unseen, whole.error or "fine", "|", cut.error, "|", refused.error)
"""
    said = subprocess.run([sys.executable, "-c", code, str(RUNNERS)], capture_output=True, text=True, check=True).stdout
    assert said.startswith("[(0.1, 2), (0.3, 3)] 3 fine | the stream ended without its last message")
    assert "503" in said


def test_every_peer_has_a_runner_that_imports_nothing_of_ours() -> None:
    for peer in PEERS.values():
        path = runner_path(peer.runner)
        names = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import) for alias in node.names}
        foreign = {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"protocol", "quantized"}
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
    contestant = find_contestant("openvino:weight_format=int8,dynamic_group_size=2")
    assert (contestant.name, contestant.peer.name) == ("openvino:weight_format=int8,dynamic_group_size=2", "openvino")
    assert contestant.options == {"weight_format": "int8", "dynamic_group_size": 2}
    assert find_contestant("vllm").options == {}


@pytest.mark.parametrize("text", ["vllm:x", "vllm:=1", "vllm:x="])
def test_settings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME or NAME:OPTION=VALUE"):
        find_contestant(text)


def test_a_table_names_the_file_and_not_its_folder() -> None:
    assert without_folders("llama.cpp:gguf=/somewhere/deep/m.Q4_0.gguf,threads=2") == "llama.cpp:gguf=m.Q4_0.gguf,threads=2"
