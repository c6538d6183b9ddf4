"""What the smaller screens have in common: a title, lines in the middle, and the keys."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, TypeVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from aioengine_tui.terminals import driver_for_stdout
from aioengine_tui.themes import Palette
from aioengine_tui.theming import set_up_theme
from aioengine_tui.widgets.chrome import keys_line
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import Line, Part, beside

R = TypeVar("R")


class LinesApp(App[R]):
    """A subclass says what `draw` shows. theme: one of `THEME_NAMES`; ascii_only: as in `DashboardApp`."""

    TITLE = "aioengine top"
    CSS_PATH = Path(__file__).with_name("app.tcss")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "quit", "quit", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (("q", "quit"),)

    def __init__(self, *, theme: str = "dark", ascii_only: bool = False) -> None:
        super().__init__(driver_class=driver_for_stdout())
        set_up_theme(self, theme)
        self.palette = Palette(self.current_theme, no_color=self.no_color, ascii_only=ascii_only)

    def compose(self) -> ComposeResult:
        yield LineView(self.palette, id="title")
        yield LineView(self.palette, id="lines")
        yield LineView(self.palette, id="keys")

    def on_mount(self) -> None:
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    @property
    def lines_view(self) -> LineView:
        return self.query_one("#lines", LineView)

    def draw(self) -> None:
        raise NotImplementedError

    def show(self, title: str, right: str, lines: list[Line]) -> None:
        width = self.size.width
        head = beside([Part(f" {title}  ", "title")], [Part(f"{right} ", "muted")], width)
        self.query_one("#title", LineView).show([head])
        self.query_one("#keys", LineView).show([keys_line(self.key_hints, width)])
        self.lines_view.show(lines)

    def action_press(self, key: str) -> None:
        """A key hint was clicked: as if the key had been pressed."""
        self.simulate_key(key)
