"""Screen 3: a row per request; sort, filter, follow, and Enter for the request's page."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenRequest, SortWanted
from aioengine_tui.model.state import DashboardState, RequestRow
from aioengine_tui.screens.base import FilterView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.request_table import Moment, request_columns, state_text
from aioengine_tui.widgets.table import choose_columns, header_line, row_line, sorted_rows
from aioengine_tui.widgets.text import Hot, Line, Part, pack

_ARRIVAL = "arrival"
_STATE_ORDER = {"running": 0, "preempted": 1, "waiting": 2, "cleaning_up": 3, "finished": 4}


class BatchView(FilterView):
    screen_title: ClassVar[str] = "Batch"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("enter", "open"), ("/", "filter"), ("←→", "sort"), ("r", "reverse"), ("d", "ended"), ("F", "follow"), ("x", "abort"),
    )  # fmt: skip

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "the request's page", show=False),
        Binding("right,greater_than_sign", "sort_next(1)", "sort by the next column", show=False),
        Binding("left,less_than_sign", "sort_next(-1)", "sort by the previous column", show=False),
        Binding("s", "pick_sort", "sort by the column of that name", show=False),
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
        self._keeps_ended = False  # the user chose a request that had ended: the cursor may stay on it
        self.with_finished = True
        self._rows: list[RequestRow] = []

    # ------------------------------------------------------------------ keys
    def action_open(self) -> None:
        if self.session.selected is not None:
            self.post_message(OpenRequest(self.session.selected))

    def action_sort_by(self, name: str) -> None:
        """Numbers begin with the largest, words and arrival with the first; the same column again turns the order round."""
        if name == self.sort:
            self.reverse = not self.reverse
        else:
            column = next((column for column in self.columns if column.name == name), None)
            self.sort, self.reverse = name, column is not None and column.right
        self.draw()

    def action_sort_next(self, step: int) -> None:
        order = self.sort_names
        index = order.index(self.sort) if self.sort in order else 0
        self.action_sort_by(order[(index + step) % len(order)])

    def action_pick_sort(self) -> None:
        self.post_message(SortWanted(self.sort_names))

    @property
    def sort_names(self) -> list[str]:
        """What the rows can be sorted by here: arrival, and the columns that there is room for."""
        return [_ARRIVAL, *(column.name for column, _ in choose_columns(self.columns, self.size.width))]

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
            row = self._rows[min(self.scroll_state.cursor, len(self._rows) - 1)]
            self.session.selected, self._keeps_ended = row.request_id, not row.is_live
        self.draw()

    def open_at_cursor(self) -> None:
        self.action_open()

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
        lines += [row_line(chosen, rows[index], under_cursor=index == self.scroll_state.cursor) for index in visible]
        if not rows:
            lines.append([Part("no request matches the filter" if self.filter_text else "no requests", "muted")])
        return lines

    def _place_cursor(self) -> None:
        """Follow: the cursor goes with its request, wherever the sort moves it. Else it stays on its row.

        When the request ends, the cursor stays where it was, among those that live: it does not run after it to the ended
        ones, unless it was put on an ended one.
        """
        rows = self._rows
        if not rows:
            return
        if self.follows and self.session.selected is not None:
            for index, row in enumerate(rows):
                if row.request_id == self.session.selected and (row.is_live or self._keeps_ended):
                    self.scroll_state.cursor = index
                    return
        num_live = sum(row.is_live for row in rows) if self.sort == _ARRIVAL and not self._keeps_ended else 0
        self.scroll_state.cursor = min(self.scroll_state.cursor, (num_live or len(rows)) - 1)
        self.session.selected = rows[self.scroll_state.cursor].request_id

    def _title(self, state: DashboardState, width: int) -> Line:
        live = sum(row.is_live for row in state.requests.values())
        items: list[Line] = [[Part(f"{live} live", "value")]]
        items.append([Hot(f"{len(self._rows) - sum(row.is_live for row in self._rows)} ended" if self.with_finished else "ended hidden",
                          "muted", "finished")])  # fmt: skip
        direction = "" if self.sort == _ARRIVAL and not self.reverse else ", largest first" if self.reverse else ", smallest first"
        items.append([Hot(f"by {self.sort}{direction}", "muted", "reverse")])
        items.append([Hot("follow" if self.follows else "no follow", "muted", "follow")])
        if self.filter_text:
            items.append([Part("filter ", "muted"), Part(self.filter_text, "accent"), Hot(" (esc clears)", "muted", "clear_filter")])
        else:
            items.append([
                Part("░", "prefix"), Part(" cached ", "muted"), Part("█", "prefill"), Part(" computed ", "muted"),
                Part("-", "waiting"), Part(" to do ", "muted"), Part("▒", "decode"), Part(" output", "muted"),
            ])  # fmt: skip
        return pack(items, width)[0]

    def export_table(self, state: DashboardState) -> ExportTable:
        self.moment.now, self.moment.step_id = state.now, state.last_step_id
        return ExportTable(
            [column.name for column in self.columns], [[column.plain(row) for column in self.columns] for row in self.rows(state)]
        )
