"""Screen 3: a row per request; sort, filter, follow, and Enter for the request's page."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenRequest
from aioengine_tui.model.state import DashboardState, RequestRow
from aioengine_tui.screens.base import FilterView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.request_table import Moment, request_columns, state_text
from aioengine_tui.widgets.table import choose_columns, header_line, row_line, sorted_rows
from aioengine_tui.widgets.text import Line, Part, fit_line

_ARRIVAL = "arrival"
_STATE_ORDER = {"running": 0, "preempted": 1, "waiting": 2, "cleaning_up": 3, "finished": 4}


class BatchView(FilterView):
    screen_title: ClassVar[str] = "Batch"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("enter", "open"), ("/", "filter"), ("s", "sort"), ("r", "reverse"), ("F", "follow"), ("d", "ended"), ("x", "abort"),
    )  # fmt: skip

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "the request's page", show=False),
        Binding("s", "sort", "sort by the next column", show=False),
        Binding("r", "reverse", "reverse the order", show=False),
        Binding("F", "follow", "keep the cursor on its request", show=False),
        Binding("d", "finished", "show or hide ended requests", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.moment = Moment()
        self.columns = request_columns(self.moment)
        self.sort = _ARRIVAL
        self.reverse = False
        self.follows = True
        self.with_finished = True
        self._rows: list[RequestRow] = []

    # ------------------------------------------------------------------ keys
    def action_open(self) -> None:
        if self.session.selected is not None:
            self.post_message(OpenRequest(self.session.selected))

    def action_sort(self) -> None:
        shown = [column.name for column, _ in choose_columns(self.columns, self.size.width)]
        order = [_ARRIVAL, *shown]
        self.sort = order[(order.index(self.sort) + 1) % len(order)] if self.sort in order else _ARRIVAL
        self.draw()

    def action_reverse(self) -> None:
        self.reverse = not self.reverse
        self.draw()

    def action_follow(self) -> None:
        self.follows = not self.follows
        self.draw()

    def action_finished(self) -> None:
        self.with_finished = not self.with_finished
        self.draw()

    def cursor_moved(self) -> None:
        if self._rows:
            self.session.selected = self._rows[min(self.scroll_state.cursor, len(self._rows) - 1)].request_id
        self.draw()

    # ------------------------------------------------------------------ drawing
    def rows(self, state: DashboardState) -> list[RequestRow]:
        """The requests that pass the filter, in the order of the screen."""
        rows = [row for row in state.rows(finished=self.with_finished) if self.matches(row.request_id, state_text(row))]
        column = next((column for column in self.columns if column.name == self.sort), None)
        if column is not None:
            return sorted_rows(rows, column, reverse=self.reverse)
        # By arrival, but who runs comes first: the sort is stable.
        rows.sort(key=lambda row: _STATE_ORDER[row.state])
        return rows[::-1] if self.reverse else rows

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        self.moment.now, self.moment.step_id = state.now, state.last_step_id
        self._rows = rows = self.rows(state)
        self._place_cursor()
        chosen = choose_columns(self.columns, width)
        lines: list[Line] = [self._title(state, width), header_line(chosen, sort=self.sort, reverse=self.reverse)]
        self.list_row = len(lines)
        visible = self.scroll_state.fit(len(rows), height - self.list_row)
        if rows and self.session.selected is None:
            self.session.selected = rows[self.scroll_state.cursor].request_id
        lines += [row_line(chosen, rows[index], under_cursor=index == self.scroll_state.cursor) for index in visible]
        if not rows:
            lines.append([Part("no request matches the filter" if self.filter_text else "no requests", "muted")])
        return lines

    def _place_cursor(self) -> None:
        """Follow: the cursor goes with its request, wherever the sort moves it. Else it stays on its row."""
        if not self._rows:
            return
        if self.follows and self.session.selected is not None:
            for index, row in enumerate(self._rows):
                if row.request_id == self.session.selected:
                    self.scroll_state.cursor = index
                    return
        self.scroll_state.cursor = min(self.scroll_state.cursor, len(self._rows) - 1)
        self.session.selected = self._rows[self.scroll_state.cursor].request_id

    def _title(self, state: DashboardState, width: int) -> Line:
        live = sum(row.is_live for row in state.requests.values())
        line: Line = [Part(f"{len(self._rows)} shown, {live} live", "value"), Part(f"  sort {self.sort}", "muted")]
        line.append(Part(" reversed" if self.reverse else "", "muted"))
        line.append(Part("  follow" if self.follows else "  no follow", "muted"))
        if self.filter_text:
            line += [Part("   filter ", "muted"), Part(self.filter_text, "accent"), Part(" (esc clears)", "muted")]
        else:
            line += [
                Part("  ░", "prefix"), Part(" cached ", "muted"), Part("█", "prefill"), Part(" computed ", "muted"),
                Part("-", "waiting"), Part(" to do ", "muted"), Part("▒", "decode"), Part(" output", "muted"),
            ]  # fmt: skip
        return fit_line(line, width)

    def export_table(self, state: DashboardState) -> ExportTable:
        self.moment.now, self.moment.step_id = state.now, state.last_step_id
        return ExportTable(
            [column.name for column in self.columns], [[column.plain(row) for column in self.columns] for row in self.rows(state)]
        )
