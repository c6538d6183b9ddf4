"""What all screens have in common."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.messages import FilterWanted
from aioengine_tui.model.state import DashboardState
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.scroll import ScrollState
from aioengine_tui.widgets.text import Line, Part


class View(LineView, can_focus=True):
    """One screen: `compose_lines` says what it shows; `draw` shows it.

    Nothing is drawn when events come: the app's timer calls `draw`, and a key that changes the view does.
    """

    screen_title: ClassVar[str]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "app.next_screen(1)", "next screen", show=False),
        Binding("shift+tab", "app.next_screen(-1)", "previous screen", show=False),
    ]
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(key, what it does) for the bottom line, the most useful first."""
    explained_words: ClassVar[tuple[str, ...]] = ()
    """Labels of `explanations.py` for signs that stand on the screen without a word."""

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, id=id)
        self.session = session

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        """The lines of the screen; at most `height`, each at most `width` cells."""
        raise NotImplementedError

    def export_table(self, state: DashboardState) -> ExportTable | None:
        """What the screen shows as plain values; None: there is nothing in it for other programs."""
        return None

    def draw(self) -> None:
        width, height = self.size
        if width > 0 and height > 0:
            self.show(self.compose_lines(self.session.state, width, height))

    def on_resize(self, event: events.Resize) -> None:
        self.draw()


class ListView(View):
    """A screen with a scrolling list and a cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "first", "first", show=False),
        Binding("end,G", "last", "last", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str, follow_end: bool = False) -> None:
        super().__init__(palette, session, id=id)
        self.scroll_state = ScrollState(follow_end=follow_end)
        self.list_row = 0  # the row of the screen on which the list begins

    def action_move(self, rows: int) -> None:
        self.scroll_state.move(rows)
        self.cursor_moved()

    def action_page(self, pages: int) -> None:
        self.scroll_state.page(pages)
        self.cursor_moved()

    def action_first(self) -> None:
        self.scroll_state.go(0)
        self.cursor_moved()

    def action_last(self) -> None:
        self.scroll_state.go(1 << 60)
        self.cursor_moved()

    def cursor_moved(self) -> None:
        """The user moved the cursor."""
        self.draw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-3)

    def index_at(self, row: int) -> int | None:
        """The entry of the list that stands on a row of the screen."""
        return row - self.list_row + self.scroll_state.top if row >= self.list_row else None

    async def on_click(self, event: events.Click) -> None:
        """A click moves the cursor; a second one right after it opens what is under the cursor, as Enter does."""
        index = self.index_at(event.y)
        if index is None or self.action_at(event) is not None:  # Textual calls LineView.on_click too, which does it
            return
        self.scroll_state.go(index)
        self.cursor_moved()
        if event.chain == 2:
            self.open_at_cursor()

    def open_at_cursor(self) -> None:
        """Show more of what is under the cursor, where there is more."""


class PageView(ListView):
    """A page of text without a cursor: the keys scroll it."""

    _num_lines = 0

    def action_move(self, rows: int) -> None:
        self.scroll_state.top = max(0, min(self.scroll_state.top + rows, self._num_lines - self.size.height))
        self.draw()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 1))

    def action_first(self) -> None:
        self.action_move(-1 << 30)

    def action_last(self) -> None:
        self.action_move(1 << 30)

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        lines = self.compose_page(state, width)
        self._num_lines = len(lines)
        top = self.scroll_state.top = max(0, min(self.scroll_state.top, len(lines) - height))
        shown = lines[top : top + height]
        if top + height < len(lines):
            shown[-1] = [Part(f"… {len(lines) - top - height + 1} more lines below", "muted")]
        return shown

    def compose_page(self, state: DashboardState, width: int) -> list[Line]:
        """All lines of the page, each at most `width` cells."""
        raise NotImplementedError


class FilterView(ListView):
    """A list that can be filtered by text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash,f", "filter", "filter", show=False),
        Binding("escape", "clear_filter", "clear filter", show=False),
    ]

    filter_text: str = ""

    def action_filter(self) -> None:
        self.post_message(FilterWanted(self.filter_text))

    def action_clear_filter(self) -> None:
        self.set_filter("")

    def set_filter(self, text: str) -> None:
        """Show only what contains every word of `text`, whatever its case."""
        self.filter_text = text.strip()
        self.draw()

    def matches(self, *texts: str) -> bool:
        if not self.filter_text:
            return True
        haystack = " ".join(texts).lower()
        return all(word in haystack for word in self.filter_text.lower().split())
