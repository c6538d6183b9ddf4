"""What every request did in every step: the history behind the waterfall, folded from events, in bounded memory.

A request's history is a list of runs: (first step, what it did, tokens a step), each of which lasts until the next one
begins. So a thousand steps of decoding are one run, and a step costs nothing for a request that goes on as before. The
steps themselves are marks of a few numbers each. The latest `MAX_STEPS` steps are kept, whatever the length of the run.

    for row in waterfall.rows(first_step, last_step): ...    # by arrival
        for run in row.runs: ...                             # CELLS[run.cell] names what it did
    for mark in waterfall.marks: ...                         # one a step, oldest first

Everything is seconds of the engine's clock, step ids, and counts.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple, get_args

from aioengine.core.scheduler_output import AdmissionStop
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine_tui.model.rows import RequestRow, Share, Shares

Cell = Literal["none", "waiting", "preempted", "idle", "decode", "draft", "chunk", "prefill", "resumed", "ended", "aborted", "mixed"]
"""What a request did in a step. waiting: in the queue (why: the step's `StepMark.stop`). preempted: back in the queue after it
lost its blocks. idle: it runs, but got no token. decode: a sampled token was computed. draft: the same, with draft tokens to
check. chunk: a part of its prompt. prefill: the rest of its prompt. resumed: tokens that a preemption made necessary again.
ended: it ended, and the worker has not been told yet. aborted: the same, by an abort or an error. mixed: only in a column of
several steps, part of them prompt and part of them decoding. none: it was not there."""
CELLS: tuple[Cell, ...] = get_args(Cell)

NONE, WAITING, PREEMPTED, IDLE, DECODE, DRAFT, CHUNK, PREFILL, RESUMED, ENDED, ABORTED, MIXED = range(len(CELLS))
"""The codes in a run: indices into `CELLS`."""

MAX_STEPS = 8192
MAX_ENDED_ROWS = 4096
_END_SLACK = 8  # steps
MAX_RUNS = 1024  # of a row; more has only who is preempted hundreds of times, or decodes with draft tokens for long

_CODES: dict[str, int] = {"chunk": CHUNK, "prefill": PREFILL, "resumed": RESUMED}
_STATE_CODES: dict[str, int] = {"waiting": WAITING, "preempted": PREEMPTED, "running": IDLE, "cleaning_up": ENDED, "finished": ENDED}
COMPUTES = frozenset({DECODE, DRAFT, CHUNK, PREFILL, RESUMED})
"""The codes of a request that has tokens in the step."""
PROMPTS = frozenset({CHUNK, PREFILL, RESUMED})
"""Those of them with tokens of a prompt, or of a history that is computed again."""


class Run(NamedTuple):
    """What a request did from a step on, until the next run begins."""

    start_step: int
    cell: int  # an index into CELLS
    num_tokens: int  # each step; of `draft`: tokens that the step gave it, 0 while that is not known
    samples: bool = True  # of a cell that computes: the step gives it a token; False: a chunk that does not reach the end


class StepMark(NamedTuple):
    """One step, in the numbers that a column needs."""

    step_id: int
    time: float  # when it was scheduled
    stop: AdmissionStop
    num_tokens: int
    token_budget: int
    num_reqs: int  # that have tokens in it
    num_running: int
    num_waiting: int  # preempted ones included
    num_used_blocks: int
    num_total_blocks: int
    num_prompt_tokens: int  # of num_tokens: of prompts, without what was computed before
    num_recomputed_tokens: int  # of num_tokens: lost to a preemption before
    num_preempted: int
    stopped_req_id: str | None = None  # at whom admission stopped; None: nobody was left waiting, or the engine does not tell
    start: float | None = None  # the worker's work on it; None: it has not come back, or the executor reports no times
    end: float | None = None
    result_time: float | None = None  # when its tokens were taken in; None: it has not come back
    after_gap: bool = False  # steps before it were not seen

    @property
    def duration(self) -> float | None:
        """Seconds of the worker's work on it: what everybody in it waits for their token."""
        return None if self.start is None or self.end is None else max(0.0, self.end - self.start)


class WaterfallRow:
    """One request. Owned by a `Waterfall`."""

    __slots__ = ("arrival_time", "cell", "end_step", "last_share_step", "num_runs_dropped", "number", "request_id", "runs")

    def __init__(self, number: int, request_id: str, *, arrival_time: float) -> None:
        self.number = number  # counts arrivals; unlike a request id it is never used again
        self.request_id = request_id
        self.arrival_time = arrival_time
        self.runs: list[Run] = []  # oldest first
        self.cell = NONE  # what it did last
        self.last_share_step = 0  # the last step in which it had tokens; 0: none
        self.end_step: int | None = None  # the last step in which it is shown; None: it is still there
        self.num_runs_dropped = 0

    @property
    def first_step(self) -> int | None:
        """The first step that is known of it; None: it arrived after the last one."""
        return self.runs[0].start_step if self.runs else None

    def at(self, step_id: int) -> Run | None:
        """What it did in a step; None if it was not there."""
        if self.end_step is not None and step_id > self.end_step:
            return None
        index = self.index_at(step_id)
        if index is None:
            return None
        run = self.runs[index]
        if index == len(self.runs) - 1 and run.cell in COMPUTES and step_id > self.last_share_step:
            return Run(self.last_share_step + 1, IDLE, 0)
        return run

    def index_at(self, step_id: int) -> int | None:
        """The index of the run that a step belongs to; None: all of them are later."""
        low, high = 0, len(self.runs)
        while low < high:
            middle = (low + high) // 2
            if self.runs[middle].start_step <= step_id:
                low = middle + 1
            else:
                high = middle
        return low - 1 if low else None

    def add(self, run: Run) -> None:
        """Begin a run. One that begins in the same step as the last one takes its place."""
        runs, self.cell = self.runs, run.cell
        if runs and runs[-1].start_step >= run.start_step:
            runs[-1] = Run(runs[-1].start_step, run.cell, run.num_tokens)
            return
        if runs and runs[-1].cell in COMPUTES and self.last_share_step + 1 < run.start_step:
            runs.append(Run(self.last_share_step + 1, IDLE, 0))
        runs.append(run)
        if len(runs) > MAX_RUNS:
            self.num_runs_dropped += MAX_RUNS // 4
            del runs[: MAX_RUNS // 4]

    def copy(self) -> WaterfallRow:
        other = WaterfallRow(self.number, self.request_id, arrival_time=self.arrival_time)
        other.runs, other.last_share_step, other.end_step = self.runs.copy(), self.last_share_step, self.end_step
        other.cell, other.num_runs_dropped = self.cell, self.num_runs_dropped
        return other


class Waterfall:
    """The latest steps, and the requests that were there."""

    def __init__(self, *, max_steps: int = MAX_STEPS, max_ended_rows: int = MAX_ENDED_ROWS) -> None:
        self.marks: deque[StepMark] = deque(maxlen=max_steps)  # oldest first
        self._live: dict[str, WaterfallRow] = {}
        self._ending: dict[str, WaterfallRow] = {}  # ended, and the worker has not been told
        self._ended: deque[WaterfallRow] = deque(maxlen=max_ended_rows)  # never written to again
        self._num_rows = 0

    # ------------------------------------------------------------------ reading
    def rows(self, first_step: int, last_step: int) -> list[WaterfallRow]:
        """The requests that were there in any of these steps, by arrival."""
        found = [row for row in (*self._ending.values(), *self._live.values()) if row.runs and row.runs[0].start_step <= last_step]
        for row in reversed(self._ended):  # in the order in which they ended, but for a step or two
            end_step = row.end_step or 0
            if end_step < first_step - _END_SLACK:
                break
            if end_step >= first_step and row.runs and row.runs[0].start_step <= last_step:
                found.append(row)
        found.sort(key=_number)
        return found

    def row(self, request_id: str) -> WaterfallRow | None:
        """The latest request of that name."""
        live = self._live.get(request_id) or self._ending.get(request_id)
        return live or next((row for row in reversed(self._ended) if row.request_id == request_id), None)

    def mark(self, step_id: int) -> StepMark | None:
        """A step that is still kept."""
        index = self.position(step_id)
        return None if index is None else self.marks[index]

    def position(self, step_id: int) -> int | None:
        """The index of a step in `marks`; None if it is not kept."""
        marks = self.marks
        if not marks:
            return None
        index = len(marks) - 1 - (marks[-1].step_id - step_id)  # where it is if none is missing
        if 0 <= index < len(marks) and marks[index].step_id == step_id:
            return index
        return next((index for index, mark in enumerate(marks) if mark.step_id == step_id), None)

    def company(self, step_id: int) -> list[tuple[str, Run]]:
        """Who had tokens in a step, by arrival."""
        found = ((row.request_id, row.at(step_id)) for row in self.rows(step_id, step_id))
        return [(request_id, run) for request_id, run in found if run is not None and run.cell in COMPUTES]

    # ------------------------------------------------------------------ folding
    def note_step(
        self,
        event: StepEvent,
        shares: Shares,
        requests: dict[str, RequestRow],
        *,
        num_prompt_tokens: int,
        num_recomputed_tokens: int,
    ) -> None:
        """A step was scheduled, and `requests` are as they are after it."""
        step_id, marks = event.step_id, self.marks
        previous = marks[-1].step_id if marks else 0
        for finished in event.finished:
            self._end(finished.request_id, step_id, aborted=finished.finish_reason in ("abort", "error"))
        for request_id in event.output.preempted_req_ids:
            if (row := self._live.get(request_id)) is not None:
                row.add(Run(step_id, PREEMPTED, 0))
        self._note_shares(step_id, previous, shares, requests)
        for info in event.added:
            if (live := requests.get(info.request_id)) is not None and info.request_id not in self._live:
                self._start(live, step_id)
        for request_id in event.output.finished_req_ids:
            self._close(request_id, step_id)
        stats = event.stats
        marks.append(
            StepMark(
                step_id, event.time, event.admission_stop, event.output.total_num_scheduled_tokens, event.token_budget, len(shares),
                stats.num_running_reqs, stats.num_waiting_reqs, stats.num_used_blocks, stats.num_total_blocks,
                num_prompt_tokens, num_recomputed_tokens, len(event.output.preempted_req_ids), event.stopped_req_id,
                after_gap=bool(previous) and step_id != previous + 1,
            )
        )  # fmt: skip
        self._forget_old_rows()

    def _note_shares(self, step_id: int, previous: int, shares: Shares, requests: dict[str, RequestRow]) -> None:
        live = self._live
        request_ids = shares.decoding.request_ids if shares.decoding is not None else ()
        for request_id, row in zip(request_ids, map(live.get, request_ids), strict=True):
            if row is None:
                if (known := requests.get(request_id)) is None:
                    continue
                row = self._add_row(known)
            if row.last_share_step != previous or row.cell != DECODE:  # else it goes on: nothing to write down
                row.add(Run(step_id, DECODE, 1))
            row.last_share_step = step_id
        for share in shares.others:
            request_id, kind, num_tokens = share[:3]
            row = live.get(request_id)
            if row is None:
                if (known := requests.get(request_id)) is None:
                    continue
                row = self._add_row(known)
            if kind != "decode":
                row.add(Run(step_id, _CODES[kind], num_tokens, _samples(share, requests.get(request_id))))
            elif num_tokens > 1:
                row.add(Run(step_id, DRAFT, 0))
            elif row.cell != DECODE or row.last_share_step != previous:  # else it goes on: nothing to write down
                row.add(Run(step_id, DECODE, 1))
            row.last_share_step = step_id

    def note_result(self, event: StepResultEvent, requests: dict[str, RequestRow], *, last_step_id: int) -> None:
        """The tokens of a step are back, while `last_step_id` is the one that was scheduled last."""
        for info in event.added:
            if (live := requests.get(info.request_id)) is not None and info.request_id not in self._live:
                self._start(live, last_step_id + 1)
        if event.num_draft_tokens:
            self._note_accepted(event)
        for finished in event.finished:
            self._end(finished.request_id, last_step_id + 1, aborted=finished.finish_reason in ("abort", "error"))
        index = self.position(event.step_id)
        if index is not None:
            start = event.execute_start if event.execute_start is not None else event.sample_start
            end = event.sample_end if event.sample_end is not None else event.execute_end
            self.marks[index] = self.marks[index]._replace(start=start, end=end, result_time=event.time)

    def _note_accepted(self, event: StepResultEvent) -> None:
        for request_id, num_new in event.num_new_tokens.items():
            row = self._live.get(request_id)
            if row is None or (index := row.index_at(event.step_id)) is None:
                continue
            run = row.runs[index]
            if run.cell == DRAFT and run.start_step == event.step_id:
                row.runs[index] = run._replace(num_tokens=num_new)

    def note_all(self, requests: dict[str, RequestRow], *, last_step_id: int) -> None:
        """What a snapshot said: every request as it is now. Those that are not there ended unseen."""
        for request_id, live in requests.items():
            if not live.is_live:
                self._end(request_id, last_step_id + 1, aborted=False)
                continue
            row = self._live.get(request_id)
            if row is None:
                self._start(live, last_step_id + 1)
            elif (code := _STATE_CODES[live.state]) in (WAITING, PREEMPTED) and row.cell != code:
                row.add(Run(last_step_id + 1, code, 0))
            elif code == IDLE and row.cell in (WAITING, PREEMPTED):  # its admission was not seen
                row.add(Run(last_step_id + 1, IDLE, 0))
        for request_id in [name for name in (*self._live, *self._ending) if name not in requests]:
            self._end(request_id, last_step_id + 1, aborted=False)
            self._close(request_id, last_step_id)

    def _add_row(self, live: RequestRow) -> WaterfallRow:
        self._close(live.request_id, live.last_step_id)  # the name is used again
        self._num_rows += 1
        row = self._live[live.request_id] = WaterfallRow(self._num_rows, live.request_id, arrival_time=live.arrival_time)
        return row

    def _start(self, live: RequestRow, step_id: int) -> None:
        """A request that has no tokens yet, or whose beginning was not seen."""
        self._add_row(live).add(Run(step_id, _STATE_CODES[live.state], 0))

    def _end(self, request_id: str, step_id: int, *, aborted: bool) -> None:
        row = self._live.pop(request_id, None)
        if row is None:
            return
        row.add(Run(step_id, ABORTED if aborted else ENDED, 0))
        self._ending[request_id] = row
        if not row.last_share_step:  # the worker never knew it
            self._close(request_id, step_id)

    def _close(self, request_id: str, step_id: int) -> None:
        """The worker is told in this step, so this is the last one in which it is shown."""
        row = self._ending.pop(request_id, None) or self._live.pop(request_id, None)
        if row is not None:
            row.end_step = max(step_id, row.runs[-1].start_step if row.runs else 0)
            self._ended.append(row)

    def _forget_old_rows(self) -> None:
        ended, first_step = self._ended, self.marks[0].step_id
        while ended and (ended[0].end_step or 0) < first_step:
            ended.popleft()

    def copy(self) -> Waterfall:
        other = Waterfall(max_steps=self.marks.maxlen or 1, max_ended_rows=self._ended.maxlen or 1)
        other.marks = self.marks.copy()
        other._live = {request_id: row.copy() for request_id, row in self._live.items()}
        other._ending = {request_id: row.copy() for request_id, row in self._ending.items()}
        other._ended = self._ended.copy()
        other._num_rows = self._num_rows
        return other


def _samples(share: Share, row: RequestRow | None) -> bool:
    """Whether a share reaches the last token that is known of its request. The row is as it is after the step."""
    return row is None or share.kind == "decode" or share.end >= row.num_tokens


def _number(row: WaterfallRow) -> int:
    return row.number
