"""The kernels without Python, here and as an ARM machine under emulation (Debian: qemu-user, g++-aarch64-linux-gnu)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aioengine_kernels.cpu import status, supported_isas

CHECK = Path(__file__).parent / "native" / "check.cpp"
LIBRARY = Path(__file__).parents[3] / "kernels" / "aioengine_kernels" / "cpu"
FLAGS = ("-O2", "-std=c++17", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-pthread")  # as in setup.py
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # it compiles all of them
    pytest.mark.skipif(status() is not None, reason=str(status())),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def run(command: Sequence[str | Path]) -> list[str]:
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def run_here(folder: Path) -> list[str]:
    program = folder / "here"
    run(["g++", *FLAGS, f"-I{LIBRARY / 'src'}", CHECK, LIBRARY / "_native.so", f"-Wl,-rpath,{LIBRARY}", "-o", program])
    return run([program])


def test_the_c_interface_gives_what_plain_loops_give(tmp_path: Path) -> None:
    lines = run_here(tmp_path)
    assert not [line for line in lines if line.startswith("WRONG")]
    assert sum(line.startswith("right") for line in lines) == 106 * len(supported_isas())


def test_an_arm_machine_under_emulation_agrees(tmp_path: Path) -> None:
    """Weights to the bit with this machine's; products, attention and the pool with up to 16 threads within the same limits."""
    if shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {CROSS_COMPILER} and {EMULATOR}")
    sources = [path for path in sorted((LIBRARY / "src").glob("*.cpp")) if "avx" not in path.name]
    run([CROSS_COMPILER, *FLAGS, f"-I{LIBRARY / 'src'}", CHECK, *sources, "-static", "-o", tmp_path / "arm"])
    lines = run([EMULATOR, tmp_path / "arm"])
    assert lines.count("isa 0") == 1
    assert sum(line.startswith("right") for line in lines) == 106
    here = run_here(tmp_path)
    assert [line for line in lines if line.startswith("weights")] == [line for line in here if line.startswith("weights")]
