"""The screen of a comparison: a page that scrolls."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.lines_app import LinesApp
from aioengine_tui.runs.compare import Axis, Comparison
from aioengine_tui.runs.compare_lines import compare_lines


class CompareApp(LinesApp[None]):
    """names: of the two recordings. Nothing moves by itself: both runs are over."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "axis('step')", "by step", show=False),
        Binding("t", "axis('time')", "by time", show=False),
        Binding("up,k", "scroll_by(-1)", "up", show=False),
        Binding("down,j", "scroll_by(1)", "down", show=False),
        Binding("pageup", "scroll_by(-20)", "page up", show=False),
        Binding("pagedown,space", "scroll_by(20)", "page down", show=False),
        Binding("home", "scroll_by(-100000)", "top", show=False),
        Binding("end", "scroll_by(100000)", "end", show=False),
    ]
    key_hints = (("s", "by step"), ("t", "by time"), ("↑ ↓", "scroll"), ("q", "quit"))

    def __init__(self, comparison: Comparison, names: tuple[str, str], *, theme: str = "dark", ascii_only: bool = False) -> None:
        super().__init__(theme=theme, ascii_only=ascii_only)
        self.comparison = comparison
        self.names = names
        self.axis: Axis = "step"
        self.top = 0

    def draw(self) -> None:
        lines = compare_lines(self.comparison, self.names, width=self.size.width, axis=self.axis)
        height = self.lines_view.size.height
        self.top = max(0, min(self.top, len(lines) - height))
        place = f"lines {self.top + 1} to {min(len(lines), self.top + height)} of {len(lines)}"
        self.show("aioengine top --compare", place, lines[self.top : self.top + height])

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
