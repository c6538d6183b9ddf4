"""The GPU check itself, where there is no GPU: it says so, and a rehearsal in Triton's interpreter runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from aioengine_bench.gpu_engine import Run, compare_tokens

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From another folder and without what pytest put on the path: a plain checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = run_script(tmp_path)
    assert result.returncode == 2
    assert "finds no CUDA device; nothing was checked" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--rehearse")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "every check passed" in result.stdout.splitlines()[-2]
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["passed"]
    assert "rehearsal" in report["environment"]["device"]
    assert {"batch_inputs", "write_rows", "gumbel_argmax"} <= {check["name"] for check in report["kernels"]}
    assert report["tokens"]
    assert all(check["num_equal"] == check["num_tokens"] for check in report["tokens"])
    assert len(report["serving"]) == 9
    compiled = next(check for check in report["serving"] if check["name"] == "nothing is compiled while serving")
    assert compiled["message"].endswith("new: none")
    assert set(report["models"]["tiny"]["decode"]["2"]["host_ms"]) == {"schedule", "update", "execute", "sample"}
    assert set(report["models"]["tiny"]["decode"]["2"]) == {"step_ms", "host_ms", "no_overlap_step_ms", "eager_step_ms"}


def test_tokens_may_differ_at_near_ties_only() -> None:
    def gap(history: list[int], token: int) -> float:
        assert history == [9, 1, 2]
        return {5: 1e-4, 6: 1.0}[token]

    def compare(tokens: list[int]) -> tuple[bool, int]:
        check = compare_tokens("x", Run([[1, 2, 3, 4]]), Run([tokens]), prompts=[[9]], gap=gap, limit=1e-3)
        return check.passed, check.num_equal

    assert compare([1, 2, 3, 4]) == (True, 4)
    assert compare([1, 2, 5, 0]) == (True, 2)  # a tie; after it the histories differ, and so may the tokens
    assert compare([1, 2, 6, 4]) == (False, 2)
