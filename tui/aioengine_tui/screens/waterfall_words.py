"""What is under the waterfall's cursor, in words."""

from __future__ import annotations

from aioengine_tui.model.log import plural
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import CELLS, Run, StepMark, WaterfallRow
from aioengine_tui.model.why.words import request_words, step_words
from aioengine_tui.widgets.step_rows import STOP_WORDS
from aioengine_tui.widgets.text import Line, Part, clean, fit_line, wrap, wrap_to
from aioengine_tui.widgets.why_lines import Advisor


def cell_lines(
    state: DashboardState, row: WaterfallRow | None, step_id: int | None, width: int, *, num_lines: int, advisor: Advisor
) -> list[Line]:
    """Of a cell: what the request did, and what shared the step; of no request: the step, and the advice for the engine."""
    first, *others = _paragraphs(state, row, step_id, most=(width - 4) * num_lines, advisor=advisor) or [""]
    lines = wrap_to(clean(first), max(10, width - 2), num_lines)
    for paragraph in others:  # whole ones, as far as there is room
        wrapped = wrap(clean(paragraph), max(10, width - 2))
        if len(lines) + len(wrapped) <= num_lines:
            lines += wrapped
    lines += [""] * (num_lines - len(lines))
    head = "> " if row is not None else "  "
    return [fit_line([Part(head if index == 0 else "  ", "accent"), Part(line)], width) for index, line in enumerate(lines)]


def _paragraphs(state: DashboardState, row: WaterfallRow | None, step_id: int | None, *, most: int, advisor: Advisor) -> list[str]:
    mark = state.waterfall.mark(step_id) if step_id is not None else None
    shared = step_words(state, mark.step_id) if mark is not None else None
    step = [f"step {mark.step_id}: {shared}{_stop_words(mark)}"] if mark is not None else []
    if row is None:
        advice = advisor.line(state, most=most)
        return [*([advice] if advice is not None else []), *step]
    run = row.at(mark.step_id) if mark is not None else None
    said = [f"{clean(row.request_id)} {_run_words(run)}"] if run is not None else [f"{clean(row.request_id)} was not there"]
    is_present = mark is not None and mark.step_id == state.last_step_id
    if is_present and row.end_step is None:
        return ["; ".join([*said, *request_words(state, row.request_id)]), *step]
    return [*said, *step]


def _stop_words(mark: StepMark) -> str:
    return "" if mark.stop == "queue_empty" else f", and then {STOP_WORDS.get(mark.stop, mark.stop)}"


def _run_words(run: Run) -> str:
    match CELLS[run.cell]:
        case "waiting":
            return "waits"
        case "preempted":
            return "waits again: it was preempted and lost its blocks"
        case "idle":
            return "runs, but got no token in this step"
        case "decode":
            return "decodes: 1 token"
        case "draft":
            return f"decodes with guesses: {plural(run.num_tokens, 'token')}" if run.num_tokens else "decodes with guesses"
        case "chunk":
            return f"computes a chunk of its prompt: {plural(run.num_tokens, 'token')}"
        case "prefill":
            return f"computes the rest of its prompt: {plural(run.num_tokens, 'token')}"
        case "resumed":
            return f"computes again what a preemption took: {plural(run.num_tokens, 'token')}"
        case "aborted":
            return "was ended by an abort or an error"
        case _:
            return "has ended"
