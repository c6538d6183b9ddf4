"""A run in the Chrome trace format, for ui.perfetto.dev, chrome://tracing and speedscope.

Two processes: "engine" with a track for each phase of a step and the counters, "requests" with a track a request. The format:
"Trace Event Format" of the Chromium project (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Times are
microseconds since the first event. Slices of one track never overlap except by nesting, which the format asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from aioengine.printable import printable
from aioengine_tui.runs.run_log import ADMISSION_STOPS, PieceKind, RunLog, RunRequest

TraceEvent = dict[str, Any]

ENGINE_PID, REQUESTS_PID = 1, 2
LANES = ("schedule", "execute", "sample", "update")
"""The track of lane i has the tid i + 1."""

_MAX_OWN_TRACKS = 1000
"""With more requests, tracks are shared: one that has ended leaves its track to a later one. Viewers stall on very many tracks."""

_PIECE_NAMES: dict[PieceKind, str] = {
    "waiting": "waiting", "preempted": "preempted", "prefill": "prefill", "chunk": "prefill", "decode": "decode",
    "resumed": "recompute", "idle": "idle",
}  # fmt: skip


def trace_lines(log: RunLog) -> Iterator[bytes]:
    """The file, piece by piece: a JSON object whose traceEvents stand one a line."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(_other_data(log)) + b',"traceEvents":[\n'
    separator = b""
    for event in trace_events(log):
        yield separator + encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def trace_events(log: RunLog) -> Iterator[TraceEvent]:
    clock = _Clock(log.start)
    tracks = _assign_tracks(log.requests)
    yield from _names(log, tracks)
    yield from _engine_slices(log, clock)
    yield from _counters(log, clock)
    for number, (request, tid) in enumerate(zip(log.requests, tracks, strict=True)):
        yield from _request_slices(request, tid, clock)
        yield from _arrows(request, number, tid, clock)


class _Clock:
    """The engine's seconds as whole microseconds since the first event.

    Whole ones: with fractions, ts + dur of a slice is not exactly the ts of the next, and viewers take that for an overlap.
    """

    def __init__(self, start: float) -> None:
        self._start = start

    def __call__(self, time: float) -> int:
        return round((time - self._start) * 1e6)


def _other_data(log: RunLog) -> dict[str, Any]:
    header = log.header
    return {
        "model": printable(header.model),
        "engine": f"aioengine {printable(header.engine_version)}",
        "start_unix_time": header.unix_time + (log.start - header.perf_counter),
        "num_steps": len(log.steps),
        "num_requests": len(log.requests),
        "num_gaps": log.num_gaps,
        "config": printable(msgspec.json.encode(header.config).decode()),
    }


def _assign_tracks(requests: list[RunRequest]) -> list[int]:
    if len(requests) <= _MAX_OWN_TRACKS:
        return list(range(1, len(requests) + 1))
    ends: list[float] = []  # of the latest request on each track
    tracks = []
    for request in requests:
        end = _end_of(request)
        free = next((index for index, taken_until in enumerate(ends) if taken_until <= request.arrival_time), None)
        if free is None:
            free = len(ends)
            ends.append(end)
        else:
            ends[free] = end
        tracks.append(free + 1)
    return tracks


def _end_of(request: RunRequest) -> float:
    return max([request.finish_time or request.arrival_time, *(piece.end for piece in request.pieces)])


def _names(log: RunLog, tracks: list[int]) -> Iterator[TraceEvent]:
    yield _metadata("process_name", ENGINE_PID, 0, name=f"engine ({printable(log.header.model) or 'no name'})")
    yield _metadata("process_sort_index", ENGINE_PID, 0, sort_index=1)
    yield _metadata("process_name", REQUESTS_PID, 0, name="requests")
    yield _metadata("process_sort_index", REQUESTS_PID, 0, sort_index=2)
    for index, lane in enumerate(LANES, start=1):
        yield _metadata("thread_name", ENGINE_PID, index, name=lane)
        yield _metadata("thread_sort_index", ENGINE_PID, index, sort_index=index)
    shared = len(log.requests) > _MAX_OWN_TRACKS
    for tid in sorted(set(tracks)):
        name = f"track {tid}" if shared else printable(log.requests[tid - 1].request_id) or "(no name)"
        yield _metadata("thread_name", REQUESTS_PID, tid, name=name)
        yield _metadata("thread_sort_index", REQUESTS_PID, tid, sort_index=tid)


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


# ---------------------------------------------------------------------------------------------------- the engine
def _engine_slices(log: RunLog, clock: _Clock) -> Iterator[TraceEvent]:
    steps = log.steps
    for tid, lane in enumerate(LANES, start=1):
        free_from = 0
        for index in range(len(steps)):
            span = steps.span(lane, index)
            if span is None:
                continue
            start, end = max(clock(span[0]), free_from), clock(span[1])
            end = free_from = max(start, end)
            args = _step_args(log, index) if lane in ("schedule", "execute") else {"step": steps["step_id"][index]}
            yield _slice(f"{lane} {steps['step_id'][index]}", ENGINE_PID, tid, start, end, "step", args)


def _step_args(log: RunLog, index: int) -> dict[str, Any]:
    steps = log.steps
    return {
        "step": steps["step_id"][index],
        "tokens": steps["num_tokens"][index],
        "budget": steps["token_budget"][index],
        "requests": steps["num_requests"][index],
        "prompt tokens": steps["num_prompt_tokens"][index],
        "recomputed tokens": steps["num_recomputed_tokens"][index],
        "new tokens": steps["num_new_tokens"][index],
        "admission stop": ADMISSION_STOPS[steps["stop"][index]],
        "preempted": steps["num_preempting"][index],
        "blocks allocated": steps["num_allocated"][index],
        "blocks freed": steps["num_freed"][index],
        "blocks evicted": steps["num_evicted"][index],
    }


def _slice(name: str, pid: int, tid: int, start: int, end: int, category: str, args: dict[str, Any]) -> TraceEvent:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


_COUNTERS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("requests", (("running", "num_running"), ("waiting", "num_waiting"))),
    ("KV blocks", (("used", "num_used_blocks"),)),
    ("cached blocks", (("cached", "num_cached_blocks"),)),
    ("tokens of the step", (("prompt", "num_prompt_tokens"), ("recomputed", "num_recomputed_tokens"), ("sampled", "num_new_tokens"))),
)


def _counters(log: RunLog, clock: _Clock) -> Iterator[TraceEvent]:
    """Only where a value changes: a counter holds until its next event."""
    steps = log.steps
    for name, series in _COUNTERS:
        shown: dict[str, int] | None = None
        for index in range(len(steps)):
            values = {label: steps[column][index] for label, column in series}
            if values != shown:
                shown = values
                ts = clock(steps["schedule_end"][index])
                yield {"ph": "C", "name": name, "cat": "counter", "pid": ENGINE_PID, "tid": 0, "ts": ts, "args": values}


# ---------------------------------------------------------------------------------------------------- requests
def _request_slices(request: RunRequest, tid: int, clock: _Clock) -> Iterator[TraceEvent]:
    """The whole life, and in it the pieces."""
    start, end = clock(request.arrival_time), clock(_end_of(request))
    name = printable(request.request_id)
    yield _slice(name, REQUESTS_PID, tid, start, max(start, end), "request", _request_args(request))
    free_from = start
    for piece in request.pieces:
        piece_start = max(clock(piece.start), free_from)
        free_from = max(piece_start, min(clock(piece.end), max(start, end)))
        if free_from == piece_start:
            continue  # it took no time: admitted at once
        args: dict[str, Any] = {"first step": piece.first_step, "last step": piece.last_step, "tokens": piece.num_tokens}
        yield _slice(_PIECE_NAMES[piece.kind], REQUESTS_PID, tid, piece_start, free_from, piece.kind, args)


def _request_args(request: RunRequest) -> dict[str, Any]:
    args: dict[str, Any] = {
        "prompt tokens": request.num_prompt_tokens,
        "cached tokens": request.num_cached_tokens,
        "output tokens": request.num_output_tokens,
        "max tokens": request.max_tokens,
        "priority": request.priority,
        "preemptions": request.num_preemptions,
        "end": request.finish_reason or "not seen",
    }
    for label, seconds in (("queue ms", request.queue_wait), ("ttft ms", request.ttft), ("e2e ms", request.e2e)):
        if seconds is not None:
            args[label] = round(seconds * 1e3, 3)
    return args


def _arrows(request: RunRequest, number: int, tid: int, clock: _Clock) -> Iterator[TraceEvent]:
    """From the queue to the step that admitted it, and to its first token."""
    if request.scheduled_time is None or request.first_token_time is None:
        return
    flow = {"cat": "admission", "name": "admitted", "id": f"admission-{number}"}
    yield {"ph": "s", **flow, "pid": REQUESTS_PID, "tid": tid, "ts": clock(request.arrival_time)}
    yield {"ph": "t", **flow, "pid": ENGINE_PID, "tid": 1, "ts": clock(request.scheduled_time)}
    yield {"ph": "f", "bp": "e", **flow, "pid": REQUESTS_PID, "tid": tid, "ts": clock(request.first_token_time)}
