"""Checks a file against the rules of the Chrome trace format ("Trace Event Format", the Chromium project's document).

The rules that viewers depend on: which fields an event of each phase must have and of what kind; slices of one thread nest or do not
touch; counters hold numbers; every flow has one start before its steps and its end, and each of its points lies in a slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

_ALWAYS: dict[str, Any] = {"name": str, "ph": str, "pid": int, "tid": int, "ts": (int, float)}
_BY_PHASE: dict[str, dict[str, Any]] = {
    "X": {"dur": (int, float), "cat": str, "args": dict},
    "C": {"args": dict},
    "M": {"args": dict},
    "s": {"id": (str, int), "cat": str},
    "t": {"id": (str, int), "cat": str},
    "f": {"id": (str, int), "cat": str, "bp": str},
}
_METADATA = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def faults_of(data: bytes) -> list[str]:
    """What is wrong with a trace file; nothing, if it is right."""
    trace = json.loads(data)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    events = trace["traceEvents"]
    faults = [fault for event in events for fault in _faults_of_fields(event)]
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        faults.append(f"displayTimeUnit {trace.get('displayTimeUnit')!r}")
    return faults or [*_faults_of_nesting(events), *_faults_of_flows(events), *_faults_of_names(events)]


def _faults_of_fields(event: dict[str, Any]) -> list[str]:
    phase = event.get("ph")
    if phase not in _BY_PHASE:
        return [f"unknown phase {phase!r}"]
    wanted = _ALWAYS | _BY_PHASE[phase]
    faults = [f"{name} of {event} is no {kind}" for name, kind in wanted.items() if not isinstance(event.get(name), kind)]
    if faults:
        return faults
    if event["ts"] < 0 or event.get("dur", 0) < 0:
        faults.append(f"negative time: {event}")
    if phase == "C" and not all(isinstance(value, (int, float)) for value in event["args"].values()):
        faults.append(f"a counter of no number: {event}")
    if phase == "M":
        name, kind = _METADATA.get(event["name"], ("", str))
        if not isinstance(event["args"].get(name), kind):
            faults.append(f"metadata: {event}")
    return faults


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def _faults_of_nesting(events: list[dict[str, Any]]) -> list[str]:
    faults = []
    for thread, slices in _slices(events).items():
        open_until: list[float] = []
        for one in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            if open_until and one["ts"] + one["dur"] > open_until[-1]:
                faults.append(f"thread {thread}: {one['name']} at {one['ts']} overlaps the one around it")
            open_until.append(one["ts"] + one["dur"])
    return faults


def _faults_of_flows(events: list[dict[str, Any]]) -> list[str]:
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["id"]].append(event)
    threads = _slices(events)
    faults = []
    for key, points in flows.items():
        phases = "".join(point["ph"] for point in points)
        if phases[:1] != "s" or phases[-1:] != "f" or set(phases[1:-1]) - {"t"} or len({point["name"] for point in points}) != 1:
            faults.append(f"flow {key} is {phases}")
        times = [point["ts"] for point in points]
        if times != sorted(times):
            faults.append(f"flow {key} goes back in time")
        for point in points:
            around = threads.get((point["pid"], point["tid"]), [])
            if not any(one["ts"] <= point["ts"] <= one["ts"] + one["dur"] for one in around):
                faults.append(f"flow {key} has a point in no slice")
    return faults


def _faults_of_names(events: list[dict[str, Any]]) -> list[str]:
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    return [f"thread {thread} has no name" for thread in _slices(events) if thread not in named]
