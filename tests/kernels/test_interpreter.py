"""Every kernel in Triton's interpreter: `interpreted/` in a process of its own, as it must be chosen before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def run_interpreted(selection: str) -> None:
    """Run tests/kernels/interpreted with the given -m expression; fail with its report if it does not pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent / "interpreted"), "-q", "--tb=short", "-m", selection]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(f"the interpreted tests failed\n{result.stdout[-20_000:]}\n{result.stderr[-4_000:]}", pytrace=False)


@pytest.mark.timeout(600)
def test_kernels_in_the_interpreter() -> None:
    run_interpreted("not slow")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_large_matrices_in_the_interpreter() -> None:
    run_interpreted("slow")
