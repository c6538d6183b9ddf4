"""Traffic of others: Azure's and BurstGPT's CSV, Mooncake's JSON lines, and recordings of this engine.

A row that says nothing usable is left out, counted and named; a request that is too long for the engine fails as it would there.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import orjson

from aioengine.errors import ConfigError
from aioengine.events.recording.reader import Recording
from aioengine.events.step_event import EngineSnapshot, RequestInfo
from aioengine_bench.simulate.arrivals import Arrival

TraceFormat = Literal["azure", "mooncake", "burstgpt"]
T = TypeVar("T")
P = ParamSpec("P")
_MOONCAKE_BLOCK = 512
# By the columns that are read: when, tokens of the prompt, tokens of the answer. Those that a format has besides are known, and unused.
_COLUMNS: dict[TraceFormat, tuple[str, str, str]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
_UNUSED = frozenset({"Session ID", "Elapsed time", "Model", "Total tokens", "Log Type"})  # of BurstGPT's three releases
_MOONCAKE = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})


@dataclass(slots=True)
class Trace:
    """arrivals: by time, the first one at 0. skipped: why rows were left out, with the first line of each kind."""

    arrivals: list[Arrival]
    skipped: Counter[str] = field(default_factory=Counter)
    first_lines: dict[str, int] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)  # columns that say what is not simulated, and how many rows have them

    def problems(self) -> list[str]:
        rows = [f"{count} rows left out: {reason} (first in line {self.first_lines[reason]})" for reason, count in self.skipped.items()]
        return rows + [f"{count} rows have {name!r}, which means nothing here" for name, count in self.unknown.items()]


class _Unusable(Exception):
    """Why a row is left out."""


@dataclass(frozen=True, slots=True)
class _Row:
    time: float
    prompt_len: int
    max_tokens: int
    content: Sequence[int] = ()


def read_trace(path: str | Path, *, limit: int | None = None, speed: float = 1.0) -> Trace:
    """speed: how much faster it comes than it did. Raises ConfigError for a file of another kind, and if no row is usable."""
    path = Path(path)
    trace, rows = Trace([]), []
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            for number, row in _rows(path, file, trace.unknown):
                if isinstance(row, _Row):
                    rows.append(row)
                else:
                    trace.skipped[row] += 1
                    trace.first_lines.setdefault(row, number)
                if limit is not None and len(rows) >= limit:
                    break
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    if not rows:
        raise ConfigError(f"{path} has no usable row" + "".join(f"; {problem}" for problem in trace.problems()))
    rows.sort(key=lambda row: row.time)
    size = _MOONCAKE_BLOCK if any(row.content for row in rows) else 0
    trace.arrivals = [
        Arrival(index, (row.time - rows[0].time) / speed, row.prompt_len, row.max_tokens, content=row.content, content_size=size)
        for index, row in enumerate(rows)
    ]
    return trace


def repeat(arrivals: Sequence[Arrival], num_requests: int) -> Iterator[Arrival]:
    """As many requests: the trace again and again, each time behind its last arrival; prompts are those of the first time only once."""
    period = arrivals[-1].time + (arrivals[-1].time / max(1, len(arrivals) - 1))
    for index in range(num_requests):
        turn, place = divmod(index, len(arrivals))
        one = arrivals[place]
        yield one if not turn else replace(one, index=index, time=one.time + turn * period)


def _rows(path: Path, file: Iterator[str], unknown: Counter[str]) -> Iterator[tuple[int, _Row | str]]:
    """(line number, what it holds or why it is left out)."""
    first = next(file, "")
    if first.lstrip().startswith("{"):
        for number, line in enumerate(chain((first,), file), start=1):
            yield number, _try(_mooncake, line, unknown)
        return
    columns = [name.strip() for name in first.lstrip("\ufeff").rstrip("\r\n").split(",")]
    kind = next((kind for kind, names in _COLUMNS.items() if set(names) <= set(columns)), None)
    if kind is None:
        wanted = " or ".join(", ".join(names) for names in _COLUMNS.values())
        raise ConfigError(f"{path}, line 1: neither Mooncake's JSON lines nor the columns {wanted}: {first[:80]!r}")
    places = [columns.index(name) for name in _COLUMNS[kind]]
    strange = [name for name in columns if name not in _COLUMNS[kind] and name not in _UNUSED]
    parse = _azure if kind == "azure" else _burstgpt
    for number, cells in enumerate(csv.reader(file), start=2):
        if len(cells) != len(columns):
            yield number, f"{len(cells)} cells where there are {len(columns)} columns"
        else:
            unknown.update(strange)
            yield number, _try(parse, [cells[place] for place in places])


def _try(parse: Callable[Concatenate[T, P], _Row], text: T, *args: P.args, **kwargs: P.kwargs) -> _Row | str:
    try:
        return parse(text, *args, **kwargs)
    except _Unusable as exc:
        return str(exc)


def _azure(cells: Sequence[str]) -> _Row:
    try:
        time = datetime.fromisoformat(cells[0].strip()[:26]).timestamp()
    except ValueError:
        raise _Unusable("the time is no date") from None
    return _Row(time, _count(cells[1], "ContextTokens"), _count(cells[2], "GeneratedTokens"))


def _burstgpt(cells: Sequence[str]) -> _Row:
    return _Row(_time(cells[0], 1.0), _count(cells[1], "Request tokens"), _count(cells[2], "Response tokens"))


def _mooncake(line: str, unknown: Counter[str]) -> _Row:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise _Unusable("no JSON") from None
    if not isinstance(entry, dict):
        raise _Unusable("no JSON object")
    unknown.update(name for name in entry if name not in _MOONCAKE)
    content = entry.get("hash_ids", [])
    if not isinstance(content, list) or any(type(name) is not int for name in content):
        raise _Unusable("hash_ids is no list of integers")
    return _Row(
        _time(entry.get("timestamp"), 1000.0),
        _count(entry.get("input_length"), "input_length"),
        _count(entry.get("output_length"), "output_length"),
        content,
    )


def _time(value: object, units_a_second: float) -> float:
    try:
        time = float(value) / units_a_second  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _Unusable("the time is no number") from None
    if not math.isfinite(time) or time < 0:
        raise _Unusable("the time is negative or not finite")
    return time


def _count(value: object, name: str) -> int:
    try:
        count = int(str(value)) if not isinstance(value, bool) else 0
    except ValueError:
        raise _Unusable(f"{name} is no whole number") from None
    if count < 1:
        raise _Unusable(f"{name} is below 1")
    return count


def from_recording(recording: Recording) -> Trace:
    """The requests of a recording: when they came, how long they became, and what they shared. Those that never ended are left out."""
    trace = Trace([])
    added: dict[str, RequestInfo] = {}
    hashes: dict[str, list[bytes]] = {}
    found: list[Arrival] = []
    start: float | None = None
    for event in recording.events:
        if isinstance(event, EngineSnapshot):
            continue
        for info in event.added:
            added[info.request_id] = info
            hashes[info.request_id] = []
            start = info.arrival_time if start is None else min(start, info.arrival_time)
        for req_id, names in event.block_hashes.items():
            if req_id in hashes:
                hashes[req_id] += [bytes.fromhex(name) for name in names]
        for end in event.finished:
            ended = added.pop(end.request_id, None)
            if ended is None or not end.num_output_tokens:
                trace.skipped["requests that ended without a token"] += 1
                trace.first_lines.setdefault("requests that ended without a token", 0)
                continue
            found.append(
                Arrival(
                    len(found),
                    ended.arrival_time,
                    ended.num_prompt_tokens,
                    end.num_output_tokens,
                    ended.priority,
                    block_hashes=hashes[end.request_id],
                )
            )
    if not found or start is None:
        raise ConfigError("no request of the recording ended with a token: there is nothing to simulate")
    if added:
        trace.skipped["requests that had not ended"] = len(added)
        trace.first_lines["requests that had not ended"] = 0
    found.sort(key=lambda arrival: arrival.time)
    trace.arrivals = [replace(arrival, index=index, time=arrival.time - start) for index, arrival in enumerate(found)]
    return trace
