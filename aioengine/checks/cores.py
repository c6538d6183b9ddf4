"""Cores of the machine as the user names them: `0-3,8`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from aioengine.checks.values import listed, shorten, whole
from aioengine.errors import ConfigError

_MAX_CORE = 1023  # of the system call's plain form
_RUN = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)


def read_cores(name: str, value: object) -> tuple[int, ...]:
    """Their numbers in ascending order, from a list or from a text such as `0-3,8`. Raises ConfigError."""
    cores: list[int | None] = []
    if isinstance(value, str):
        for part in value.split(","):
            match = _RUN.fullmatch(part.strip())
            first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
            cores += range(first, last + 1) if first <= last <= _MAX_CORE else [None]
    else:
        cores += [whole(item) for item in listed(value, most=_MAX_CORE + 1) or [None]]
    plain = [core for core in cores if core is not None and 0 <= core <= _MAX_CORE]
    if len(plain) < len(cores) or len(set(plain)) < len(plain):
        raise ConfigError(f"{name} must be different cores from 0 to {_MAX_CORE}, a list or a text such as 0-3,8, got {shorten(value)}")
    return tuple(sorted(plain))


def format_cores(cores: Iterable[int]) -> str:
    """`0-3,8`"""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def usable_cores() -> frozenset[int] | None:
    """Those that this process may run on; None where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def check_cores(name: str, cores: tuple[int, ...], *, num_ranks: int, num_threads: int) -> None:
    """Raises ConfigError if this process may not use them, or if a thread of a rank would go without one."""
    said, usable = f"{name} ({format_cores(cores)})", usable_cores()
    if usable is None:
        raise ConfigError(f"{said} needs Linux: this system keeps no thread on a core")
    if not usable.issuperset(cores):
        missing = next(core for core in cores if core not in usable)
        raise ConfigError(f"{said} has core {missing}, but this process may use {format_cores(usable)}")
    if len(cores) // num_ranks < num_threads:
        raise ConfigError(
            f"{said} must be at least {num_ranks * num_threads} cores, one for each thread of {num_ranks} ranks, got {len(cores)}"
        )
