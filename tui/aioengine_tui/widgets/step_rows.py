"""A step as a bar and as a row of the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from aioengine_tui.model.rows import StepRecord
from aioengine_tui.widgets.glyphs import KIND_FILLS, NOTHING
from aioengine_tui.widgets.graph import bar
from aioengine_tui.widgets.table import Column, choose_columns, header_line, row_line
from aioengine_tui.widgets.text import Line, Part, fit, fit_line, number, pack, seconds, width_of

KINDS: Final = ("prefill", "chunk", "decode", "resumed")

STOP_WORDS: dict[str, str] = {
    "queue_empty": "nobody is waiting",
    "budget": "the token budget is used up",
    "max_num_seqs": "as many requests run as are allowed",
    "no_blocks": "too few free KV blocks",
    "preempted": "this step had to preempt",
    "in_flight": "the next one's last token is still in flight",
}
"""Why a step admitted no further request, in words."""


def kind_tokens(step: StepRecord) -> dict[str, int]:
    """Tokens of the step by kind; kinds without tokens are 0."""
    tokens = dict.fromkeys(KINDS, 0)
    for share in step.shares:
        tokens[share.kind] += share.num_tokens
    return tokens


def budget_bar(step: StepRecord, width: int) -> Line:
    """The token budget as a bar of `width` cells, filled by kind; what is left is dots."""
    budget = max(step.token_budget, step.num_tokens, 1)
    tokens = kind_tokens(step)
    return bar([(tokens[kind] / budget, KIND_FILLS[kind], kind) for kind in KINDS], width=width, rest=(NOTHING, "budget_left"))


def kinds_line(step: StepRecord, width: int) -> Line:
    """How many requests and tokens of each kind; doubles as the legend of the bar."""
    tokens = kind_tokens(step)
    items: list[Line] = []
    for kind in KINDS:
        requests = sum(share.kind == kind for share in step.shares)
        item = [
            Part(f"{KIND_FILLS[kind]} ", kind),
            Part(f"{kind} ", "muted"),
            Part(f"{tokens[kind]}", "value" if tokens[kind] else "muted"),
        ]
        items.append([*item, Part(f" in {requests}", "muted")] if requests else item)
    return pack(items, width, gap="   ")[0]


class StepRow(NamedTuple):
    """A step as a row of a list; `since` is the time since the step before it was scheduled, None if that is not kept."""

    step: StepRecord
    since: float | None


def step_rows(steps: Sequence[StepRecord]) -> list[StepRow]:
    """The steps as rows, each with the time since the one before."""
    rows: list[StepRow] = []
    last: StepRecord | None = None
    for step in steps:
        rows.append(StepRow(step, step.time - last.time if last is not None and last.step_id == step.step_id - 1 else None))
        last = step
    return rows


def _mark(name: str, sign: str, ids: Callable[[StepRecord], Sequence[str]], role: str, importance: int) -> Column[StepRow]:
    """How many requests; no request is a dot."""

    def cell(row: StepRow, size: int) -> Line:
        count = len(ids(row.step))
        return [Part(number(count, size), role) if count else Part(fit(NOTHING, size, right=True), "muted")]

    return Column(name, sign + name, 4, cell, lambda row: len(ids(row.step)), importance=importance)


def _tokens_cell(count: int, size: int) -> Line:
    return [Part(number(count, size), "value" if count else "muted")]


def _time_cell(value: float | None, size: int, *, unknown: str) -> Line:
    return [Part(fit(unknown if value is None else seconds(value), size, right=True), "muted" if value is None else "text")]


def _stop_cell(row: StepRow, size: int) -> Line:
    stop = row.step.admission_stop
    if row.step.is_cleanup_only:
        return [Part(fit("clean-up only", size), "muted")]
    words = f"{stop}: {STOP_WORDS.get(stop, '')}"
    return [Part(fit(words if width_of(words) <= size else stop, size), "muted" if stop == "queue_empty" else "warn")]


def _column(
    name: str, width: int, value: Callable[[StepRecord], int | float | None], cell: Callable[[StepRow, int], Line], importance: int
) -> Column[StepRow]:
    return Column(name, name, width, cell, lambda row: value(row.step), importance=importance)


STEP_COLUMNS: Final[tuple[Column[StepRow], ...]] = (
    _column("step", 7, lambda step: step.step_id, lambda row, size: [Part(number(row.step.step_id, size))], 100),
    _column("tokens", 6, lambda step: step.num_tokens, lambda row, size: _tokens_cell(row.step.num_tokens, size), 99),
    Column("budget", "budget", 6, lambda row, size: budget_bar(row.step, size), lambda row: row.step.num_tokens,
           importance=90, right=False, max_width=60),
    _column("reqs", 4, lambda step: len(step.shares), lambda row, size: [Part(number(len(row.step.shares), size))], 95),
    _mark("new", "+", lambda step: step.new_ids, "prefill", 80),
    _mark("res", "~", lambda step: step.resumed_ids, "resumed", 81),
    _mark("pre", "!", lambda step: step.preempted_ids, "preempted", 82),
    _mark("end", "x", lambda step: step.finished_ids, "muted", 79),
    _column("latency", 9, lambda step: step.duration, lambda row, size: _time_cell(row.step.duration, size, unknown="in flight"), 85),
    Column("since", "since", 7, lambda row, size: _time_cell(row.since, size, unknown=NOTHING), lambda row: row.since, importance=70),
    Column("stop", "stopped by", 12, _stop_cell, lambda row: row.step.admission_stop, importance=84, right=False, max_width=62),
)  # fmt: skip
"""budget: the step's tokens as a share of max_num_batched_tokens. latency: from schedule() to its tokens; with two steps in
flight it is longer than a step takes of the engine's time. since: the time since the step before was scheduled."""


def step_header(width: int) -> Line:
    return fit_line(header_line(choose_columns(STEP_COLUMNS, width), can_sort=False), width)


def step_line(row: StepRow, width: int, *, under_cursor: bool = False) -> Line:
    """One row of the timeline: id, tokens, bar, requests, who came and went, how long, why admission stopped."""
    line = row_line(choose_columns(STEP_COLUMNS, width), row, under_cursor=False)
    if under_cursor:  # only the number, so that the colours of the bar stay readable
        line[0] = Part(line[0].text, "cursor")
    return fit_line(line, width)


MARKS_LEGEND: Line = [
    Part("+new", "prefill"), Part(" first scheduled  ", "muted"), Part("~res", "resumed"), Part("umed  ", "muted"),
    Part("!pre", "preempted"), Part("empted  ", "muted"), Part("xend", "finished"), Part(" ended, the worker is told", "muted"),
]  # fmt: skip
