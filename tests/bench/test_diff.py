"""Two results beside each other: what changed, and what counts as a regression."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine_bench.diff import compare_figures, diff, figures, parse_condition
from aioengine_bench.settings import DiffSettings

BASE: dict[str, Any] = {
    "benchmark": "serve",
    "model_id": "m",
    "date": "20261201-100000",
    "num_prompts": 64,
    "request_rate": 2.0,
    "output_throughput": 100.0,
    "p99_ttft_ms": 50.0,
    "failed": 0,
    "median_itl_ms": None,
    "interrupted": False,
    "ttfts": [0.1, 0.2],
    "environment": {"num_cpus": 2},
}


def save(path: Path, *results: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(result) for result in results))
    return str(path)


@pytest.mark.parametrize(
    ("text", "before", "after", "met"),
    [
        ("output_throughput<-5%", 100, 95, False),
        ("output_throughput<-5%", 100, 94.9, True),
        ("output_throughput <= -5 %", 100, 95, True),
        ("output_throughput<-5%", 100, 200, False),
        ("p99_ttft_ms>+20", 50, 71, True),
        ("p99_ttft_ms>20", 50, 70, False),
        ("failed>0", 0, 1, True),
        ("failed>10%", 0, 1, True),
        ("failed>10%", 0, 0, False),
        ("failed>=0", 3, 3, True),
        ("loss<-5%", -10, -11, True),
        ("x>1e-3", 0, 0.01, True),
    ],
)
def test_conditions_speak_of_the_change(text: str, before: float, after: float, met: bool) -> None:
    assert parse_condition(text).is_met(before, after) is met


@pytest.mark.parametrize("text", ["", "output_throughput", "a<", "a<b", "a=5%", "a<5%%", "<5", "a<nan", "a << 5", "a<1<2", "a<5 ms"])
def test_other_conditions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail-if takes NAME<CHANGE"):
        parse_condition(text)


def test_figures_are_the_numbers_that_were_measured() -> None:
    assert figures(BASE) == {"output_throughput": 100.0, "p99_ttft_ms": 50.0, "failed": 0.0}
    assert figures({"percentiles": {"50": 1, "99": 2.5}, "runs": [1]}) == {"percentiles.50": 1.0, "percentiles.99": 2.5}


def test_a_condition_on_no_figure_of_both_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_troughput is not a number in both results; there are: output_throughput"):
        compare_figures({"output_throughput": 1.0}, {"output_throughput": 1.0}, [parse_condition("output_troughput<-5%")])


def test_status_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = save(tmp_path / "a.json", BASE)
    after = save(tmp_path / "b.json", BASE | {"output_throughput": 90.0, "p99_ttft_ms": 60.0, "new": 1})
    diff(DiffSettings(before, after))
    out = capsys.readouterr().out
    assert "-10.0%" in out
    assert "new" not in out
    diff(DiffSettings(before, after, fail_if=["output_throughput<-20%"]))
    with pytest.raises(SystemExit) as caught:
        diff(DiffSettings(before, after, fail_if=["output_throughput<-5%", "p99_ttft_ms>5"]))
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert "failed: output_throughput<-5%: 100 -> 90 (-10.0%)" in printed.err
    assert "failed: p99_ttft_ms>5: 50 -> 60 (+20.0%)" in printed.err


def test_json(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    before, after = save(tmp_path / "a.json", BASE), save(tmp_path / "b.json", BASE | {"output_throughput": 110.0})
    diff(DiffSettings(before, after, json=True))
    result = json.loads(capsysbinary.readouterr().out)
    assert result["failed"] == []
    assert {"key": "output_throughput", "before": 100.0, "after": 110.0, "change": 10.0, "share": 0.1, "failed": []} in result["rows"]


def test_several_runs_count_by_the_median(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    before = save(tmp_path / "a.json", *(BASE | {"output_throughput": value} for value in (90.0, 100.0, 5000.0)))
    diff(DiffSettings(before, save(tmp_path / "b.json", BASE), json=True))
    assert all(row["change"] == 0 for row in json.loads(capsysbinary.readouterr().out)["rows"])


def test_results_of_other_work_are_not_compared_unasked(tmp_path: Path) -> None:
    before, after = save(tmp_path / "a.json", BASE), save(tmp_path / "b.json", BASE | {"request_rate": 4.0})
    with pytest.raises(ConfigError, match=r"different work \(request_rate: 2.0 -> 4.0\): --other-work"):
        diff(DiffSettings(before, after))
    diff(DiffSettings(before, after, other_work=True))


def test_the_command_ends_with_a_status(tmp_path: Path) -> None:
    before, after = save(tmp_path / "a.json", BASE), save(tmp_path / "b.json", BASE | {"output_throughput": 90.0})
    command = [sys.executable, "-m", "aioengine", "bench", "diff", before, after, "--fail-if", "output_throughput<-5%"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert subprocess.run([*command[:-1], "output_throughput<-15%"], capture_output=True, check=False).returncode == 0
    broken = subprocess.run([*command[:-1], "nothing"], capture_output=True, text=True, check=False)
    assert broken.returncode == 2
    assert "Traceback" not in broken.stderr
