"""The screen of a fleet: a row an engine; Enter opens one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from aioengine_tui.fleet.lines import first_row, fleet_lines
from aioengine_tui.fleet.members import Fleet, OpenSource
from aioengine_tui.themes import THEMES, Palette, textual_name
from aioengine_tui.widgets.chrome import keys_line
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import Part, beside

_LOOK_AGAIN_S = 2.0
_HINTS = (("↑ ↓", "choose"), ("enter", "open"), ("q", "quit"))


class FleetApp(App[str]):
    """Lists engines until one is chosen: `run()` returns its address, or None when the user leaves.

    find: asked for the addresses now and every few seconds. refresh: pictures a second. start_at: the address of the row that
    the cursor begins on.
    """

    TITLE = "aioengine top"
    CSS_PATH = Path(__file__).parents[1] / "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "open", "open", show=False),
        Binding("q,escape", "quit", "quit", show=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    def __init__(
        self,
        find: Callable[[], Sequence[str]],
        open_source: OpenSource,
        *,
        theme: str = "dark",
        refresh: float = 2.0,
        start_at: str | None = None,
    ) -> None:
        super().__init__()
        self._find = find
        self._refresh_rate = refresh
        self._start_at = start_at
        self.fleet = Fleet(open_source)
        self.cursor = 0
        for own in THEMES.values():
            self.register_theme(own)
        self.theme = textual_name("ansi" if self.no_color else theme)
        self.palette = Palette(self.current_theme, no_color=self.no_color)

    def compose(self) -> ComposeResult:
        yield LineView(self.palette, id="title")
        yield LineView(self.palette, id="fleet")
        yield LineView(self.palette, id="keys")

    def on_mount(self) -> None:
        self._look()
        addresses = [member.address for member in self.fleet.members]
        self.cursor = addresses.index(self._start_at) if self._start_at in addresses else 0
        self.set_interval(_LOOK_AGAIN_S, self._look)
        self.set_interval(1 / self._refresh_rate, self.draw)
        self.call_after_refresh(self.draw)

    async def on_unmount(self) -> None:
        await self.fleet.close()

    def _look(self) -> None:
        self.fleet.follow(self._find())

    def draw(self) -> None:
        width, view = self.size.width, self.query_one("#fleet", LineView)
        members = self.fleet.members
        self.cursor = max(0, min(self.cursor, len(members) - 1))
        count = f"{len(members)} engine{'' if len(members) == 1 else 's'} "
        self.query_one("#title", LineView).show([beside([Part(" aioengine top  ", "title")], [Part(count, "muted")], width)])
        self.query_one("#keys", LineView).show([keys_line(_HINTS, width)])
        view.show(fleet_lines(members, width=width, height=view.size.height, cursor=self.cursor if members else None))

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def action_move(self, rows: int) -> None:
        self.cursor += rows
        self.draw()

    def action_open(self) -> None:
        if self.fleet.members:
            self.exit(self.fleet.members[self.cursor].address)

    def on_click(self, event: events.Click) -> None:
        """A row of the list: chosen, and opened if it was already."""
        if event.widget is None or event.widget.id != "fleet":
            return
        row = first_row(self.cursor, len(self.fleet.members), event.widget.size.height) + event.y - 1  # below the heads
        if 0 <= row < len(self.fleet.members):
            if row == self.cursor:
                self.action_open()
            self.cursor = row
            self.draw()
