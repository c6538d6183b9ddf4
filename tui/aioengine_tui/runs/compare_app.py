"""The screen of a comparison: a page that scrolls."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from aioengine_tui.runs.compare import Axis, Comparison
from aioengine_tui.runs.compare_lines import compare_lines
from aioengine_tui.themes import THEMES, Palette, textual_name
from aioengine_tui.widgets.chrome import keys_line
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import Part, beside

_HINTS = (("s", "by step"), ("t", "by time"), ("↑ ↓", "scroll"), ("q", "quit"))


class CompareApp(App[None]):
    """names: of the two recordings. Nothing moves by itself: both runs are over."""

    TITLE = "aioengine top"
    CSS_PATH = Path(__file__).parents[1] / "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "axis('step')", "by step", show=False),
        Binding("t", "axis('time')", "by time", show=False),
        Binding("up,k", "scroll_by(-1)", "up", show=False),
        Binding("down,j", "scroll_by(1)", "down", show=False),
        Binding("pageup", "scroll_by(-20)", "page up", show=False),
        Binding("pagedown,space", "scroll_by(20)", "page down", show=False),
        Binding("home", "scroll_by(-100000)", "top", show=False),
        Binding("end", "scroll_by(100000)", "end", show=False),
        Binding("q,escape", "quit", "quit", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    def __init__(self, comparison: Comparison, names: tuple[str, str], *, theme: str = "dark") -> None:
        super().__init__()
        self.comparison = comparison
        self.names = names
        self.axis: Axis = "step"
        self.top = 0
        for own in THEMES.values():
            self.register_theme(own)
        self.theme = textual_name("ansi" if self.no_color else theme)
        self.palette = Palette(self.current_theme, no_color=self.no_color)

    def compose(self) -> ComposeResult:
        yield LineView(self.palette, id="title")
        yield LineView(self.palette, id="page")
        yield LineView(self.palette, id="keys")

    def on_mount(self) -> None:
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        width, view = self.size.width, self.query_one("#page", LineView)
        lines = compare_lines(self.comparison, self.names, width=width, axis=self.axis)
        height = view.size.height
        self.top = max(0, min(self.top, len(lines) - height))
        place = f"lines {self.top + 1} to {min(len(lines), self.top + height)} of {len(lines)} "
        title = beside([Part(" aioengine top --compare  ", "title")], [Part(place, "muted")], width)
        self.query_one("#title", LineView).show([title])
        self.query_one("#keys", LineView).show([keys_line(_HINTS, width)])
        view.show(lines[self.top : self.top + height])

    def action_axis(self, axis: Axis) -> None:
        self.axis = axis
        self.draw()

    def action_scroll_by(self, rows: int) -> None:
        self.top += rows
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_scroll_by(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_scroll_by(-3)
