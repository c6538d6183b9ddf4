"""What `pip install` gets: one wheel for every Python, with the native library or without it, and an sdist that builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from aioengine_kernels import cpu

ROOT = Path(__file__).resolve().parents[2]
FAKE_REQUEST = """\
import asyncio, sys
from pathlib import Path
import aioengine
assert Path(aioengine.__file__).is_relative_to(sys.prefix), aioengine.__file__
from aioengine import AsyncEngine, SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted

async def main():
    async with AsyncEngine(executor=FakeExecutor(next_token=scripted("It works.")), tokenizer=FakeTokenizer()) as engine:
        (output,) = await engine.generate_batch(["Hi"], SamplingParams(max_tokens=20), progress=False)
        print(output.text)

asyncio.run(main())
"""
NATIVE_STATUS = "from aioengine_kernels.cpu import status; print(status())"

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked. It is made from a copy of the files under version control: nothing that was built before gets in."""
    tree = tmp_path_factory.mktemp("tree")
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    made = run(sys.executable, "-c", "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))", cwd=tree).split("\n")[-1]
    with tarfile.open(tree / "dist" / made) as archive:
        archive.extractall(tree / "unpacked", filter="data")
    return tree / "unpacked" / made.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    if cpu.status() is not None:
        pytest.skip(f"no compiler to build the library with: {cpu.status()}")
    return build_wheel(sdist)


def build_wheel(sdist: Path, **environment: str) -> Path:
    shutil.rmtree(sdist / "build", ignore_errors=True)
    run(*_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "."), cwd=sdist, **environment)
    (path,) = (sdist / "wheels").glob("*.whl")
    return path.rename(sdist.parent / path.name)


def test_one_wheel_serves_every_python(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.stem.split("-")[-1] == sysconfig.get_platform().replace("-", "_").replace(".", "_")
    contents = zipfile.ZipFile(wheel).namelist()
    assert {"aioengine_kernels/cpu/_native.so", "aioengine_tui/app.tcss", "aioengine_bench/workloads.json"} < set(contents)
    assert [name for name in contents if name.endswith((".cpp", ".h"))] == []
    others = [path for minor in range(11, 16) if (path := which_python(minor)) is not None]
    for python in [sys.executable, *others]:
        name = Path(python).name
        venv = make_venv(tmp_path / f"{name}-{python == sys.executable}", python, wheel)
        assert run(venv / "bin/python", "-c", NATIVE_STATUS) == "None", f"the library does not open under {name}"
        assert run(venv / "bin/aioengine", "--version").startswith("aioengine ")


def test_the_installed_wheel_answers_a_request(wheel: Path, tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", sys.executable, wheel)
    # The packages that it depends on are those of this environment: the test needs no network.
    (venv_packages(venv) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert run(venv / "bin/python", "-c", FAKE_REQUEST).split("\n")[-1] == "It works."


def test_without_a_compiler_the_wheel_says_any_platform_and_the_engine_says_why(sdist: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sdist, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert wheel.name.endswith("-py3-none-any.whl")
    venv = make_venv(tmp_path / "venv", sys.executable, wheel)
    assert "no C++ compiler when aioengine was installed" in run(venv / "bin/python", "-c", NATIVE_STATUS)


def make_venv(folder: Path, python: str, wheel: Path) -> Path:
    run(python, "-m", "venv", "--without-pip", folder)
    # pip of this environment installs: a wheel that another Python could not take would be refused here.
    run(*_pip("--python", str(folder / "bin/python"), "install", "--no-index", "--no-deps", str(wheel)))
    return folder


def venv_packages(venv: Path) -> Path:
    (path,) = (venv / "lib").glob("python3*/site-packages")
    return path


def which_python(minor: int) -> str | None:
    """A Python of this minor version that works, if there is one (a shim of pyenv may stand for one that is not chosen)."""
    for found in (shutil.which(f"python3.{minor}"), *(Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/python3.{minor}")):
        if found is not None and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What the command writes to stdout, without the last newline. It sees nothing of the tree that the tests run from."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd or "/", env={**inherited, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout.rstrip("\n")


def _pip(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)
