"""Result files: JSON that any reader accepts, under names that say what was run, complete at every moment."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from aioengine.errors import ConfigError
from aioengine_bench.files import append_line, check_writable, unused, write_file
from aioengine_bench.specs import SaveOptions

_MAX_NAME_BYTES = 200  # of the 255 that a file system takes: the suffix, and the number of a second one, come on top
_HIDDEN = "***"
_SECRET_WORDS = ("token", "key", "apikey", "secret", "password", "passwd", "credential", "credentials")
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def check_saving(options: SaveOptions, keys: Iterable[str], *, default_name: str) -> None:
    """Raise ConfigError now for what would fail when the result, which has these keys, is saved."""
    check_metadata(keys, options.metadata)
    if not options.saves and options.output_json is None:
        for flag, given in (
            ("--save-detailed", options.detailed),
            ("--metadata", bool(options.metadata)),
            ("--label", options.label is not None),
        ):
            if given:
                raise ConfigError(f"{flag} changes nothing but the result, and none is written: add --save-result or --output-json FILE")
    if options.output_json is not None and not options.claims_stdout:
        check_writable(Path(options.output_json))
    if options.saves:
        check_writable(options.path(default_name))


def plain(value: Any) -> Any:
    """`value` as JSON can hold it, so that no result fails to be written.

    What is infinite or not a number becomes None, wherever it hides; an integer of more than 64 bits becomes text, and so
    does whatever JSON has no form for; half of a surrogate pair (a file name that is not UTF-8) is escaped.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if value is None else plain(str(value))


def encode_result(result: Mapping[str, Any]) -> bytes:
    """One line of JSON, without its newline."""
    return orjson.dumps(plain(result))


def check_metadata(keys: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Raise ConfigError if the user's own keys are among `keys`, those of the result: no figure is overwritten."""
    taken = sorted(set(keys) & metadata.keys())
    if taken:
        raise ConfigError(f"metadata must not use the result's own keys: {', '.join(taken)}")


def with_metadata(result: dict[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The result with the user's own keys, which `check_saving` has seen; a figure is not overwritten even so."""
    return {**metadata, **result}


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
        "command": " ".join(["aioengine", *without_secrets(sys.argv[1:])]),
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line that may be shown: the value of an option that carries a secret is left out.

    So is the value of any other argument that is one of the environment's secrets.
    """
    hidden = {value for name, value in os.environ.items() if value and _is_secret(name)}
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        option, separator, _ = argument.partition("=")
        is_option = argument.startswith("--")
        if hide_next and not is_option:
            shown.append(_HIDDEN)
        elif is_option and separator and _is_secret(option):
            shown.append(f"{option}={_HIDDEN}")
        else:
            shown.append(_HIDDEN if argument in hidden else argument)
        hide_next = is_option and not separator and _is_secret(option)
    return shown


def _is_secret(name: str) -> bool:
    words = re.split(r"[^a-z]+", name.lower())
    return any(word in _SECRET_WORDS for word in words)


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
    name = "-".join([*(part for part in parts if part), date])
    return re.sub(r"[^\w.,=+@ ()-]", "_", name).encode()[-_MAX_NAME_BYTES:].decode(errors="ignore") + ".json"


def save_result(result: Mapping[str, Any], options: SaveOptions, *, default_name: str) -> Path | None:
    """Write the result where `options` say; returns the file, if there is one. Raises ConfigError.

    A file is replaced as a whole or gets a whole line, so that there is never half a result in it. A name that nobody chose
    is never that of an earlier result.
    """
    line = encode_result(result) + b"\n"
    failures: list[str] = []
    path = _save(line, options, default_name, failures) if options.saves else None
    if options.output_json == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    elif options.output_json is not None:
        try:
            write_file(Path(options.output_json), line)
        except ConfigError as exc:
            failures.append(str(exc))
    if failures:
        raise ConfigError("; ".join(failures))
    return path


def _save(line: bytes, options: SaveOptions, default_name: str, failures: list[str]) -> Path:
    path = options.path(default_name)
    try:
        if options.append:
            append_line(path, line)
        else:
            path = path if options.filename is not None else unused(path)
            write_file(path, line)
    except ConfigError as exc:
        failures.append(str(exc))
    return path


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
