"""Makes the environments of the other engines: says what it does while it does it, and leaves a stamp when all is done."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
import venv
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench.peers import STAMP, Build, Peer

Say = Callable[[str], None]
_SAY_EVERY_S = 5.0
_LAST_LINES = 15  # of a command that failed


def check_checkout(peers: Iterable[Peer], checkout: str | None) -> None:
    """Raise ConfigError if a checkout is missing, is none, or is for nobody: before anything is made."""
    needs = [peer.name for peer in peers if peer.build is not None and peer.build.package is None]
    if checkout is None and needs:
        raise ConfigError(f"{needs[0]} is built from a checkout that you have: name it with --checkout DIR")
    if checkout is not None and not needs:
        raise ConfigError("--checkout has no effect: none of the engines named is built from a checkout")
    if checkout is not None and not (Path(checkout) / "CMakeLists.txt").is_file():
        raise ConfigError(f"{checkout} is no checkout to build {needs[0]} from: it has no CMakeLists.txt")


def set_up(peer: Peer, peers_dir: Path, *, say: Say, checkout: str | None = None) -> None:
    """Make the environment of a peer, unless it is there; a half-made or outdated one is made anew. Raises AioEngineError."""
    if peer.own:
        say(f"{peer.name}: runs in this environment, there is nothing to set up")
        return
    folder, state = peer.folder(peers_dir), peer.state(peers_dir)
    if state == "yes":
        say(f"{peer.name}: is set up in {folder} (to make it anew, remove that folder)")
        return
    if state != "no":
        what = "an earlier set-up did not finish" if state == "interrupted" else "it was set up from another list of packages"
        say(f"{peer.name}: {what}: starting over")
    start = time.monotonic()
    say(f"{peer.name}: creating {folder}")
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(peer.python(peers_dir)), "-m", "pip"]
    for packages in peer.install:
        say(f"{peer.name}: installing {' '.join(packages)}")
        _run([*pip, "install", *packages], name=peer.name, say=say)
    for package in peer.without_requirements:
        _install_without(peer, package, pip, folder, say)
    if peer.removed:
        _run([*pip, "uninstall", "--yes", *peer.removed], name=peer.name, say=say)
    if peer.build is not None:
        _build(peer, peer.build, folder, pip, say, checkout)
    # Last, and as a whole: whoever stops before leaves a folder without it.
    partial = folder / f"{STAMP}.partial"
    partial.write_text(json.dumps({"made_from": peer.made_from}))
    partial.replace(folder / STAMP)
    say(f"{peer.name}: is set up, after {time.monotonic() - start:.0f} s")


def _install_without(peer: Peer, package: str, pip: Sequence[str], folder: Path, say: Say) -> None:
    say(f"{peer.name}: installing {package} without {', '.join(peer.excluded)}")
    wheels = folder / "wheels"
    _run([*pip, "download", "--no-deps", "--dest", str(wheels), package], name=peer.name, say=say)
    (wheel,) = wheels.glob("*.whl")
    _run([*pip, "install", *requirements(wheel, excluded=peer.excluded)], name=peer.name, say=say)
    _run([*pip, "install", "--no-deps", str(wheel)], name=peer.name, say=say)
    wheel.unlink()


def _build(peer: Peer, build: Build, folder: Path, pip: Sequence[str], say: Say, checkout: str | None) -> None:
    """One target and what it needs, with a line every few seconds. What it was built from goes when it is done."""
    if shutil.which("cmake") is None:
        raise AioEngineError(f"{peer.name} is built from source: install cmake and a C++ compiler, and run this again")
    source, target = folder / "source", folder / "build"
    if build.package is not None:
        download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(source), build.package]
        say(f"{peer.name}: fetching the source of {build.package}")
        _run([*pip, *download], name=peer.name, say=say)
        (archive,) = source.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(source, filter="data")
        (root,) = [path for path in source.iterdir() if path.is_dir()]
    else:
        assert checkout is not None  # `check_checkout` has seen it
        root = Path(checkout)
    jobs = os.environ.get("LLAMA_CPP_BUILD_JOBS", str(os.cpu_count() or 1))  # else make starts all compilers at once
    say(f"{peer.name}: building {build.target} alone, {jobs} compilers at a time (minutes)")
    arguments = cmake_arguments(build, os.environ)
    _run(["cmake", "-S", str(root / build.folder), "-B", str(target), *arguments], name=peer.name, say=say)
    _run(["cmake", "--build", str(target), "--config", "Release", "--target", build.target, "-j", jobs], name=peer.name, say=say)
    shutil.copy2(target / "bin" / build.target, folder / "bin" / build.target)
    shutil.rmtree(target)
    shutil.rmtree(source, ignore_errors=True)


def cmake_arguments(build: Build, environ: Mapping[str, str]) -> list[str]:
    """CMAKE_ARGS of the caller come last, where they win: so `CMAKE_ARGS=-DGGML_NATIVE=OFF` makes a llama.cpp that keeps to AVX2."""
    return ["-DCMAKE_BUILD_TYPE=Release", *build.cmake_args, *shlex.split(environ.get("CMAKE_ARGS", ""))]


def requirements(wheel: Path, *, excluded: Sequence[str]) -> list[str]:
    """What a wheel requires, without its extras and without `excluded`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    lines = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    names = {name.lower() for name in excluded}
    return [line for line in lines if "extra ==" not in line and _package_name(line) not in names]


def _package_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match.group().lower()


def _run(command: Sequence[str], *, name: str, say: Say) -> None:
    """Run it; its newest line is said every few seconds, and that it is still at work where it says nothing.

    Raises AioEngineError with the end of what it wrote.
    """
    start = said = time.monotonic()
    lines: queue.Queue[str | None] = queue.Queue()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
        reader.start()
        ended = False
        while not ended:
            with contextlib.suppress(queue.Empty):  # it is time to say something all the same
                line = lines.get(timeout=max(0.01, said + _SAY_EVERY_S - time.monotonic()))
                ended = line is None
                if line:
                    last.append(line)
            now = time.monotonic()
            if not ended and now - said >= _SAY_EVERY_S:
                said = now
                say(f"{name}: {now - start:4.0f} s: {last[-1][:100] if last else 'at work'}")
        reader.join()
    if process.returncode:
        raise AioEngineError(f"{name}: {' '.join(command[:5])} ... failed with status {process.returncode}:\n" + "\n".join(last))


def _pass_on(stream: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.strip())
    lines.put(None)
