"""What is simulated: settings of the engine, costs and traffic, and how a setting is changed by its name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from aioengine.errors import ConfigError
from aioengine.resolved_config import CacheConfig, SchedulerConfig, SchedulingPolicy
from aioengine_bench.simulate.cost import HostCost, StepCost

Value = int | float | bool | str
_ALIASES = {"scheduling_policy": "policy"}
_SCHEDULER = {f.name: f for f in dataclasses.fields(SchedulerConfig)}
_CACHE = {"block_size", "enable_prefix_caching"}
_OWN = {"num_kv_cache_blocks", "replicas", "speed"}


@dataclass(frozen=True, slots=True)
class Plan:
    """speed: how much faster requests come than the traffic says."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    num_kv_cache_blocks: int
    cost: StepCost
    host: HostCost
    replicas: int = 1
    speed: float = 1.0

    def with_settings(self, changes: Mapping[str, Value]) -> Plan:
        """Raises ConfigError for a name that nothing here has, and a value of another kind."""
        plan = self
        for given, value in changes.items():
            name = _ALIASES.get(given, given)
            if name in _SCHEDULER:
                plan = dataclasses.replace(plan, scheduler=_replace(plan.scheduler, name, value))
            elif name in _CACHE:
                plan = dataclasses.replace(plan, cache=_replace(plan.cache, name, value))
            elif name in _OWN:
                plan = _replace(plan, name, value)
            else:
                known = sorted({*_SCHEDULER, *_CACHE, *_OWN, *_ALIASES} - {"policy"})
                raise ConfigError(f"there is no setting {given!r} to simulate with; there are: {', '.join(known)}")
        plan.check()
        return plan

    def check(self) -> None:
        """Raises ConfigError for what no engine would start with."""
        scheduler = self.scheduler
        for name, value, least in (
            ("max_num_seqs", scheduler.max_num_seqs, 1),
            ("max_model_len", scheduler.max_model_len, 2),
            ("block_size", self.cache.block_size, 1),
            ("num_kv_cache_blocks", self.num_kv_cache_blocks, 2),
            ("replicas", self.replicas, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at least max_num_seqs ({scheduler.max_num_seqs})"
            )
        if scheduler.num_speculative_tokens:
            raise ConfigError("draft tokens cannot be simulated: whether one is right depends on the text")
        if not self.speed > 0:
            raise ConfigError(f"speed must be above 0, got {self.speed}")


def _replace(target: Any, name: str, value: Value) -> Any:
    before = getattr(target, name)
    if isinstance(before, bool) != isinstance(value, bool) or isinstance(before, str) != isinstance(value, str):
        raise ConfigError(f"{name} is {before!r} and cannot become {value!r}")
    if isinstance(before, int) and isinstance(value, float):
        raise ConfigError(f"{name} must be a whole number, got {value}")
    if name == "policy" and value not in get_args(SchedulingPolicy):
        raise ConfigError(f"scheduling_policy must be one of {get_args(SchedulingPolicy)}, got {value!r}")
    return dataclasses.replace(target, **{name: value})


def parse_settings(items: Sequence[str]) -> dict[str, Value]:
    """["max_num_seqs=8", ...] -> values. Raises ConfigError."""
    return {name: _value(text) for name, text in map(_split, items)}


def parse_ranges(items: Sequence[str]) -> dict[str, list[Value]]:
    """["max_num_seqs=16:256", "speed=0.5,1,2"]: a list as it is, a range by doubling with its end. Raises ConfigError."""
    return {name: _range(text) for name, text in map(_split, items)}


def combinations(ranges: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Every value of each with every value of the others, the last one fastest."""
    for values in itertools.product(*ranges.values()):
        yield dict(zip(ranges, values, strict=True))


def _split(item: str) -> tuple[str, str]:
    name, separator, text = item.partition("=")
    if not separator or not name or not text:
        raise ConfigError(f"a setting must look like NAME=VALUE, got {item!r}")
    return name, text


def _range(text: str) -> list[Value]:
    if ":" not in text:
        return [_value(part) for part in text.split(",")]
    first, _, last = text.partition(":")
    low, high = _value(first), _value(last)
    if isinstance(low, (bool, str)) or isinstance(high, (bool, str)) or not 0 < low <= high:
        raise ConfigError(f"a range must look like 16:256 with 0 < low <= high, got {text!r}")
    values: list[Value] = []
    while low < high:
        values.append(low)
        low *= 2
    return [*values, high]


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
