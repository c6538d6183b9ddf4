"""Makes a `RunLog` of a recording, in one pass over its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from aioengine.events.recording.cursor import RecordingCursor
from aioengine.events.step_event import Event, FinishedInfo, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import WireHeader
from aioengine_tui.model.rows import RequestRow
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.advice import ADVICE_STEPS, advise
from aioengine_tui.model.why.words import advice_words
from aioengine_tui.runs.run_log import ADMISSION_STOPS, Piece, PieceKind, RunAdvice, RunLog, RunRequest

_MAX_TEXT = 2000  # characters of a prompt or an output that are kept
_PROGRESS_EVENTS = 500
_MAX_IN_FLIGHT = 64  # steps
_UNKNOWN = float("nan")


def read_run(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> RunLog:
    """Read a recording from its first to its last event; a torn last line is left out.

    progress: called now and then with the bytes read and those of the file. Raises WireError, with the line, for what is no event.
    """
    cursor = RecordingCursor(path, make_state=DashboardState)
    try:
        size = cursor.index.path.stat().st_size
        builder = RunBuilder(cursor.index.header)
        while (event := cursor.next_event()) is not None:
            builder.add(event)
            if progress is not None and cursor.position % _PROGRESS_EVENTS == 0:
                progress(cursor.offset, size)
        return builder.finish()
    finally:
        cursor.close()


class RunBuilder:
    """Takes the events of a run in their order; `finish()` gives its `RunLog`.

    The dashboard's own state says what each event means; this notes what it says before the state forgets it.
    """

    def __init__(self, header: WireHeader) -> None:
        self.log = RunLog(header, start=header.perf_counter, end=header.perf_counter)
        self._state = DashboardState(max_steps=8, max_finished=8, max_log_lines=8)
        self._state.apply(header)
        self._live: dict[str, RunRequest] = {}
        self._last_token: dict[str, float] = {}
        self._rows_of_steps: dict[int, int] = {}  # steps in flight -> their place in the columns
        self._advice: dict[str, RunAdvice] = {}
        self._open: dict[int, list[Piece]] = {}  # steps in flight -> pieces that end with their result

    def add(self, event: Event) -> None:
        log = self.log
        if not log.num_events:
            log.start = event.time
        log.num_events += 1
        log.end = max(log.end, event.time)
        for info in () if not isinstance(event, StepEvent | StepResultEvent) else event.added:
            self._arrive(info)
        previous = self._state.last_step_id
        self._state.apply(event)
        if isinstance(event, StepEvent) and self._state.last_step_id != previous:
            self._add_step(event)
        elif isinstance(event, StepResultEvent):
            self._add_result(event)
        for finished in () if not isinstance(event, StepEvent | StepResultEvent) else event.finished:
            self._end(finished, time=event.time)

    def finish(self) -> RunLog:
        """Nothing more comes."""
        for request in list(self._live.values()):
            self._describe(request, self._state.row(request.request_id))
            self._close_wait(request, self._state.last_step_id, self.log.end)
        first = self.log.steps["schedule_start"][:1]
        self.log.start = min([self.log.start, *first, *(request.arrival_time for request in self.log.requests)])
        if len(self.log.steps) % ADVICE_STEPS:
            self._take_advice()
        self.log.advice = sorted(self._advice.values(), key=lambda said: -said.share)
        self.log.num_gaps = self._state.num_gaps
        self.log.num_total_blocks = self._state.stats.num_total_blocks if self._state.stats is not None else 0
        return self.log

    # ------------------------------------------------------------------ requests
    def _arrive(self, info: RequestInfo) -> RunRequest:
        request = RunRequest(
            info.request_id,
            info.arrival_time,
            num_prompt_tokens=info.num_prompt_tokens,
            max_tokens=info.max_tokens,
            priority=info.priority,
            prompt=None if info.prompt is None else info.prompt[:_MAX_TEXT],
        )
        step = self._state.last_step_id + 1
        request.pieces.append(Piece("waiting", step, step - 1, info.arrival_time, info.arrival_time))
        self._live[info.request_id] = request
        self.log.requests.append(request)
        return request

    def _find(self, request_id: str, *, time: float) -> RunRequest:
        """A request that the stream knows; one whose arrival is missing begins here."""
        request = self._live.get(request_id)
        if request is None:
            row = self._state.row(request_id)
            arrival = row.arrival_time if row is not None else time
            request = self._arrive(RequestInfo(request_id, row.num_prompt_tokens if row is not None else 0, 0, arrival))
        return request

    def _end(self, info: FinishedInfo, *, time: float) -> None:
        request = self._live.pop(info.request_id, None)
        self._last_token.pop(info.request_id, None)
        if request is None:
            return
        self._describe(request, self._state.row(info.request_id))
        self._close_wait(request, self._state.last_step_id, time)
        request.finish_time, request.finish_reason = time, info.finish_reason
        request.num_output_tokens = info.num_output_tokens

    @staticmethod
    def _describe(request: RunRequest, row: RequestRow | None) -> None:
        if row is None:
            return
        request.num_prompt_tokens, request.max_tokens = row.num_prompt_tokens, row.max_tokens
        request.num_cached_tokens, request.num_output_tokens = row.num_cached_tokens, row.num_output_tokens
        request.num_preemptions = row.num_preemptions
        request.first_token_time = row.first_token_time
        request.text = None if row.text is None else row.text[:_MAX_TEXT]

    @staticmethod
    def _close_wait(request: RunRequest, last_step: int, time: float) -> None:
        """A request ends, or the recording does: a piece of waiting reaches up to here."""
        piece = request.pieces[-1]
        if not piece.is_scheduled:
            piece.last_step, piece.end = max(piece.last_step, last_step), max(piece.end, time)

    # ------------------------------------------------------------------ steps
    def _add_step(self, event: StepEvent) -> None:
        record = self._state.current
        assert record is not None, "a step was just folded"
        for request_id in record.preempted_ids:
            self._begin(self._find(request_id, time=event.time), "preempted", event.step_id, event.schedule_end)
        opened: list[Piece] = []
        for share in record.shares:
            request = self._find(share.request_id, time=event.time)
            opened.append(self._schedule(request, share.kind, event, share.num_tokens))
        self._open[event.step_id] = opened
        if len(self._open) > _MAX_IN_FLIGHT:  # the results of old ones are missing
            lost = next(iter(self._open))
            del self._open[lost], self._rows_of_steps[lost]
        steps, stats = self.log.steps, event.stats
        self._rows_of_steps[event.step_id] = len(steps)
        mark = self._state.waterfall.marks[-1]
        values = {
            "step_id": event.step_id, "stop": ADMISSION_STOPS.index(event.admission_stop), "num_tokens": record.num_tokens,
            "token_budget": event.token_budget, "num_requests": len(record.shares), "num_running": stats.num_running_reqs,
            "num_waiting": stats.num_waiting_reqs, "num_preempted": stats.num_preempted_reqs,
            "num_used_blocks": stats.num_used_blocks, "num_cached_blocks": stats.num_cached_blocks,
            "num_prompt_tokens": mark.num_prompt_tokens, "num_recomputed_tokens": mark.num_recomputed_tokens,
            "num_new_tokens": 0, "num_allocated": record.num_allocated, "num_freed": record.num_freed,
            "num_evicted": record.num_evicted, "num_preempting": len(record.preempted_ids), "num_draft_tokens": 0,
            "num_accepted_tokens": 0, "schedule_start": event.schedule_start, "schedule_end": event.schedule_end,
        }  # fmt: skip
        for name, column in steps.columns.items():
            column.append(values.get(name, _UNKNOWN))
        if len(steps) % ADVICE_STEPS == 0:
            self._take_advice()

    def _take_advice(self) -> None:
        """Of the latest steps, before the state forgets them; of each cause that part counts in which it weighed most."""
        advice = advise(self._state)
        if advice is None:
            return
        ids = self.log.steps["step_id"]
        first = ids[max(0, len(ids) - ADVICE_STEPS)]
        for finding in advice.findings:
            words = advice_words(dataclasses.replace(advice, findings=(finding,)))
            said = RunAdvice(first, ids[-1], finding.share, finding.cause, words)
            if finding.cause not in self._advice or finding.share > self._advice[finding.cause].share:
                self._advice[finding.cause] = said

    def _begin(self, request: RunRequest, kind: PieceKind, step_id: int, time: float) -> Piece:
        """Another piece, from a step on."""
        before = request.pieces[-1]
        if not before.is_scheduled:
            before.last_step, before.end = step_id - 1, max(before.start, time)
        piece = Piece(kind, step_id, step_id, time, time)
        request.pieces.append(piece)
        return piece

    def _schedule(self, request: RunRequest, kind: PieceKind, event: StepEvent, num_tokens: int) -> Piece:
        step_id, piece = event.step_id, request.pieces[-1]
        if request.scheduled_time is None:
            request.scheduled_time = event.schedule_start
        if piece.is_scheduled and piece.last_step < step_id - 1:
            self._begin(request, "idle", piece.last_step + 1, piece.end)
            piece = request.pieces[-1]
        if piece.kind != kind:
            piece = self._begin(request, kind, step_id, event.schedule_start)
        piece.last_step = step_id
        if kind != "decode" or num_tokens != 1 or piece.tokens:
            if not piece.tokens:
                piece.tokens = [1] * (piece.num_steps - 1)
            piece.tokens.append(num_tokens)
        return piece

    def _add_result(self, event: StepResultEvent) -> None:
        for piece in self._open.pop(event.step_id, ()):
            piece.end = max(piece.end, event.time)
        self._measure_gaps(event)
        row = self._rows_of_steps.pop(event.step_id, None)
        if row is None:
            return
        columns = self.log.steps.columns
        for name in ("execute_start", "execute_end", "sample_start", "sample_end", "update_start", "update_end"):
            value = getattr(event, name)
            columns[name][row] = _UNKNOWN if value is None else value
        columns["num_new_tokens"][row] = sum(event.num_new_tokens.values())
        columns["num_draft_tokens"][row], columns["num_accepted_tokens"][row] = event.num_draft_tokens, event.num_accepted_tokens

    def _measure_gaps(self, event: StepResultEvent) -> None:
        """One gap for each step that brings a request tokens, as the dashboard counts them."""
        gaps: dict[float, int] = {}
        for request_id, count in event.num_new_tokens.items():
            request = self._live.get(request_id)
            if request is None or not count:
                continue
            last = self._last_token.get(request_id)
            self._last_token[request_id] = event.time
            if last is None:
                continue
            gap = event.time - last
            gaps[gap] = gaps.get(gap, 0) + 1
            if gap > request.slowest_gap:
                request.slowest_gap, request.slowest_gap_step = gap, event.step_id
        for gap, count in gaps.items():
            self.log.itls.add(gap, count)
