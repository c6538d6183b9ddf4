"""Screen 2: one step in full, the lanes of the latest steps, and the last hundred or so as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine_tui.model.state import DashboardState, StepRecord
from aioengine_tui.screens.base import ListView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable, Plain
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.glyphs import KIND_LETTERS
from aioengine_tui.widgets.lanes import lane_lines, lane_window
from aioengine_tui.widgets.step_rows import KINDS, STOP_WORDS, budget_bar, kind_tokens, kinds_line, step_header, step_line
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_line, rule, seconds, width_of

_LANE_STEPS = 6
_MIN_TIMELINE = 5  # rows; the lanes are left out where there would be fewer


class StepView(ListView):
    screen_title: ClassVar[str] = "Step"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (("↑↓", "choose step"), ("end", "follow"), ("l", "lanes"))

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "lanes", "lanes on or off", show=False),
        Binding("escape", "last", "follow the latest step", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id, follow_end=True)
        self.with_lanes = True
        self._first_step_id: int | None = None
        self._frame_height = self._for_height = 0

    def go_to(self, step_id: int) -> bool:
        """Put the cursor on a step; False if it is not kept in full any more."""
        ids = [step.step_id for step in self.session.state.steps]
        if step_id not in ids:
            return False
        self.scroll_state.fit(len(ids), 1 << 30)
        self.scroll_state.go(ids.index(step_id))
        return True

    def action_lanes(self) -> None:
        self.with_lanes = not self.with_lanes
        self.draw()

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        steps = list(state.steps)
        if not steps:
            return [[Part("no step yet: the engine is idle, or nothing has arrived", "muted")]]
        self._stay_on_step(steps)
        self.scroll_state.fit(len(steps), 1 << 30)  # the cursor, before the height of the list is known
        chosen = steps[self.scroll_state.cursor]
        lines = frame_lines(chosen, width, share_rows=max(1, min(8, (height - 22) // 2)), compact=height < 16)
        # As many lines as the largest step needed so far: the rest of the screen must not jump up and down.
        self._frame_height = max(self._frame_height, len(lines)) if height == self._for_height else len(lines)
        self._for_height = height
        lines += [[] for _ in range(self._frame_height - len(lines))]
        num_lanes = 5
        if self.with_lanes and height - len(lines) - num_lanes - 2 >= _MIN_TIMELINE:
            lines += _lanes(steps, self.scroll_state.cursor, width)
        follows = "following" if self.scroll_state.is_following else "end: follow"
        lines.append(rule(f"last {len(steps)} steps", width, follows))
        lines.append(step_header(width))
        self.list_row = len(lines)
        visible = self.scroll_state.fit(len(steps), max(1, height - len(lines)))
        lines += [step_line(steps[index], width, under_cursor=index == self.scroll_state.cursor) for index in visible]
        return lines[:height]

    def _stay_on_step(self, steps: Sequence[StepRecord]) -> None:
        """The oldest steps leave the list: the cursor stays on its step, not on its row."""
        first = steps[0].step_id
        if self._first_step_id is not None and first > self._first_step_id:
            self.scroll_state.shift(first - self._first_step_id)
        self._first_step_id = first

    def export_table(self, state: DashboardState) -> ExportTable:
        columns = ["step_id", "time", "tokens", "budget", *KINDS, "requests", "new", "resumed", "preempted", "finished"]
        columns += ["allocated", "freed", "evicted", "admission_stop", "duration", "draft tokens", "accepted"]
        rows: list[list[Plain]] = []
        for step in state.steps:
            tokens = kind_tokens(step)
            row: list[Plain] = [step.step_id, step.time, step.num_tokens, step.token_budget, *(tokens[kind] for kind in KINDS)]
            row += [len(step.shares), len(step.new_ids), len(step.resumed_ids), len(step.preempted_ids), len(step.finished_ids)]
            row += [step.num_allocated, step.num_freed, step.num_evicted, step.admission_stop, step.duration]
            row += [step.num_draft_tokens, step.num_accepted_tokens]
            rows.append(row)
        return ExportTable(columns, rows)


def frame_lines(step: StepRecord, width: int, *, share_rows: int = 1, compact: bool = False) -> list[Line]:
    """The step as a frame: budget, kinds, why admission stopped, who came and went, and who got how many tokens."""
    state = "in flight" if step.in_flight else f"{seconds(step.duration)}, {step.num_new_tokens} new tokens"
    if step.num_draft_tokens:
        state += f", {step.num_accepted_tokens} of {step.num_draft_tokens} draft tokens accepted"
    label = f"{step.num_tokens:>6}/{step.token_budget} "
    stop = "-" if step.is_cleanup_only else f"{step.admission_stop}: {STOP_WORDS.get(step.admission_stop, '')}"
    lines: list[Line] = [
        rule(f"step {step.step_id}", width, state),
        [Part("budget ", "muted"), Part(label, "value"), *budget_bar(step, max(6, width - 7 - len(label)))],
        kinds_line(step),
        [Part("admission stopped by ", "muted"), Part(stop, "muted" if step.admission_stop == "queue_empty" else "warn")],
    ]
    new = _ids("+ new", step.new_ids, "prefill")
    resumed = _ids("~ resumed", step.resumed_ids, "resumed")
    preempted = _ids("! preempted", step.preempted_ids, "preempted")
    finished = _ids("x finished, the worker is told", step.finished_ids, "finished")
    lines += [_halves(new, resumed, width), _halves(preempted, finished, width)]
    if not compact:
        lines += _share_lines(step, width, share_rows)
    return [fit_line(line, width) for line in lines]


def _ids(label: str, ids: Sequence[str], role: str) -> Line:
    line: Line = [Part(f"{label} ", role if ids else "muted"), Part(f"{len(ids)} ", "value" if ids else "muted")]
    return [*line, Part(" ".join(clean(request_id) for request_id in ids), role)]


def _halves(left: Line, right: Line, width: int) -> Line:
    half = width // 2
    return [*fit_line(left, half - 1), Part(" "), *fit_line(right, width - half)]


def _share_lines(step: StepRecord, width: int, rows: int) -> list[Line]:
    """Request by request the tokens it got, packed into `rows` lines; says how many did not fit."""
    lines: list[Line] = [[Part("tokens ", "muted")]]
    used = 7
    for index, share in enumerate(step.shares):
        name, count = clean(share.request_id), f" {share.num_tokens}{KIND_LETTERS[share.kind]}  "
        size = width_of(name) + len(count)
        left = len(step.shares) - index
        if used + size > width - (12 if len(lines) == rows else 0) and used > 7:
            if len(lines) == rows:
                lines[-1].append(Part(f"… {left} more", "muted"))
                return lines
            lines.append([Part(" " * 7)])
            used = 7
        lines[-1] += [Part(name, "text"), Part(count, share.kind)]
        used += size
    return lines


def _lanes(steps: Sequence[StepRecord], cursor: int, width: int) -> list[Line]:
    shown = steps[max(0, cursor + 1 - _LANE_STEPS) : cursor + 1]
    window = lane_window(shown, num_steps=_LANE_STEPS)
    if window is None:
        return [[Part(fit("lanes appear with the first result", width), "muted")], *([] for _ in range(4))]
    return lane_lines(shown, start=window[0], end=window[1], width=width)
