"""Whether a recording can be run again, and what of its header that takes. What cannot is refused, with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aioengine.checks.values import shorten
from aioengine.errors import ConfigError
from aioengine.events.step_event import EngineSnapshot, Event, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.resolved_config import CacheConfig, SchedulerConfig

T = TypeVar("T")

REPLAYABLE_SCHEMA = 4
"""The first that tells the calls of the scheduler in their order."""


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """What a scheduler is built from."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    num_kv_cache_blocks: int
    eos_token_ids: frozenset[int]


def read_settings(header: WireHeader) -> RecordedSettings:
    """Raises ConfigError for a recording that is too old, or whose header lacks what a scheduler needs."""
    if header.schema_version < REPLAYABLE_SCHEMA:
        raise ConfigError(
            f"a recording of schema {header.schema_version} does not tell the calls of the scheduler (schema {REPLAYABLE_SCHEMA} does): "
            "it can be watched, but not run again"
        )
    if header.num_kv_cache_blocks is None:
        raise ConfigError("the header does not tell num_kv_cache_blocks: the recording cannot be run again")
    return RecordedSettings(
        scheduler=build_config(SchedulerConfig, header.config, "scheduler"),
        cache=read_cache_config(header),
        num_kv_cache_blocks=header.num_kv_cache_blocks,
        eos_token_ids=frozenset(_section(header.config, "model").get("eos_token_ids", ())),
    )


def read_cache_config(header: WireHeader) -> CacheConfig:
    """The cache settings with their KV-cache groups; a recording of before there were any has one that sees everything.

    Raises ConfigError as `build_config` does.
    """
    cache = build_config(CacheConfig, header.config, "cache")
    if not isinstance(stated := _section(header.config, "cache").get("kv_cache_groups"), list):
        num_layers = _section(header.config, "model").get("num_layers", 1)
        return dataclasses.replace(cache, kv_cache_groups=(KVCacheGroup(tuple(range(num_layers))),))
    try:
        groups = tuple(KVCacheGroup(tuple(group["layers"]), group["sliding_window"]) for group in stated)
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"the header's kv_cache_groups are not layers and a window each: {shorten(stated)}") from exc
    return dataclasses.replace(cache, kv_cache_groups=groups)


def build_config(kind: type[T], config: Mapping[str, Any], name: str) -> T:
    """A part of `ResolvedConfig` from the header's. Raises ConfigError for settings that this version does not have."""
    section = _section(config, name)
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(section.keys() - known):
        raise ConfigError(f"the header's {name} settings have {', '.join(unknown)}, which this aioengine does not know")
    try:
        return kind(**section)
    except TypeError as exc:
        raise ConfigError(f"the header's {name} settings are incomplete: {exc}") from exc


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise ConfigError(f"the header has no {name} settings: the recording cannot be run again")
    return section


def steps_in_order(events: Iterable[Event], *, until: int | None = None) -> Iterator[StepEvent | StepResultEvent]:
    """The steps and results of a recording, up to the frame of step `until`.

    Raises ConfigError at the first that does not follow the one before: then an event is missing (the recorder drops some where the
    disk is too slow), or was not written exactly, and nothing after it could be said to be right or wrong.
    """
    step_id = result_id = 0
    for event in events:
        if isinstance(event, EngineSnapshot):
            continue
        is_step = isinstance(event, StepEvent)
        expected = (step_id if is_step else result_id) + 1
        kind = "step" if is_step else "result of step"
        if event.step_id != expected:
            raise ConfigError(
                f"{kind} {expected} is missing (the next is {event.step_id}): events were dropped, or this is a part of a recording"
            )
        if event.approximate:
            raise ConfigError(f"{kind} {expected} holds values that could not be written exactly: the recording cannot be run again")
        if event.calls.count("schedule" if is_step else "update") != 1:
            raise ConfigError(f"{kind} {expected} does not tell the calls of the scheduler: {event.calls}")
        if is_step:
            step_id = expected
        else:
            if expected > step_id:
                raise ConfigError(f"step {expected} is missing: its result comes without it")
            result_id = expected
        yield event
        if is_step and event.step_id == until:
            return
