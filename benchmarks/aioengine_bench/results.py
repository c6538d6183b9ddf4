"""Result files: JSON that any reader accepts, under names that say what was run, complete at every moment."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from aioengine.errors import ConfigError

_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Where the result goes. append: one more line of an existing file. output_json: "-" is stdout."""

    save: bool = False
    detailed: bool = False
    append: bool = False
    folder: str | None = None
    filename: str | None = None
    output_json: str | None = None
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def writes(self) -> bool:
        return self.save or self.append or self.output_json is not None

    @property
    def claims_stdout(self) -> bool:
        return self.output_json == "-"


def parse_metadata(items: Iterable[str]) -> dict[str, str]:
    """["gpu=none", ...] -> a dict. Raises ConfigError."""
    metadata: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"metadata must look like KEY=VALUE, got {item!r}")
        metadata[key.strip()] = value.strip()
    return metadata


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: what is infinite or not a number becomes None, wherever it hides."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value


def encode_result(result: Mapping[str, Any]) -> bytes:
    """One line of JSON, without its newline."""
    return orjson.dumps(plain(result))


def with_metadata(result: dict[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The result with the user's own keys. Raises ConfigError rather than overwrite a figure."""
    taken = sorted(result.keys() & metadata.keys())
    if taken:
        raise ConfigError(f"metadata must not use the result's own keys: {', '.join(taken)}")
    return {**result, **metadata}


def environment() -> dict[str, Any]:
    """What a figure means nothing without."""
    return {
        "aioengine": _version("aioengine"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **{name: _version(name) for name in _LIBRARIES},
        "command": " ".join(["aioengine", *sys.argv[1:]]),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The model as the kernel tells it, else the architecture."""
    try:
        match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def timestamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def file_name(parts: Sequence[str], date: str) -> str:
    """ "aioengine-2.0qps-smollm2-20261130-101500.json": no part can lead out of the folder."""
    return "-".join([*(part for part in parts if part), date]).replace("/", "_").replace("\\", "_") + ".json"


def save_result(result: Mapping[str, Any], options: SaveOptions, *, default_name: str) -> Path | None:
    """Write the result where `options` say; returns the file, if there is one. Raises ConfigError.

    A file is replaced as a whole or gets a whole line, so that there is never half a result in it.
    """
    line = encode_result(result) + b"\n"
    if options.output_json == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    elif options.output_json is not None:
        _write(Path(options.output_json), line)
    if not (options.save or options.append):
        return None
    path = Path(options.folder or ".") / (options.filename or default_name)
    if options.append:
        _append(path, line)
    else:
        _write(path, line)
    return path


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def _append(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell() and not _ends_with_newline(path):
                line = b"\n" + line
            file.write(line)
    except OSError as exc:
        raise ConfigError(f"cannot append to {path}: {exc.strerror}") from exc


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """All results of a file: one JSON object, or one a line. Raises ConfigError."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        values = [orjson.loads(content)]
    except orjson.JSONDecodeError:
        try:
            values = [orjson.loads(line) for line in content.splitlines() if line.strip()]
        except orjson.JSONDecodeError as exc:
            raise ConfigError(f"{path} is neither JSON nor JSON lines: {exc}") from exc
    if not values or not all(isinstance(value, dict) for value in values):
        raise ConfigError(f"{path} holds no results")
    return values
