"""What a run was made from: everything that can change its numbers, in a form that can be stored and compared.

A sweep that is resumed takes an earlier result only if all of this is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import aioengine
import aioengine_bench
import aioengine_kernels
from aioengine_bench.results import environment, plain

# Environment variables that change what a step costs or computes.
_VARIABLES = ("AIOENGINE_CPU_ISA", "AIOENGINE_CHECK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED")
# What differs between two runs of the same thing, or says in other words what is compared already.
_PASSING_FACTS = ("load_average", "command")


def run_identity(settings: Any, *, seed: int) -> dict[str, Any]:
    """The identity of one run with these settings (a dataclass): names and values, as JSON holds them.

    Where results go is left out, and so is what a viewer must know. Files are told apart by their contents or, where those
    are large, by size and time.
    """
    facts = {name: value for name, value in environment().items() if name not in _PASSING_FACTS}
    made_from = {
        "settings": _fields(settings),
        "seed": seed,
        "environment": facts | {name: os.environ.get(name) for name in _VARIABLES},
        "code": _stamp(*(Path(package.__path__[0]) for package in (aioengine, aioengine_kernels, aioengine_bench))),
        "model": _stamp(Path(settings.config.model)),
        "tokenizer": _stamp(Path(settings.config.tokenizer or settings.config.model)),
        "dataset": _content(settings.dataset.path),
    }
    # Through JSON, as it will come back from a file: what is compared must not differ by tuple and list.
    stored: dict[str, Any] = json.loads(json.dumps(plain(made_from)))
    return stored


def identity_hash(made_from: Mapping[str, Any]) -> str:
    """A few characters that tell runs apart in file names."""
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:8]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of the values that differ."""
    names: list[str] = []
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            names += differences(one, other, f"{prefix}{name}.")
        elif one != other:
            names.append(f"{prefix}{name}")
    return names


def _fields(settings: Any) -> dict[str, Any]:
    values: dict[str, Any] = dataclasses.asdict(settings)
    save, publish = values.pop("save"), values.pop("publish")
    values.pop("disable_progress")
    # Of where results and events go, only what costs time or adds to the result.
    return values | {
        "detailed": save["detailed"],
        "recorded": publish["record"] is not None,
        "published": publish["events"] is not None,
        "publish_text": publish["publish_text"],
    }


def _stamp(*roots: Path) -> str | None:
    """Of the names, sizes and times of all files below `roots`; None where there are none (a name that is looked up elsewhere)."""
    digest = hashlib.sha256()
    found = False
    for path in (path for root in roots for path in _files(root)):
        state = path.stat()
        digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\n".encode(errors="surrogateescape"))
        found = True
    return digest.hexdigest()[:16] if found else None


def _files(root: Path) -> Iterable[Path]:
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts) if root.is_dir() else []


def _content(path: str | None) -> str | None:
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
