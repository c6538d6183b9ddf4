"""What a terminal holds: every update that Textual's compositor sends is applied to a grid of cells, as a terminal does it.

`Widget.text` says what a widget means to show. A row that nobody asked to repaint, or that is painted from a strip of long
ago, is seen only here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.cells import cell_len
from textual.widgets import ContentSwitcher

from aioengine_tui.app import DashboardApp
from aioengine_tui.screens.base import View
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import fit_line, line_text

_SEQUENCE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|(.)", re.DOTALL)

CUT_NUMBER = re.compile(r"(?<![\w.,/·…-])[\d.,/]*\d[.,/]?…")
"""Digits that were cut off: the rest is a plausible wrong number. Ids and words with digits in them may be cut."""


class Cell(NamedTuple):
    character: str  # "" behind a character of two cells
    look: str  # the SGR codes


class TerminalGrid:
    """The cells of a terminal; `feed` takes what is written to it. Only what Textual writes is understood."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = []

    def resize(self, width: int, height: int) -> None:
        """Larger or smaller; what was there stays, as in a terminal."""
        self.rows = [(row + [Cell(" ", "")] * width)[:width] for row in self.rows[:height]]
        self.rows += [[Cell(" ", "")] * width for _ in range(height - len(self.rows))]

    def feed(self, text: str) -> None:
        x = y = 0
        look = ""
        for match in _SEQUENCE.finditer(text):
            numbers, command, character = match.groups()
            if command == "H":
                y, x = (int(number) - 1 for number in numbers.split(";"))
            elif command == "m":
                look = "" if numbers in ("", "0") else numbers
            elif command is not None:
                raise AssertionError(f"not understood: {match[0]!r}")
            elif character == "\n":
                y, x = y + 1, 0
            elif character is not None:
                x += self._put(x, y, character, look)

    def _put(self, x: int, y: int, character: str, look: str) -> int:
        width = cell_len(character)
        for offset in range(width):
            if y < len(self.rows) and x + offset < len(self.rows[y]):
                self.rows[y][x + offset] = Cell("" if offset else character, look)
        return width

    @property
    def texts(self) -> list[str]:
        return ["".join(cell.character for cell in row) for row in self.rows]


class PaintedApp(DashboardApp):
    """The dashboard before a terminal that remembers what was written to it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.terminal = TerminalGrid()

    def _display(self, screen: Any, renderable: Any) -> None:
        if renderable is None or self._batch_count or not hasattr(renderable, "render_segments"):
            return
        size = self.size
        if (size.height, size.width) != (len(self.terminal.rows), len(self.terminal.rows[0]) if self.terminal.rows else 0):
            self.terminal.resize(size.width, size.height)
        self.terminal.feed(renderable.render_segments(self.console))


def shown_views(app: DashboardApp) -> Iterator[LineView]:
    for widget in app.screen.query(LineView):
        if widget.region.height and widget.region.width and widget.is_on_screen:
            yield widget


def faults_of(app: PaintedApp) -> list[str]:
    """What is wrong with the picture, in words; empty if what is painted is the state and nothing else."""
    if len(app.screen_stack) > 1:
        return []  # the command palette lies over it
    painted = app.terminal.texts
    fresh = TerminalGrid()
    fresh.resize(app.size.width, app.size.height)
    fresh.feed(app.screen._compositor.render_full_update().render_segments(app.console))
    faults = [
        f"row {y} holds {before!r}, a repaint makes it {after!r}"
        for y, (before, after) in enumerate(zip(painted, fresh.texts, strict=True))
        if before != after
    ]
    faults += [
        f"row {y} has other colours than a repaint"
        for y, (old, new) in enumerate(zip(app.terminal.rows, fresh.rows, strict=True))
        if old != new
    ]
    covered = set()
    for view in shown_views(app):
        region = view.region
        covered |= set(range(region.y, region.bottom))
        for row, (expected, held) in enumerate(zip(expected_rows(view), painted[region.y : region.bottom], strict=True)):
            if held[region.x : region.right] != expected:
                faults.append(f"{view.id} row {row} holds {held!r}, the state says {expected!r}")
    entry = app.query_one("#entry")
    covered |= set(range(entry.region.y, entry.region.bottom))
    faults += [f"row {y} belongs to nobody: {painted[y]!r}" for y in range(app.size.height) if y not in covered]
    faults += [f"a number is cut: {text!r}" for text in painted if CUT_NUMBER.search(text)]
    return [*faults, *_missing_warnings(app, painted)]


def expected_rows(view: LineView) -> list[str]:
    width, height = view.size
    lines = view.compose_lines(view.session.state, width, height) if isinstance(view, View) else view.lines
    assert len(lines) <= height, f"{view.id} has {len(lines)} lines for {height} rows"
    return [line_text(fit_line(line, width)) for line in lines] + [" " * width] * (height - len(lines))


def _missing_warnings(app: DashboardApp, painted: list[str]) -> Iterator[str]:
    if app.screen.has_class("too-small"):
        return
    switcher = app.query_one(ContentSwitcher)
    live = app.session.live
    wanted = {
        "VIEW PAUSED": app.session.is_frozen,
        "ENGINE PAUSED": live.paused,
        "STALE": live.is_stale and live.status.state != "connecting",
    }
    text = "\n".join(painted)
    for words, is_wanted in wanted.items():
        if is_wanted and words not in text:
            yield f"{words} is not on screen {switcher.current}"
