"""End to end: an engine in one process, `aioengine top` in a real terminal (tmux) in another, and as plain text."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP = [sys.executable, "-m", "aioengine", "top"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """An engine process with traffic; (the address of its socket, the process)."""
    address = str(tmp_path / "e.sock")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tui.traffic", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield address, process
        process.stdin.close()
        process.wait(timeout=20)


class Terminal:
    """A tmux session of its own server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_starts = 0

    @property
    def _socket(self) -> str:
        """A path for every start: a server that is on its way out would refuse the next session."""
        return str(self._folder / f"tmux{self._num_starts}.sock")

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, "-f", "/dev/null", *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def start(self, command: list[str], *, columns: int = 80, lines: int = 24, env: dict[str, str] | None = None) -> None:
        self._num_starts += 1
        settings = [f"{name}={value}" for name, value in (env or {}).items()]
        shell = shlex.join(["env", "-u", "NO_COLOR", *settings, *command]) + "; echo left with $?; exec cat"
        self.tmux("new-session", "-d", "-x", str(columns), "-y", str(lines), "-c", str(ROOT), shell)

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def text(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait_for(self, condition: Callable[[str], bool], *, seconds: float = 30) -> str:
        deadline = time.monotonic() + seconds
        while not condition(text := self.text()):
            assert time.monotonic() < deadline, f"the terminal shows\n{text}"
            time.sleep(0.1)
        return text


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    terminal = Terminal(tmp_path)
    yield terminal
    for socket in tmp_path.glob("tmux*.sock"):
        subprocess.run(["tmux", "-S", str(socket), "kill-server"], capture_output=True, check=False)


def test_an_engine_is_watched_paused_left_and_watched_again(engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal) -> None:
    address, process = engine
    terminal.start([*TOP, address])
    terminal.wait_for(lambda text: "* live" in text and "running 3" in text)
    terminal.keys("2")
    text = terminal.wait_for(lambda text: "admission stopped by" in text and "decode 3 in 3" in text)
    assert "▒" in text
    terminal.keys("3")
    terminal.wait_for(lambda text: text.count("R running") == 3)
    terminal.keys("4")
    terminal.wait_for(lambda text: "eviction order" in text)
    terminal.keys("P")
    terminal.wait_for(lambda text: "P again pauses" in text)
    terminal.keys("P")
    terminal.wait_for(lambda text: "ENGINE PAUSED" in text)
    terminal.keys("P")
    terminal.wait_for(lambda text: "ENGINE PAUSED" not in text)
    terminal.keys("q")
    terminal.wait_for(lambda text: "left with 0" in text)
    assert process.poll() is None  # the engine does not care
    terminal.tmux("kill-server")
    terminal.start([*TOP, address])
    terminal.wait_for(lambda text: "running 3" in text)


def test_an_engine_that_dies_is_said_to_be_lost(engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal) -> None:
    address, process = engine
    terminal.start([*TOP, address])
    terminal.wait_for(lambda text: "* live" in text)
    process.kill()
    terminal.wait_for(lambda text: "lost" in text and "STALE" in text)


def test_no_color_is_readable(engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal) -> None:
    address, _ = engine
    terminal.start([*TOP, address, "--theme", "ansi"], columns=60, lines=16, env={"NO_COLOR": "1"})
    terminal.wait_for(lambda text: "running 3" in text)
    colored = terminal.tmux("capture-pane", "-p", "-e")
    # Attributes only: bold, dim, underline, reverse, and resets; no colour, 30 to 49 and 90 to 107.
    codes = {code for part in colored.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
    assert codes <= {"", "0", "1", "2", "3", "4", "7", "22", "23", "24", "27", "39", "49"}, codes


def test_it_draws_on_the_terminal_when_messages_go_to_a_file(
    engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal, tmp_path: Path
) -> None:
    address, _ = engine
    messages = tmp_path / "err.log"
    terminal.start(["sh", "-c", f"exec {shlex.join([*TOP, address])} 2>{shlex.quote(str(messages))}"])
    terminal.wait_for(lambda text: "running 3" in text)
    assert messages.read_text() == ""
    terminal.keys("q")
    terminal.wait_for(lambda text: "left with 0" in text)


def test_a_terminal_without_a_cursor_gets_lines_and_a_plain_locale_gets_ascii(
    engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal
) -> None:
    address, _ = engine
    terminal.start([*TOP, address], env={"TERM": "dumb"})
    text = terminal.wait_for(lambda text: "running 3" in text or "more" in text)
    assert "* live" not in text  # no screen is drawn: one state comes below the other
    assert text.isascii()
    terminal.tmux("kill-server")
    terminal.start([*TOP, address], env={"LC_ALL": "C"})
    assert terminal.wait_for(lambda text: "* live" in text and "running 3" in text).isascii()


# ---------------------------------------------------------------------------------------------------- SIGTERM
def processes(text: str) -> list[int]:
    """The Python processes that have `text` on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(arguments[0]).name.startswith("python") and any(text in argument for argument in arguments[1:]):
                found.append(int(folder.name))
    return found


def test_sigterm_gives_the_terminal_back(engine: tuple[str, subprocess.Popen[bytes]], terminal: Terminal) -> None:
    address, process = engine
    terminal.start([*TOP, address])
    terminal.wait_for(lambda text: "* live" in text)
    (viewer,) = set(processes(address)) - {process.pid}
    os.kill(viewer, signal.SIGTERM)
    terminal.wait_for(lambda text: "left with 143" in text and "live" not in text)
    assert terminal.tmux("display-message", "-p", "#{alternate_on}#{mouse_any_flag}#{cursor_flag}").strip() == "001"
    assert process.poll() is None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Below `tmp_path` a socket's path would be longer than the system takes, and the demo would go to /tmp."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("on_screen", [True, False])
def test_sigterm_ends_the_engine_of_the_demo(terminal: Terminal, short_folder: Path, on_screen: bool) -> None:
    """The child is one of the tests' own, which starts at once."""
    program = (
        "import subprocess, sys\n"
        "from aioengine.cli import main\n"
        "from aioengine.commands import top\n"
        "popen = subprocess.Popen\n"
        "top.subprocess.Popen = lambda command, **options: popen(\n"
        "    [sys.executable, '-m', 'tests.tui.traffic', command[3]], **options)\n"
        "sys.exit(main(['top', '--demo', *sys.argv[1:]]))\n"
    )
    folder = short_folder
    command = [sys.executable, "-c", program, *([] if on_screen else ["--json"])]
    env = {**os.environ, "TMPDIR": str(folder)}
    if on_screen:
        terminal.start(command, env={"TMPDIR": str(folder)})
        terminal.wait_for(lambda text: "* live" in text)
        (child,) = processes(str(folder))
        os.kill(int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGTERM)
        terminal.wait_for(lambda text: "left with 143" in text)
    else:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as viewer_process:
            assert viewer_process.stdout is not None
            assert json.loads(viewer_process.stdout.readline())
            viewer_process.terminate()
            assert viewer_process.wait(timeout=20) == 143
    assert list(folder.iterdir()) == []
    assert processes(str(folder)) == []


def test_the_terminal_is_left_as_it_was_when_there_is_no_engine(terminal: Terminal, tmp_path: Path) -> None:
    terminal.start([*TOP, str(tmp_path / "nothing.sock")])
    terminal.wait_for(lambda text: "left with 1" in text and "no engine publishes at" in text.replace("\n", " "))


# ---------------------------------------------------------------------------------------------------- without a terminal
def run_top(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TEXTUAL")}
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=env, check=False)


def test_once_prints_one_state(engine: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, _ = engine
    done = run_top(address, "--once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    state = json.loads(done.stdout)
    assert state["gauges"]["num_running"] == 3
    assert state["gauges"]["steps_per_s"] > 1
    plain = run_top(address, "--once")
    assert plain.returncode == 0
    assert "running 3" in plain.stdout
    assert "\x1b" not in plain.stdout


def test_lines_go_to_a_pipe_until_the_engine_ends(engine: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, _ = engine
    with subprocess.Popen([*TOP, address, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT) as viewer:
        assert viewer.stdout is not None
        first, second = json.loads(viewer.stdout.readline()), json.loads(viewer.stdout.readline())
        assert second["last_step_id"] > first["last_step_id"]
        viewer.terminate()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x.sock", "--demo"], "argument --demo: not allowed with another source"),
        (["x.sock", "--refresh", "50"], "from 0.5 to 10"),
        (["x.sock", "--web", "--once"], "not allowed with --once"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str) -> None:
    done = run_top(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    done = run_top(str(path), "--once")
    assert done.returncode == 1
    assert "notes.txt" in done.stderr
    assert "Traceback" not in done.stderr
