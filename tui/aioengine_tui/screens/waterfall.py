"""The waterfall: a row a request, a column a step. Continuous batching, queueing with its reasons, and thrash, at a glance."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenFrame, OpenRequest
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import CELLS, COMPUTES, WaterfallRow
from aioengine_tui.screens.base import View
from aioengine_tui.screens.waterfall_words import cell_lines
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable, Plain
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.text import Line, Part, clean, fit_line, fit_middle, line_text, width_of
from aioengine_tui.widgets.waterfall_grid import STEP_ZOOMS, TIME_ZOOMS, Axis, Scale, Window, cell_at, waterfall_legend
from aioengine_tui.widgets.why_lines import Advisor

_MIN_NAME, _MAX_NAME = 8, 28  # cells
_WITH_LEVELS = 22  # rows of a screen that has room for the two lines of levels
_WITH_LEGEND = 18
_WITH_TWO_LINES = 12
_MAX_MS_WITH_STEPS = 50  # a column: longer ones have no room for the steps' beginnings


class WaterfallView(View):
    screen_title: ClassVar[str] = "Waterfall"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("←↑↓→", "cursor"), ("enter", "open"), ("o", "step"), ("z Z", "zoom"), ("m", "steps/ms"), ("end", "follow"), ("d", "ended"),
    )  # fmt: skip

    explained_words: ClassVar[tuple[str, ...]] = (
        "a row and a column", "stop line", "tokens line", "blocks line", "step line", "█ prompt", "▓ chunk", "▒ decode", "2 guesses",
        "▚ resumed", "! preempted", "- no token", "· waits behind", "B S K P F", "x ended",
    )  # fmt: skip

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "columns(-1)", "left", show=False),
        Binding("right", "columns(1)", "right", show=False),
        Binding("shift+left", "columns(-10)", "ten left", show=False),
        Binding("shift+right", "columns(10)", "ten right", show=False),
        Binding("up,k", "rows(-1)", "up", show=False),
        Binding("down,j", "rows(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "oldest", "the oldest step", show=False),
        Binding("end,G,escape", "follow", "follow the latest step", show=False),
        Binding("z", "zoom(1)", "more in a column", show=False),
        Binding("Z", "zoom(-1)", "less in a column", show=False),
        Binding("m", "axis", "steps or milliseconds", show=False),
        Binding("d", "ended", "with or without ended requests", show=False),
        Binding("enter", "open", "the request, or the step above the rows", show=False),
        Binding("o", "open_step", "the step of the column", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.axis: Axis = "steps"
        self.zooms: dict[Axis, int] = {"steps": 0, "time": 3}  # indices
        self.with_ended = True
        self.advisor = Advisor(self.session.hindsight)
        self.column: int | None = None  # under the cursor, numbered absolutely; None: the latest one, which is followed
        self.number: int | None = None  # of the row under the cursor; None: the line of the steps, above the rows
        self._last: int | None = None  # the rightmost column while the cursor is not followed
        self._zoomed_step: int | None = None  # on which the cursor was when it was last moved, whatever a column is since then
        self._top = 0
        self._finds_rows = True  # the rows are to be scrolled to those that have tokens
        self._visible = 1  # rows
        self._rows: list[WaterfallRow] = []
        self._window = Window([], Scale(), last=0, width=1)
        self._oldest = self._latest = 0  # columns
        self._rows_at = 0  # the row of the screen on which the requests begin
        self._name_width = 0

    # ------------------------------------------------------------------ keys
    @property
    def scale(self) -> Scale:
        header = self.session.state.header
        zooms = STEP_ZOOMS if self.axis == "steps" else TIME_ZOOMS
        return Scale(self.axis, zooms[self.zooms[self.axis]], header.perf_counter if header is not None else 0.0)

    def action_columns(self, count: int) -> None:
        self._go_to((self.column if self.column is not None else self._latest) + count)

    def _go_to(self, column: int) -> None:
        column = max(self._oldest, min(column, self._latest))
        self._zoomed_step = None
        if self._last is None:
            self._last = self._window.last
        self.column = column
        if column == self._latest:
            self.column = self._last = None
        elif column > self._last:
            self._last = column
        elif column < self._last - self._window.width + 1:
            self._last = column + self._window.width - 1
        self.draw()

    def action_rows(self, count: int) -> None:
        index = self._row_index()
        if index is None and count > 0:  # from above, to the first one that is still there
            index = next((i for i in range(self._top, len(self._rows)) if self._rows[i].end_step is None), self._top) - 1
        self._choose(max(-1, min((index if index is not None else -1) + count, len(self._rows) - 1)))

    def _choose(self, index: int) -> None:
        """Put the cursor on a row; -1: on the line of the steps."""
        self.number = self._rows[index].number if index >= 0 else None
        if index >= 0:
            self.session.selected = self._rows[index].request_id
            self._top = max(min(self._top, index), index - self._visible + 1)
        self.draw()

    def action_page(self, pages: int) -> None:
        if self._rows:
            index = self._row_index()
            start = index if index is not None else self._top
            self._choose(max(0, min(start + pages * max(1, self._visible - 1), len(self._rows) - 1)))

    def action_oldest(self) -> None:
        self._go_to(self._oldest)

    def action_follow(self) -> None:
        self.column = self._last = self.number = None
        self.draw()

    def action_zoom(self, step: int) -> None:
        zooms = STEP_ZOOMS if self.axis == "steps" else TIME_ZOOMS
        self._change_scale(self.axis, max(0, min(self.zooms[self.axis] + step, len(zooms) - 1)))

    def action_axis(self) -> None:
        axis: Axis = "time" if self.axis == "steps" else "steps"
        self._change_scale(axis, self.zooms[axis])

    def _change_scale(self, axis: Axis, zoom: int) -> None:
        """The cursor stays on its step, and in its place on the screen."""
        step_id = self._zoomed_step if self._zoomed_step is not None else self._step_id()
        mark = self.session.state.waterfall.mark(step_id) if self.column is not None and step_id is not None else None
        from_right = self._window.last - self.column if self.column is not None else 0
        self.axis, self.zooms[axis] = axis, zoom
        self.column = self._last = None
        if mark is not None:
            self._zoomed_step = mark.step_id
            self.column = self.scale.columns_of(mark)[0]
            self._last = self.column + from_right
        self.draw()

    def action_ended(self) -> None:
        self.with_ended = not self.with_ended
        self.draw()

    def action_open(self) -> None:
        row = self._row()
        if row is None:
            self.action_open_step()
        else:
            self.post_message(OpenRequest(row.request_id))

    def action_open_step(self) -> None:
        step_id = self._step_id()
        if step_id is not None:
            self.post_message(OpenFrame(step_id))

    async def on_click(self, event: events.Click) -> None:
        """A click moves the cursor; a second one right after it opens what is under the cursor, as Enter does."""
        column, index = event.x - self._name_width, event.y - self._rows_at + self._top
        if self.action_at(event) is not None or not 1 <= event.y < self._rows_at + self._visible:
            return
        if event.y < self._rows_at:
            self.number = None
        elif index < len(self._rows):
            self._choose(index)
        if column >= 0:
            self._go_to(self._window.first + column)
        if event.chain == 2:
            self.action_open()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self._scroll(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self._scroll(-3)

    def _scroll(self, rows: int) -> None:
        if self._rows:
            index = self._row_index()
            self._choose(max(0, min((index if index is not None else self._top) + rows, len(self._rows) - 1)))

    # ------------------------------------------------------------------ what is under the cursor
    def _row_index(self) -> int | None:
        return next((index for index, row in enumerate(self._rows) if row.number == self.number), None)

    def _row(self) -> WaterfallRow | None:
        index = self._row_index()
        return None if index is None else self._rows[index]

    def _step_id(self) -> int | None:
        column = self.column if self.column is not None else self._latest
        steps = self._window.steps_in(column - self._window.first)
        return steps[-1].step_id if steps else None

    # ------------------------------------------------------------------ drawing
    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        marks = state.waterfall.marks
        if not marks:
            return [[Part("no step has been seen yet: a request's row appears with the first step after it", "muted")]]
        self._place(state, width)
        head = self._head(state, width, with_levels=height >= _WITH_LEVELS)
        num_words = 3 if height >= _WITH_LEGEND else 2 if height >= _WITH_TWO_LINES else 1
        foot = cell_lines(state, self._row(), self._step_id(), width, num_lines=num_words, advisor=self.advisor)
        if height >= _WITH_LEGEND:
            foot += waterfall_legend(width)[: 2 if height >= _WITH_LEVELS + 8 else 1]
        self._rows_at = len(head)
        self._visible = max(1, height - len(head) - len(foot))
        self._scroll_rows()
        head[0] = self._title(state, width)
        lines = [self._row_line(state, row) for row in self._rows[self._top : self._top + self._visible]]
        if not lines:
            lines.append(
                fit_line([Part("no request in these columns" + ("" if self.with_ended else ": d shows ended ones"), "muted")], width)
            )
        lines += [[] for _ in range(self._visible - len(lines))]
        return [*head, *lines, *foot][:height]

    def _head(self, state: DashboardState, width: int, *, with_levels: bool) -> list[Line]:
        """The lines above the rows; the first is the title, which needs to know the rows."""
        window, cursor = self._window, self.column
        at = None if cursor is None else cursor - window.first
        role = "cursor" if self.number is None and cursor is not None else "muted"
        head: list[Line] = [
            [],
            [*self._label(""), *window.axis_line(cursor=at)],
            [*self._label("stop", role), Part(window.letters, "warn")],
        ]
        if self.axis == "time" and self.scale.per_column <= _MAX_MS_WITH_STEPS:
            head.insert(2, [*self._label("step"), *window.steps_line()])
        if with_levels:
            tokens = window.level_line(lambda mark: mark.num_tokens / max(1, mark.token_budget), "prefill")
            blocks = window.level_line(lambda mark: mark.num_used_blocks / max(1, mark.num_total_blocks), "block_used")
            head += [[*self._label("tokens"), *tokens], [*self._label("blocks"), *blocks]]
        return head

    def _place(self, state: DashboardState, width: int) -> None:
        """Which columns and rows there are to see."""
        scale, marks = self.scale, state.waterfall.marks
        self._oldest, self._latest = scale.columns_of(marks[0])[0], scale.columns_of(marks[-1])[1]
        if self.column is not None:
            self.column = max(self._oldest, min(self.column, self._latest))
        last = self._latest if self._last is None else min(self._last, self._latest)
        self._rows = self._rows_in(state, Window(marks, scale, last=last, width=width - _MIN_NAME))
        longest = max((width_of(clean(row.request_id)) for row in self._rows), default=0)
        self._name_width = max(_MIN_NAME, min(longest, _MAX_NAME, width // 5) + 1)
        self._window = Window(marks, scale, last=last, width=width - self._name_width)
        span = self._window.step_range or (0, 0)
        self._rows = [row for row in self._rows if row.end_step is None or row.end_step >= span[0]]
        if self.number is not None and self._row_index() is None:
            self.number = None  # its row has left the picture
            self._finds_rows = True

    def _rows_in(self, state: DashboardState, window: Window) -> list[WaterfallRow]:
        span = window.step_range
        rows = state.waterfall.rows(*span) if span is not None else []
        return rows if self.with_ended else [row for row in rows if row.end_step is None]

    def _scroll_rows(self) -> None:
        """A row that was chosen stays in sight; else those that run at the cursor's step do, with some that ended above them."""
        index = self._row_index()
        if index is not None:
            self._top = max(min(self._top, index), index - self._visible + 1)
        elif self.column is None or self._finds_rows:
            step_id = self._step_id()
            runs = (row.at(step_id) if step_id is not None else None for row in self._rows)
            first = next((i for i, run in enumerate(runs) if run is not None and run.cell in COMPUTES), len(self._rows))
            self._top = first - self._visible // 3
        self._finds_rows = False
        self._top = max(0, min(self._top, len(self._rows) - self._visible))

    def _title(self, state: DashboardState, width: int) -> Line:
        span, scale = self._window.step_range, self.scale
        shown = f"steps {span[0]} to {span[1]}" if span is not None else "no step in these columns"
        above, below = self._top, max(0, len(self._rows) - self._top - self._visible)
        hidden = [f"{count} {where}" for count, where in ((above, "above"), (below, "below")) if count > 0]
        follows = self.column is None
        items = [
            [Part(scale.words(), "value")],
            [Part("following" if follows else "end: follow", "accent" if follows else "muted")],
            [Part(shown, "muted")],
            [Part(f"{len(self._rows)} requests" + (f" ({', '.join(hidden)})" if hidden else ""), "muted")],
            [Part(f"{len(state.waterfall.marks)} steps kept", "muted")],
        ]
        line: Line = []
        for item in items:  # whole ones, as far as there is room
            if width_of(line_text(line)) + 2 + width_of(line_text(item)) <= width:
                line += [*([Part("  ")] if line else []), *item]
        return line

    def _label(self, text: str, role: str = "muted") -> Line:
        return [Part(fit_middle(text, self._name_width - 1), role), Part(" ")]

    def _row_line(self, state: DashboardState, row: WaterfallRow) -> Line:
        line = self._window.line(row)
        live = state.requests.get(row.request_id) if row.end_step is None else None
        role: str = live.state if live is not None else "finished"
        if row.number == self.number:
            role = "cursor"
            column = self.column if self.column is not None else self._latest
            line = cell_at(line, column - self._window.first)
        return [*self._label(clean(row.request_id), role), *line]

    def export_table(self, state: DashboardState) -> ExportTable:
        rows: list[list[Plain]] = []
        for row in self._rows:
            for index, run in enumerate(row.runs):
                end = row.runs[index + 1].start_step - 1 if index + 1 < len(row.runs) else row.end_step
                rows.append([row.request_id, run.start_step, end, CELLS[run.cell], run.num_tokens])
        return ExportTable(["request_id", "first_step", "last_step", "cell", "tokens_a_step"], rows)
