"""Screen 5: what happened, in words."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenRequest
from aioengine_tui.model.state import DashboardState, LogBook, LogLine
from aioengine_tui.screens.base import FilterView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.text import Hot, Line, Part, clean, fit, fit_line, fit_middle, line_text, number, pack, width_of, wrap

_WIDE = 110

# Letter and role of each kind of line.
_LOOKS: dict[str, tuple[str, str]] = {
    "arrived": (">", "text"),
    "admitted": ("+", "prefill"),
    "resumed": ("~", "resumed"),
    "preempted": ("!", "preempted"),
    "finished": ("=", "good"),
    "aborted": ("X", "aborted"),
    "told": ("x", "muted"),
    "cleaned_up": ("c", "muted"),
    "freed": ("-", "muted"),
    "evicted": ("e", "warn"),
    "engine": ("*", "accent"),
    "stream": ("?", "bad"),
}


class LogView(FilterView):
    screen_title: ClassVar[str] = "Log"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (("/", "filter"), ("end", "follow"), ("enter", "open request"), ("e", "export"))

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "the request's page", show=False)]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id, follow_end=True)
        self._shown: list[LogLine] = []
        # What _shown was made from.
        self._log: LogBook | None = None
        self._shown_filter = ""
        self._num_seen = 0
        self._row_entries: list[int] = []  # the entry on each row below the title

    def open_at_cursor(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        if self._shown:
            request_id = self._shown[self.scroll_state.cursor].request_id
            if request_id is not None:
                self.post_message(OpenRequest(request_id))

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        self._update_shown(state)
        self.list_row = 1
        start = state.header.perf_counter if state.header is not None else 0.0
        rows = self._visible_rows(width, height - 1, start)
        self._row_entries = [index for index, _ in rows]
        cursor = None if self.scroll_state.is_following else self.scroll_state.cursor
        lines = [[Part(text, "cursor") for text, _ in line] if index == cursor else line for index, line in rows]
        return [self._title(state, width), *lines]

    def _visible_rows(self, width: int, height: int, start: float) -> list[tuple[int, Line]]:
        """(entry, line) of each row: an entry takes as many rows as its words need, and the cursor's is seen whole."""
        scroll, count = self.scroll_state, len(self._shown)
        scroll.fit(count, height)
        if not count:
            return []
        blocks = {scroll.cursor: self._block(self._shown[scroll.cursor], start, width)}
        used, top = len(blocks[scroll.cursor]), scroll.cursor
        while top > scroll.top:  # upwards from the cursor, as far as there is room
            block = self._block(self._shown[top - 1], start, width)
            if used + len(block) > height:
                break
            top -= 1
            blocks[top] = block
            used += len(block)
        scroll.top = top
        rows: list[tuple[int, Line]] = []
        for index in range(top, count):
            if len(rows) >= height:
                break
            block = blocks[index] if index in blocks else self._block(self._shown[index], start, width)
            rows += [(index, line) for line in block]
        return rows[:height]

    def index_at(self, row: int) -> int | None:
        return self._row_entries[row - self.list_row] if 0 <= row - self.list_row < len(self._row_entries) else None

    def _title(self, state: DashboardState, width: int) -> Line:
        items: list[Line] = [[Part(f"{len(self._shown)} lines", "value"), Part(f" of {state.log.num_lines}", "muted")]]
        items.append([Part("following", "muted") if self.scroll_state.is_following else Hot("end: follow", "muted", "last")])
        if self.filter_text:
            items.append([Part("filter ", "muted"), Part(self.filter_text, "accent"), Hot(" (esc clears)", "muted", "clear_filter")])
        else:
            items.append([Hot("filter by kind, request or word with /", "muted", "filter")])
        return pack(items, width, gap="   ")[0]

    def _update_shown(self, state: DashboardState) -> None:
        """Take in the lines that are new, and let go of those that the log let go of."""
        log = state.log
        if log is not self._log or self.filter_text != self._shown_filter:
            self._log, self._shown_filter, self._num_seen = log, self.filter_text, 0
            self._shown.clear()
        new = log.since(self._num_seen)
        self._shown += [line for line in new if self.matches(line.kind, line.request_id or "", line.text)]
        self._num_seen = log.num_lines
        first_kept = log.num_lines - len(log.lines) + 1
        num_gone = next((index for index, line in enumerate(self._shown) if line.number >= first_kept), len(self._shown))
        if num_gone:
            del self._shown[:num_gone]
            self.scroll_state.shift(num_gone)  # the cursor stays on its line

    def _block(self, line: LogLine, start: float, width: int) -> list[Line]:
        """The line; its words go on below where they need to."""
        glyph, role = _LOOKS.get(line.kind, ("?", "text"))
        step = number(line.step_id, 6) if line.step_id is not None else " " * 6
        kind = f"{glyph} {fit(line.kind, 10)} " if width >= _WIDE else f"{glyph} "
        size = 16 if width >= _WIDE else 8
        head: Line = [
            Part(f"{line.time - start:7.2f}s ", "muted"), Part(f"{step} ", "muted"), Part(kind, role),
            Part(fit_middle(clean(line.request_id or ""), size) + " ", "accent"),
        ]  # fmt: skip
        indent = width_of(line_text(head))
        first, *others = wrap(clean(line.text), width - indent)
        return [fit_line([*head, Part(first)], width), *(fit_line([Part(" " * indent), Part(text)], width) for text in others)]

    def export_table(self, state: DashboardState) -> ExportTable:
        self._update_shown(state)
        return ExportTable(
            ["number", "time", "step_id", "kind", "request_id", "text"],
            [[line.number, line.time, line.step_id, line.kind, line.request_id, line.text] for line in self._shown],
        )
