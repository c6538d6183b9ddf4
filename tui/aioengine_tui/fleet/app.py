"""The screen of a fleet: a row an engine; Enter opens one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.fleet.lines import first_row, fleet_lines
from aioengine_tui.fleet.members import Fleet, OpenSource
from aioengine_tui.lines_app import LinesApp

_LOOK_AGAIN_S = 2.0


class FleetApp(LinesApp[str]):
    """Lists engines until one is chosen: `run()` returns its address, or None when the user leaves.

    find: asked for the addresses now and every few seconds. refresh: pictures a second. start_at: the address of the row that
    the cursor begins on.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "open", "open", show=False),
    ]
    key_hints = (("↑ ↓", "choose"), ("enter", "open"), ("q", "quit"))

    def __init__(
        self,
        find: Callable[[], Sequence[str]],
        open_source: OpenSource,
        *,
        theme: str = "dark",
        refresh: float = 2.0,
        start_at: str | None = None,
        ascii_only: bool = False,
    ) -> None:
        super().__init__(theme=theme, ascii_only=ascii_only)
        self._find = find
        self._refresh_rate = refresh
        self._start_at = start_at
        self.fleet = Fleet(open_source)
        self.cursor = 0

    def on_mount(self) -> None:
        self._look()
        addresses = [member.address for member in self.fleet.members]
        self.cursor = addresses.index(self._start_at) if self._start_at in addresses else 0
        self.set_interval(_LOOK_AGAIN_S, self._look)
        self.set_interval(1 / self._refresh_rate, self.draw)

    async def on_unmount(self) -> None:
        await self.fleet.close()

    def _look(self) -> None:
        self.fleet.follow(self._find())

    def draw(self) -> None:
        members, view = self.fleet.members, self.lines_view
        self.cursor = max(0, min(self.cursor, len(members) - 1))
        lines = fleet_lines(members, width=self.size.width, height=view.size.height, cursor=self.cursor if members else None)
        self.show("aioengine top", f"{len(members)} engine{'' if len(members) == 1 else 's'}", lines)

    def action_move(self, rows: int) -> None:
        self.cursor += rows
        self.draw()

    def action_open(self) -> None:
        if self.fleet.members:
            self.exit(self.fleet.members[self.cursor].address)

    def on_click(self, event: events.Click) -> None:
        """A row of the list: chosen, and opened if it was already."""
        if event.widget is not self.lines_view:
            return
        row = first_row(self.cursor, len(self.fleet.members), self.lines_view.size.height) + event.y - 1  # below the heads
        if 0 <= row < len(self.fleet.members):
            if row == self.cursor:
                self.action_open()
            self.cursor = row
            self.draw()
