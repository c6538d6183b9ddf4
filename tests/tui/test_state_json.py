"""The JSON of `aioengine top --json` is what its page says."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import orjson

from aioengine.events.sources.base import Gap
from aioengine.events.step_event import StepResultEvent
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import JSON_VERSION, state_to_json
from tests.tui.support import HEADER, busy_items, busy_state

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dashboard-json.md"
_SAME = {"since_attach": "totals", "finished": "requests", "steps": "step"}
_OWN_NAMES = {"config", "sampling_params", "stats", "histories"}  # objects whose keys are those of something else


def documented() -> dict[str, set[str]]:
    """The keys of each section of the page."""
    keys: dict[str, set[str]] = defaultdict(set)
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        elif match := re.match(r"\| `(\w+)` \|", line):
            keys[section].add(match[1])
    return keys


def collect(value: Any, section: str, found: dict[str, set[str]]) -> None:
    if isinstance(value, dict):
        found[_SAME.get(section, section)] |= value.keys()
        for name, inner in value.items():
            if name not in _OWN_NAMES:
                collect(inner, name, found)
    elif isinstance(value, list):
        for inner in value:
            collect(inner, section, found)


def test_every_key_is_documented_and_every_documented_key_is_there() -> None:
    state = busy_state()
    state.apply(Gap(3))
    found: dict[str, set[str]] = defaultdict(set)
    collect(orjson.loads(orjson.dumps(state_to_json(state, complete=True))), "top level", found)
    assert found == documented()


def test_a_state_that_nothing_has_come_to_has_the_same_form() -> None:
    value, full = state_to_json(DashboardState()), state_to_json(busy_state())
    assert value.keys() == full.keys()
    for name in ("gauges", "totals", "since_attach", "status"):
        assert value[name].keys() == full[name].keys()
    assert value["version"] == JSON_VERSION == 2


def test_it_has_a_date_the_settings_and_the_engines_totals() -> None:
    state = busy_state()
    value = state_to_json(state)
    assert value["config"] == HEADER.config
    assert value["unix_time"] == HEADER.unix_time + (value["now"] - HEADER.perf_counter)
    assert value["totals"]["origin"] == "engine"
    last = busy_items()[-1]
    assert isinstance(last, StepResultEvent)
    assert value["totals"]["num_finished"] == last.stats.num_finished_reqs
    assert [entry["position"] for entry in value["queue"]] == list(range(1, len(state.queue()) + 1))
