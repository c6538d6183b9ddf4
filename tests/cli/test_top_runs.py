"""`aioengine top` on whole recordings, and with arguments that do not go together."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from aioengine.cli import main
from tests.tui.chrome_trace import faults_of
from tests.tui.runs import make_run


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    make_run(num_requests=20, record=path)
    return path


def test_trace_and_report_of_one_reading(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, report = tmp_path / "out.json", tmp_path / "out.html"
    report.write_text("old")
    assert main(["top", str(path), "--trace", str(trace), "--report", str(report)]) == 0
    assert faults_of(trace.read_bytes()) == []
    assert "<title>Report of run.jsonl</title>" in report.read_text(encoding="utf-8")
    assert "20 requests" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.html", "out.json"], "nothing half-written is left"


def test_a_trace_is_compressed_if_its_name_says_so(path: Path, tmp_path: Path) -> None:
    assert main(["top", str(path), "--trace", str(tmp_path / "out.json.gz")]) == 0
    assert faults_of(gzip.decompress((tmp_path / "out.json.gz").read_bytes())) == []


def test_a_comparison_as_text_and_as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(path), str(path), "--compare"]) == 0
    text = capsys.readouterr().out
    assert "The frames are the same from the first step to the last." in text
    assert main(["top", str(path), str(path), "--compare", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["frames_differ_at"] is None
    assert value["figures"]["ttft_p95"]["change"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--compare"], "argument --compare: two recordings are needed"),
        (["a", "b", "c", "--compare"], "argument --compare: two recordings are needed"),
        (["--trace", "t.json"], "argument --trace: one recording is needed"),
        (["a", "b", "--report", "r.html"], "argument --report: one recording is needed"),
        (["a", "b", "--compare", "--trace", "t"], "argument --compare: not allowed with --trace"),
        (["a", "--report", "r", "--web"], "argument --report: not allowed with --web"),
        (["a", "--demo"], "argument --demo: not allowed with another source"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["top", *arguments])
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_recording_is_never_written_over(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = path.read_bytes()
    assert main(["top", str(path), "--report", str(path)]) == 2
    assert "is the recording itself" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_what_is_no_recording_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / name), "--trace", str(tmp_path / "t.json")]) == 1
    assert str(tmp_path / name).rstrip("/.") in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_a_damaged_line_is_named_and_nothing_is_written(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join([*lines[:5], b"garbage\n", *lines[5:]]))
    assert main(["top", str(bad), "--report", str(tmp_path / "r.html")]) == 1
    assert "line 6" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_recordings_are_no_fleet(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(path), str(path), "--once"]) == 2
    assert "--compare shows two side by side" in capsys.readouterr().err
