"""Screen 2: one step in full, the lanes of the latest steps, and the last hundred or so as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenFrame
from aioengine_tui.model.log import plural
from aioengine_tui.model.state import DashboardState, StepRecord
from aioengine_tui.screens.base import ListView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable, Plain
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.glyphs import KIND_FILLS, KIND_LETTERS
from aioengine_tui.widgets.graph import bar
from aioengine_tui.widgets.lanes import lane_lines, lane_window
from aioengine_tui.widgets.step_rows import (
    KINDS,
    STOP_WORDS,
    StepRow,
    budget_bar,
    kind_tokens,
    kinds_line,
    step_header,
    step_line,
    step_rows,
)
from aioengine_tui.widgets.text import (
    Hot,
    Line,
    Part,
    clean,
    fit,
    fit_line,
    fit_middle,
    line_text,
    number,
    pack,
    rule,
    seconds,
    side_by_side,
    width_of,
)

_LANE_ZOOMS = (1, 2, 3, 6, 12, 24, 48)
"""Steps in the lanes, from near to far."""
_NUM_LANE_LINES = 6
_MIN_TIMELINE = 5  # rows; the lanes are left out where there would be fewer
_WIDE = 150  # cells: from here on the list of steps stands beside the step


class StepView(ListView):
    screen_title: ClassVar[str] = "Step"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("↑↓", "choose step"),
        ("enter", "field by field"),
        ("end", "follow"),
        ("z", "zoom in"),
        ("Z", "out"),
        ("l", "lanes"),
    )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "the step field by field", show=False),
        Binding("l", "lanes", "lanes on or off", show=False),
        Binding("z", "zoom(-1)", "fewer steps in the lanes", show=False),
        Binding("Z", "zoom(1)", "more steps in the lanes", show=False),
        Binding("escape", "last", "follow the latest step", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id, follow_end=True)
        self.with_lanes = True
        self.lane_steps = 6
        self.lanes_first = False  # the lanes in place of the chosen step, for a tour on a small screen
        self._first_step_id: int | None = None
        self._frame_height = 0
        self._for_size = (0, 0)
        self._list_end = 0

    def action_open(self) -> None:
        steps = self.session.state.steps
        if steps:
            self.post_message(OpenFrame(steps[max(0, min(self.scroll_state.cursor, len(steps) - 1))].step_id))

    def action_lanes(self) -> None:
        self.with_lanes = not self.with_lanes
        self.draw()

    def action_zoom(self, direction: int) -> None:
        index = _LANE_ZOOMS.index(self.lane_steps) + direction
        self.lane_steps = _LANE_ZOOMS[max(0, min(len(_LANE_ZOOMS) - 1, index))]
        self.draw()

    def index_at(self, row: int) -> int | None:
        index = super().index_at(row)
        return index if index is not None and row < self._list_end else None

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        steps = list(state.steps)
        if not steps:
            return [[Part("no step yet: the engine is idle, or nothing has arrived", "muted")]]
        self._stay_on_step(steps)
        self.scroll_state.fit(len(steps), 1 << 30)  # the cursor, before the height of the list is known
        if width < _WIDE:
            return self._compose_tall(steps, width, height)
        left = width * 11 // 20
        right = width - left - 2
        chosen = self._compose_step(steps, left, height, list_height=0)
        shares = share_table(steps[self.scroll_state.cursor], left, height - len(chosen))
        return side_by_side([[*chosen, *shares], self._compose_list(steps, right, height, first_row=0)], [left, right], gap=2)[:height]

    def _compose_tall(self, steps: Sequence[StepRecord], width: int, height: int) -> list[Line]:
        if self.lanes_first and self.with_lanes:
            self.scroll_state.fit(len(steps), max(1, height - _NUM_LANE_LINES - 3))
            lines = self._lanes(steps, width)
        else:
            lines = self._compose_step(steps, width, height, list_height=2 + _MIN_TIMELINE)
        return [*lines, *self._compose_list(steps, width, height - len(lines), first_row=len(lines))][:height]

    def _compose_step(self, steps: Sequence[StepRecord], width: int, height: int, *, list_height: int) -> list[Line]:
        """The chosen step, and the lanes if `list_height` rows stay free below."""
        chosen = step_rows(steps)[self.scroll_state.cursor]
        num_lanes = _NUM_LANE_LINES + 1 if self.with_lanes else 0
        share_rows = max(1, min(8, (height - 22) // 2))
        lines = frame_lines(chosen, width, share_rows=share_rows, compact=height < 16 or not list_height)
        # As many lines as the largest step needed so far: the rest of the screen must not jump up and down.
        self._frame_height = max(self._frame_height, len(lines)) if (width, height) == self._for_size else len(lines)
        self._for_size = (width, height)
        lines += [[] for _ in range(self._frame_height - len(lines))]
        if self.with_lanes and height - len(lines) - num_lanes >= list_height:
            lines += self._lanes(steps, width)
        return lines[:height]

    def _compose_list(self, steps: Sequence[StepRecord], width: int, height: int, *, first_row: int) -> list[Line]:
        follows = "following" if self.scroll_state.is_following else "end: follow"
        lines = [rule(f"last {len(steps)} steps", width, follows), step_header(width)]
        self.list_row = first_row + len(lines)
        visible = self.scroll_state.fit(len(steps), max(1, height - len(lines)))
        self._list_end = self.list_row + len(visible)
        rows = step_rows(steps)
        lines += [step_line(rows[index], width, under_cursor=index == self.scroll_state.cursor) for index in visible]
        return lines

    def _lanes(self, steps: Sequence[StepRecord], width: int) -> list[Line]:
        cursor = self.scroll_state.cursor
        shown = steps[max(0, cursor + 1 - self.lane_steps) : cursor + 1]
        window = lane_window(shown, num_steps=self.lane_steps)
        if window is None:
            return [
                rule("lanes", width),
                [Part(fit("they appear with the first result", width), "muted")],
                *([] for _ in range(_NUM_LANE_LINES - 1)),
            ]
        title = f"lanes of {plural(len(shown), 'step')}"
        return [rule(title, width, note="odd steps ░, z Z zooms"), *lane_lines(shown, start=window[0], end=window[1], width=width)]

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


def frame_lines(row: StepRow, width: int, *, share_rows: int = 1, compact: bool = False) -> list[Line]:
    """The step as a frame: budget, kinds, why admission stopped, who came and went, and who got how many tokens."""
    step = row.step
    state = "in flight" if step.in_flight else f"latency {seconds(step.duration)}, {plural(step.num_new_tokens or 0, 'new token')}"
    if step.num_draft_tokens:
        state += f", {step.num_accepted_tokens} of {plural(step.num_draft_tokens, 'draft token')} accepted"
    since = f"{seconds(row.since)} after the step before" if row.since is not None else ""
    label = f"{step.num_tokens:>6}/{step.token_budget} "
    stop = "-" if step.is_cleanup_only else f"{step.admission_stop}: {STOP_WORDS.get(step.admission_stop, '')}"
    lines: list[Line] = [
        rule(f"step {step.step_id}", width, state, note=since),
        [Part("budget ", "muted"), Part(label, "value"), *budget_bar(step, max(6, width - 7 - len(label)))],
        kinds_line(step, width),
        [Part("admission stopped by ", "muted"), Part(stop, "muted" if step.admission_stop == "queue_empty" else "warn")],
    ]
    new = _ids("+ new", step.new_ids, "prefill", width // 2 - 1)
    resumed = _ids("~ resumed", step.resumed_ids, "resumed", width - width // 2)
    preempted = _ids("! preempted", step.preempted_ids, "preempted", width // 2 - 1)
    finished = _ids("x ended, the worker is told" if width >= 90 else "x ended", step.finished_ids, "finished", width - width // 2)
    lines += [_halves(new, resumed, width), _halves(preempted, finished, width)]
    if not compact:
        lines += _share_lines(step, width, share_rows)
    return [fit_line(line, width) for line in lines]


def share_table(step: StepRecord, width: int, height: int) -> list[Line]:
    """A row a request of the step, as many as fit: its tokens, where they stand in the request, and the blocks it got."""
    if height < 3 or not step.shares:
        return []
    lines: list[Line] = [rule(plural(len(step.shares), "request"), width)]
    name_width = max(10, min(28, width - 62))
    head = f"{fit('request', name_width)} {'tokens':>7} {'positions':>15} {'blocks':>7} {'of the step':<{max(11, width - name_width - 33)}}"
    lines.append([Part(fit(head, width), "header")])
    shown = step.shares[: height - 2] if len(step.shares) <= height - 2 else step.shares[: height - 3]
    for share in shown:
        name = Hot(fit_middle(clean(share.request_id), name_width), "text", f"app.open_request({share.request_id!r})")
        positions = f"{share.start}..{share.end - 1}"
        counts = f" {number(share.num_tokens, 6)}{KIND_LETTERS[share.kind]} {fit(positions, 15, right=True)} "
        size = max(4, width - name_width - 34)
        filled = bar([(share.num_tokens / max(1, step.num_tokens), KIND_FILLS[share.kind], share.kind)], width=size, rest=(" ", "text"))
        lines.append([name, Part(f"{counts}{number(len(share.block_ids), 7)} "), *filled])
    if len(shown) < len(step.shares):
        lines.append([Part(f"… {len(step.shares) - len(shown)} more", "muted")])
    return lines


def _ids(label: str, ids: Sequence[str], role: str, width: int) -> Line:
    """How many and who, as many ids as fit whole; a click on one opens its page."""
    line: Line = [Part(f"{label} ", role if ids else "muted"), Part(f"{len(ids)}", "value" if ids else "muted")]
    room = width - width_of(line_text(line)) - 1
    names: list[Line] = [[_request(request_id, role)] for request_id in ids]
    return [*line, Part(" "), *pack(names, room, gap=" ")[0]] if names and room > 0 else line


def _request(request_id: str, role: str) -> Part:
    return Hot(clean(request_id), role, f"app.open_request({request_id!r})")


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
        lines[-1] += [_request(share.request_id, "text"), Part(count, share.kind)]
        used += size
    return lines
