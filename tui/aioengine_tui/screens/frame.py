"""The frame inspector: one step's `SchedulerOutput` field by field, and beside it what the worker makes of it."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.explanations import explain
from aioengine_tui.model.state import DashboardState, StepRecord
from aioengine_tui.screens.base import View
from aioengine_tui.screens.frame_fields import NAME_WIDTH, FrameField, sent_fields, worker_fields
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.text import Line, Part, fit_line, rule, side_by_side, wrap_line

_WIDE = 110
_NUM_SHOWN = 6  # lines of a field that is not under the cursor


class FrameView(View):
    screen_title: ClassVar[str] = "Frame"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("←→", "step"), ("↑↓", "field"), ("tab", "other half"), ("?", "what is this"), ("end", "latest"), ("esc", "back"),
    )  # fmt: skip

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "step(-1)", "the step before", show=False),
        Binding("right,l", "step(1)", "the next step", show=False),
        Binding("up,k", "field(-1)", "up", show=False),
        Binding("down,j", "field(1)", "down", show=False),
        Binding("tab,shift+tab", "half", "what was sent, what the worker does", show=False),
        Binding("pageup", "scroll(-1)", "scroll back in a long field", show=False),
        Binding("pagedown", "scroll(1)", "scroll on in a long field", show=False),
        Binding("home", "field(-1000)", "first field", show=False),
        Binding("end,G", "follow", "the latest step", show=False),
        Binding("question_mark,w", "words", "explain the field under the cursor, or not", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.step_id: int | None = None  # None: the latest
        self.with_words = True
        self.on_worker = False  # the cursor is in the worker's half
        self._cursors = [0, 0]  # a field of each half
        self._offset = 0  # lines of the field under the cursor that were scrolled away
        self._halves: tuple[list[FrameField], list[FrameField]] = ([], [])
        self._hits: dict[tuple[int, int], int] = {}  # (half, row of the screen) -> field
        self._split = 0
        self._wanted: str | None = None  # a field that the cursor is to go to

    def open(self, step_id: int | None) -> None:
        self.step_id = step_id
        self._offset = 0

    def point_at(self, label: str) -> None:
        """Put the cursor on a field, in whichever half it is, as soon as there is a step that has it."""
        self._wanted = label

    def _find_wanted(self) -> None:
        for half, fields in enumerate(self._halves):
            for index, field in enumerate(fields):
                if field.label == self._wanted:
                    self.on_worker, self._cursors[half], self._offset = bool(half), index, 0
                    self._wanted = None
                    return

    # ------------------------------------------------------------------ keys
    def action_step(self, count: int) -> None:
        steps = self.session.state.steps
        if not steps:
            return
        here = self.step_id if self.step_id is not None else steps[-1].step_id
        near = [step.step_id for step in steps if (step.step_id - here) * count > 0]
        if near:
            self.open(min(near, key=lambda step_id: abs(step_id - here)))
        self.draw()

    def action_follow(self) -> None:
        self.open(None)
        self.draw()

    def action_field(self, count: int) -> None:
        half = int(self.on_worker)
        self._cursors[half] = max(0, min(self._cursors[half] + count, len(self._halves[half]) - 1))
        self._offset = 0
        self.draw()

    def action_half(self) -> None:
        self.on_worker = not self.on_worker
        self._offset = 0
        self.draw()

    def action_scroll(self, pages: int) -> None:
        self._offset = max(0, self._offset + pages * max(1, self.size.height // 2))
        self.draw()

    def action_words(self) -> None:
        self.with_words = not self.with_words
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_field(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_field(-1)

    async def on_click(self, event: events.Click) -> None:
        await super().on_click(event)
        half = int(event.x >= self._split) if self._split else int(self.on_worker)
        field = self._hits.get((half, event.y))
        if field is not None:
            self.on_worker, self._cursors[half], self._offset = bool(half), field, 0
            self.draw()

    # ------------------------------------------------------------------ drawing
    def chosen(self, state: DashboardState) -> StepRecord | None:
        """The step that is shown; None if there is none, or it is no longer kept."""
        return state.current if self.step_id is None else state.step(self.step_id)

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        step = self.chosen(state)
        if step is None:
            text = (
                "no step yet: nothing has been scheduled" if self.step_id is None else f"step {self.step_id} is no longer kept; end: latest"
            )
            return [[Part(text, "muted")]]
        sent, done = sent_fields(step, state), worker_fields(step, state)
        self._halves = (sent, done)
        if self._wanted is not None:
            self._find_wanted()
        self._cursors = [max(0, min(c, len(half) - 1)) for c, half in zip(self._cursors, self._halves, strict=True)]
        follows = "the latest step" if self.step_id is None else "end: latest"
        head = rule(f"step {step.step_id}, field by field", width, f"{'in flight, ' if step.in_flight else ''}{follows}")
        words = self._words(width) if self.with_words and height >= 12 else []
        rows = max(1, height - 1 - len(words))
        self._hits = {}
        if width >= _WIDE:
            left = (width - 3) // 2
            right = width - left - 3
            self._split = left + 2
            body = side_by_side([self._column(0, left, rows), self._column(1, right, rows)], [left, right], gap=3)
        else:
            self._split = 0
            body = self._column(int(self.on_worker), width, rows)
        body += [[] for _ in range(rows - len(body))]
        return [fit_line(line, width) for line in (head, *body[:rows], *words)]

    def _words(self, width: int) -> list[Line]:
        """What the field under the cursor is."""
        half = self._halves[int(self.on_worker)]
        field = half[self._cursors[int(self.on_worker)]]
        wrapped = textwrap.wrap(explain(field.label) or "", max(20, width - 2))[:3]
        lines: list[Line] = [rule(field.label, width, title_role="accent")]
        lines += [[Part(f" {text}", "text")] for text in wrapped]
        return lines + [[] for _ in range(3 + (width < 80) - len(wrapped))]

    def _column(self, half: int, width: int, rows: int) -> list[Line]:
        """The fields of one half, so that the one under the cursor can be seen, all of it if there is room."""
        title = "what the scheduler sends: SchedulerOutput" if half == 0 else "what the worker does with it"
        other = "" if self._split else "tab: the worker's half" if half == 0 else "tab: what was sent"
        if half == 1 and len(self.session.state.groups) > 1:
            other = "  ".join(filter(None, ("tables of KV-cache group 0", other)))
        is_here = self.on_worker == bool(half)
        lines: list[Line] = []
        owners: list[int] = []  # of each line, its field
        first = last = 0
        for index, field in enumerate(self._halves[half]):
            is_under = is_here and index == self._cursors[half]
            details = [[Part("  "), *part] for line in field.details for part in wrap_line(line, width - 2, indent=NAME_WIDTH + 1)]
            if is_under:
                first = len(lines)
                self._offset = max(0, min(self._offset, len(details) - 1))
                details = details[self._offset :]
            elif len(details) > _NUM_SHOWN:
                details = [*details[: _NUM_SHOWN - 1], [Part(f"… {len(details) - _NUM_SHOWN + 1} more", "muted")]]
            role = "cursor" if is_under else "key"
            lines.append([Part(field.label, role), Part(" "), *field.summary])
            lines += details
            owners += [index] * (1 + len(details))
            last = len(lines) if is_under else last
        rows -= 1
        # All of the field under the cursor, or its beginning; the last row may have to say how much more there is.
        top = min(first, max(0, last - rows + 1), max(0, len(lines) - rows)) if is_here else 0
        for y, field_index in enumerate(owners[top : top + rows]):
            self._hits[half, y + 2] = field_index
        shown = lines[top : top + rows]
        if top + rows < len(lines) and shown:
            shown[-1] = [Part(f"… {len(lines) - top - rows + 1} more lines", "muted")]
        return [rule(title, width, other, title_role="title" if is_here else "muted"), *(fit_line(line, width) for line in shown)]

    def export_table(self, state: DashboardState) -> ExportTable | None:
        step = self.chosen(state)
        if step is None:
            return None
        columns = [
            "request_id",
            "kind",
            "num_scheduled_tokens",
            "start",
            "num_output_tokens",
            "new_block_ids",
            "replaces_table",
            "block_table",
        ]
        return ExportTable(
            columns,
            [
                [
                    share.request_id, share.kind, share.num_tokens, share.start, share.num_output_tokens,
                    " ".join(map(str, share.new_block_ids)), share.replaces_table, " ".join(map(str, share.block_ids)),
                ]
                for share in step.shares
            ],
        )  # fmt: skip
