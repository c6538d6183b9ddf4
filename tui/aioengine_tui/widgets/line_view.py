"""The one widget for live rows: it shows styled lines by Textual's Line API and repaints only those that changed."""

from __future__ import annotations

from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from aioengine_tui.terminals import as_ascii
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.text import Line, fit_line, hot_at, lines_text


class LineView(Widget):
    """Shows lines, each cut or padded to the width of the widget.

    A `DataTable` of 64 live rows holds the event loop for some 95 ms at each refresh; this widget compares plain tuples
    and hands the compositor only the rows that differ.
    """

    DEFAULT_CSS: ClassVar[str] = """
    LineView { height: 1fr; width: 1fr; }
    """

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._palette = palette
        self._lines: list[Line] = []
        self._strips: dict[int, tuple[Line | None, Strip]] = {}  # row -> the line that it was made from, and its strip
        self._base: Style | None = None  # of the widget itself; None: to be asked for
        self._styles: dict[str, Style] = {}  # role -> its style on this widget's ground
        self.num_repainted_lines = 0  # since the widget was made; tests and measurements read it

    @property
    def text(self) -> str:
        """What the widget shows, without styles."""
        return lines_text(self._lines)

    @property
    def lines(self) -> list[Line]:
        return self._lines

    def set_palette(self, palette: Palette) -> None:
        self._palette = palette
        self._forget_styles()
        self.refresh()

    def show(self, lines: list[Line]) -> None:
        """Replace the lines. Only the rows that differ from what was shown last are repainted."""
        before, self._lines = self._lines, lines
        # Rows below the lower edge too: the widget may grow, and Textual keeps what it painted there when it was higher.
        changed = [
            y
            for y in range(max(len(before), len(lines)))
            if (before[y] if y < len(before) else None) != (lines[y] if y < len(lines) else None)
        ]
        if not changed:
            return
        width, height = self.size
        self.num_repainted_lines += sum(y < height for y in changed)
        self.refresh(*(Region(0, y, width, 1) for y in changed))

    def on_resize(self, event: events.Resize) -> None:
        self.refresh()

    def action_at(self, event: events.Click) -> str | None:
        """What a click there does by itself, wherever the cursor is."""
        return hot_at(self._lines[event.y], event.x) if event.y < len(self._lines) else None

    async def on_click(self, event: events.Click) -> None:
        action = self.action_at(event)
        if action is not None:
            event.stop()
            await self.run_action(action)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._forget_styles()

    def _forget_styles(self) -> None:
        self._base = None
        self._styles.clear()
        self._strips.clear()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        line = self._lines[y] if y < len(self._lines) else None
        kept = self._strips.get(y)
        if kept is not None and kept[0] == line and kept[1].cell_length == width:
            return kept[1]
        strip = self._make_strip(line, width)
        self._strips[y] = (line, strip)
        return strip

    def _make_strip(self, line: Line | None, width: int) -> Strip:
        if self._base is None:
            self._base = self.rich_style  # asks all ancestors: too slow for every row
        if line is None:
            return Strip.blank(width, self._base)
        fitted = fit_line(line, width)
        if self._palette.ascii_only:
            return Strip([Segment(as_ascii(text), self._style(role)) for text, role in fitted], width)
        return Strip([Segment(text, self._style(role)) for text, role in fitted], width)

    def _style(self, role: str) -> Style:
        style = self._styles.get(role)
        if style is None:
            assert self._base is not None, "_make_strip has asked for it"
            style = self._styles[role] = self._base + self._palette[role]
        return style
