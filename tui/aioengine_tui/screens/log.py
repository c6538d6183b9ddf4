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
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_line, fit_middle

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

    def action_open(self) -> None:
        if self._shown:
            request_id = self._shown[self.scroll_state.cursor].request_id
            if request_id is not None:
                self.post_message(OpenRequest(request_id))

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        self._update_shown(state)
        follows = "following" if self.scroll_state.is_following else "end: follow"
        title: Line = [Part(f"{len(self._shown)} lines", "value"), Part(f" of {state.log.num_lines}   {follows}", "muted")]
        if self.filter_text:
            title += [Part("   filter ", "muted"), Part(self.filter_text, "accent"), Part(" (esc clears)", "muted")]
        else:
            title.append(Part("   filter by kind, request or word with /", "muted"))
        self.list_row = 1
        visible = self.scroll_state.fit(len(self._shown), height - 1)
        start = state.header.perf_counter if state.header is not None else 0.0
        rows = [self._row(self._shown[index], start, width, index == self.scroll_state.cursor) for index in visible]
        return [fit_line(title, width), *rows]

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

    def _row(self, line: LogLine, start: float, width: int, under_cursor: bool) -> Line:
        glyph, role = _LOOKS.get(line.kind, ("?", "text"))
        step = f"{line.step_id}" if line.step_id is not None else ""
        kind = f"{glyph} {fit(line.kind, 10)} " if width >= _WIDE else f"{glyph} "
        size = 16 if width >= _WIDE else 8
        parts: Line = [
            Part(f"{line.time - start:7.2f}s ", "muted"), Part(f"{step:>6} ", "muted"), Part(kind, role),
            Part(fit_middle(clean(line.request_id or ""), size) + " ", "accent"), Part(clean(line.text)),
        ]  # fmt: skip
        fitted = fit_line(parts, width)
        return [Part(text, "cursor") for text, _ in fitted] if under_cursor and not self.scroll_state.is_following else fitted

    def export_table(self, state: DashboardState) -> ExportTable:
        self._update_shown(state)
        return ExportTable(
            ["number", "time", "step_id", "kind", "request_id", "text"],
            [[line.number, line.time, line.step_id, line.kind, line.request_id, line.text] for line in self._shown],
        )
