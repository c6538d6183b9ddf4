"""Settings of an engine whose type does not say enough: read as plain values, or refused by name. Each raises ConfigError."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aioengine.checks.settings import read_text
from aioengine.checks.values import listed, number, shorten
from aioengine.errors import ConfigError

MAX_GPU_MEMORY_UTILIZATION = 0.97  # the driver, libraries and the allocator's gaps need the rest while serving
_MAX_LOGITS_PROCESSORS = 64
MAX_LORAS = 256  # at once
MAX_LORA_NAME_CHARS = 256


def read_device(name: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise ConfigError(f'{name} must be auto, cpu, cuda or one of several GPUs, such as "cuda:1"; got {shorten(value)}')
    return value


def read_share(name: str, value: object) -> float:
    share = number(value)
    if share is None or not 0 < share <= MAX_GPU_MEMORY_UTILIZATION:
        raise ConfigError(
            f"{name} must be in (0, {MAX_GPU_MEMORY_UTILIZATION}], got {shorten(value)}: the driver and libraries take memory while serving"
        )
    return share


def read_seconds(name: str, value: object) -> float:
    seconds = number(value)
    if seconds is None or seconds <= 0:
        raise ConfigError(f"{name} must be > 0 and finite, or None, got {shorten(value)}")
    return seconds


def read_logits_processors(name: str, value: object) -> tuple[str, ...]:
    names = listed(value, most=_MAX_LOGITS_PROCESSORS)
    if names is None or len(names) > _MAX_LOGITS_PROCESSORS:
        raise ConfigError(f'{name} must be a list of at most {_MAX_LOGITS_PROCESSORS} "module:name" strings, got {shorten(names)}')
    return tuple(read_text(name, item) for item in names)


def read_loras(name: str, value: object) -> tuple[tuple[str, str], ...]:
    items = listed(tuple(value.items()) if isinstance(value, Mapping) else value, most=MAX_LORAS)
    if items is None or len(items) > MAX_LORAS:
        raise ConfigError(f"{name} must map at most {MAX_LORAS} names to folders, got {shorten(value)}")
    read: dict[str, str] = {}
    for item in items:
        pair = tuple(item.partition("=")[::2]) if isinstance(item, str) else item
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(pair):
            raise ConfigError(f"{name} must be NAME=FOLDER, or a mapping of names to folders, got {shorten(item)}")
        lora, folder = read_lora_name(pair[0], what=f"{name}: the name of an adapter"), read_text(name, pair[1])
        if lora in read:
            raise ConfigError(f"{name} has {lora!r} twice")
        read[lora] = folder
    return tuple(read.items())


def read_lora_name(value: object, *, what: str = "the name of an adapter") -> str:
    """The name of an adapter, as requests give it. what: how an error calls it. Raises ConfigError."""
    name = read_text(what, value)
    if len(name) > MAX_LORA_NAME_CHARS:
        raise ConfigError(f"{what} must have at most {MAX_LORA_NAME_CHARS} characters, got {len(name)}")
    return name
