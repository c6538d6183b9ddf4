"""A step as a bar and as a row of the timeline."""

from __future__ import annotations

from typing import Final

from aioengine_tui.model.rows import StepRecord
from aioengine_tui.widgets.glyphs import KIND_FILLS, NOTHING
from aioengine_tui.widgets.graph import bar
from aioengine_tui.widgets.text import Line, Part, fit, fit_line, number, seconds

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


def kinds_line(step: StepRecord) -> Line:
    """How many requests and tokens of each kind; doubles as the legend of the bar."""
    tokens = kind_tokens(step)
    line: Line = []
    for kind in KINDS:
        requests = sum(share.kind == kind for share in step.shares)
        line += [
            Part(f"{KIND_FILLS[kind]} ", kind),
            Part(f"{kind} ", "muted"),
            Part(f"{tokens[kind]}", "value" if tokens[kind] else "muted"),
        ]
        line.append(Part(f" in {requests}   " if requests else "   ", "muted"))
    return line


def step_header(width: int) -> Line:
    return [
        Part(
            fit(_columns("step", "tokens", _bar_width(width) * " ", "reqs", "+ r p x", "     time", "admission stopped by"), width),
            "header",
        )
    ]


def _columns(*cells: str) -> str:
    step, tokens, bar_text, reqs, marks, time, stop = cells
    return f"{step:>7} {tokens:>6} {bar_text} {reqs:>4} {marks:<11} {time:>9} {stop}"


def _bar_width(width: int) -> int:
    return max(6, min(60, width - 64))


def step_line(step: StepRecord, width: int, *, under_cursor: bool = False) -> Line:
    """One row of the timeline: id, tokens, bar, requests, who came and went, how long, why admission stopped."""
    duration = "in flight" if step.in_flight else seconds(step.duration)
    line: Line = [Part(number(step.step_id, 7) + " "), Part(number(step.num_tokens, 6) + " ", "value" if step.num_tokens else "muted")]
    line += budget_bar(step, _bar_width(width))
    line.append(Part(f" {number(len(step.shares), 4)} "))
    line += _marks(step)
    line += [Part(f" {fit(duration, 9, right=True)} ", "muted" if step.in_flight else "text")]
    line.append(Part("clean-up only" if step.is_cleanup_only else step.admission_stop, _stop_role(step)))
    if under_cursor:  # only the number, so that the colours of the bar stay readable
        line[0] = Part(line[0].text, "cursor")
    return fit_line(line, width)


def _stop_role(step: StepRecord) -> str:
    return "muted" if step.admission_stop == "queue_empty" else "warn"


def _marks(step: StepRecord) -> Line:
    """New, resumed, preempted and finished as +n ~n !n xn, in eleven cells."""
    marks = [
        ("+", len(step.new_ids), "prefill"),
        ("~", len(step.resumed_ids), "resumed"),
        ("!", len(step.preempted_ids), "preempted"),
        ("x", len(step.finished_ids), "muted"),
    ]
    line = [Part(f"{sign}{number(count, len(str(count)) if count < 1000 else 3)} ", role) for sign, count, role in marks if count]
    return fit_line(line, 11)


MARKS_LEGEND: Line = [
    Part("+", "prefill"), Part("new ", "muted"), Part("~", "resumed"), Part("resumed ", "muted"), Part("!", "preempted"),
    Part("preempted ", "muted"), Part("x", "finished"), Part("finished, the worker is told", "muted"),
]  # fmt: skip
