"""Every code block of README.md and docs/ does what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from aioengine.cli import build_parser
from tests.docs.conftest import free_port, wait_until_healthy
from tests.docs.pages import NOT_CODE, ROOT, Block, aioengine_commands, blocks, commands

LANGUAGES = ("python", "sh", "json", "yaml", *NOT_CODE)
STATIC = ("pip", "make", "git", ".", "PIP_EXTRA_INDEX_URL=<that")  # they fetch or build: what they name is checked instead
LASTING = ("serve", "top --demo")  # commands that run until they are ended
ENDED_BY_SIGTERM = (0, 128 + signal.SIGTERM)
COMMAND_S = 60.0


def test_every_block_is_in_a_language_that_is_tested() -> None:
    assert [block.name for block in blocks() if block.language not in LANGUAGES] == []
    assert len(blocks("python")) > 8
    assert len(blocks("sh")) > 12


# ---------------------------------------------------------------------------------------------------- Python and data
@pytest.mark.model
@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python(block: Block, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    text = block.text
    if block.needs == "server":
        text = text.replace(":8000", f":{request.getfixturevalue('server_port')}")
    else:
        assert block.needs == ""
    monkeypatch.chdir(ROOT)
    exec(compile("\n" * block.line + text, str(block.page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", blocks("json", "yaml"), ids=lambda block: block.name)
def test_data(block: Block) -> None:
    assert json.loads(block.text) if block.language == "json" else yaml.safe_load(block.text)


# ---------------------------------------------------------------------------------------------------- shell
@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.name)
def test_every_option_and_target_exists(block: Block) -> None:
    """Quickly, without running anything."""
    for arguments in aioengine_commands(block):
        build_parser().parse_args(arguments)  # exits with a message otherwise
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for words in commands(block):
        if "make" in words:
            target = words[words.index("make") + 1]
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no target {target}"
        for word in words if words[0] == "pip" else ():
            named = re.search(r"\[(.*)]", word)
            assert set(named[1].split(",") if named else ()) <= extras.keys()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with docs/ in it, whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="docs-") as path:
        (Path(path) / "docs").symlink_to(ROOT / "docs")
        yield Path(path)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.model
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.name)
def test_shell(block: Block, folder: Path) -> None:
    """Line by line. What lasts (a server, a dashboard) is started, must be up, and is ended with the block."""
    ports: dict[str, int] = {}
    lasting: list[subprocess.Popen[bytes]] = []
    try:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = next(iter(commands(Block(block.page, 0, "sh", line, ""))), None)
            if words is None or words[0] in STATIC:
                continue
            arguments = " ".join(words[1:])
            if words[0] == "aioengine" and arguments.startswith(LASTING):
                lasting.append(_start(words, folder, ports))
            else:
                done = _run(_with_ports(line, ports).replace("/tmp/", f"{folder}/"), folder)
                assert done.returncode == 0, f"{line!r} ended with {done.returncode}: {done.stderr.decode()[-1500:]}"
    finally:
        for process in lasting:
            process.terminate()
        statuses = [process.wait(timeout=60) for process in lasting]
    assert all(status in ENDED_BY_SIGTERM for status in statuses), statuses


def _start(words: list[str], folder: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *words]
    if words[1] == "serve":
        given = words[words.index("--port") + 1] if "--port" in words else "8000"
        ports[given] = free_port()
        command = [*command, "--port", str(ports[given])]  # the last one counts
    shown = folder / "shown.txt"
    with shown.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, stdout=file)
    if words[1] == "serve":
        wait_until_healthy(ports[given], process)
    else:
        deadline = time.monotonic() + COMMAND_S
        while not shown.stat().st_size:
            assert process.poll() is None, f"{words} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{words} shows nothing"
            time.sleep(0.1)
    return process


def _with_ports(line: str, ports: dict[str, int]) -> str:
    for given, port in ports.items():
        line = line.replace(f":{given}", f":{port}")
    return line


def _run(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    # `aioengine` is the one of this tree, wherever another one may be installed.
    script = f'aioengine() {{ "{sys.executable}" -m aioengine "$@"; }}\nset -e -o pipefail\n{line}\n'
    command = ("bash", "-c", script)
    return subprocess.run(
        command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False
    )


def _environment() -> dict[str, str]:
    paths = [str(ROOT / part) for part in (".", "kernels", "tui", "benchmarks")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
