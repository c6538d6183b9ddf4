"""The dashboard. It is given a source of events and cannot tell an engine from a socket or a recording.

Events are folded into a `DashboardState` as they come; the screen reads it on a timer, at most ten times a second, and
repaints the rows that changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.events import Resize
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import ContentSwitcher, Input
from textual.worker import Worker, WorkerError

from aioengine.errors import AioEngineError
from aioengine_tui.control import ControlActions
from aioengine_tui.keymap import BINDINGS, COMMANDS
from aioengine_tui.messages import FilterWanted, OpenFrame, OpenPrefixTree, OpenRequest, SortWanted
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.base import FilterView, View
from aioengine_tui.screens.batch import BatchView
from aioengine_tui.screens.blocks import BlocksView
from aioengine_tui.screens.frame import FrameView
from aioengine_tui.screens.help import HelpView
from aioengine_tui.screens.log import LogView
from aioengine_tui.screens.overview import OverviewView
from aioengine_tui.screens.prefix import PrefixView
from aioengine_tui.screens.request import RequestView
from aioengine_tui.screens.step import StepView
from aioengine_tui.screens.waterfall import WaterfallView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportFormat, table_text, without_foreign_fonts, write_new_file
from aioengine_tui.terminals import driver_for_stdout
from aioengine_tui.themes import THEME_NAMES, THEMES, Palette, textual_name
from aioengine_tui.theming import set_up_theme
from aioengine_tui.widgets.chrome import keys_line, tabs_line, title_line, warnings_line
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.replay_bar import replay_line
from aioengine_tui.widgets.text import Part

if TYPE_CHECKING:
    from aioengine.events.sources.base import StepSource
    from aioengine_tui.model.why.hindsight import Hindsight

TABS = ("overview", "step", "batch", "blocks", "log", "waterfall")
REFRESH_RATES = (0.5, 1.0, 2.0, 4.0, 5.0, 10.0)
"""Pictures a second."""

_MIN_WIDTH, _MIN_HEIGHT = 40, 10
_NOTE_S = 6.0
_COMMON_HINTS = (("?", "help"), ("1-6", "screens"), ("p", "pause"), ("t", "theme"), ("q", "quit"))
_REPLAY_HINTS = (("?", "help"), ("space", "play"), ("[ ]", "step"), ("{ }", "seek"), ("! X L", "jump"), ("+ -", "speed"), ("q", "quit"))
_HINDSIGHT_HINTS = (("V", "verify"), ("W", "what if"))


class DashboardApp(ControlActions, App[None]):
    """`aioengine top`.

    source: where the items come from; the app opens and closes it. refresh: pictures a second, at most 10.
    theme: one of `THEME_NAMES`. folder: where exports and pictures go. ascii_only: draw with the characters of ASCII.
    hindsight: runs a recording again. verify: without being asked.
    """

    TITLE = "aioengine top"
    CSS_PATH = Path(__file__).with_name("app.tcss")  # by its full path, so that a subclass elsewhere finds it
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS

    def __init__(
        self,
        source: StepSource,
        *,
        theme: str = "dark",
        refresh: float = 4.0,
        folder: Path | None = None,
        ascii_only: bool = False,
        hindsight: Hindsight | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__(driver_class=driver_for_stdout())
        self.source = source
        self.hindsight = hindsight
        self._verify_at_once = verify
        self.session = Session(DashboardState())
        self.folder = folder if folder is not None else Path.cwd()
        self.refresh_rate = max(0.1, min(10.0, refresh))
        self.palette = Palette(THEMES["dark"], no_color=self.no_color, ascii_only=ascii_only)
        self.ascii_only = ascii_only
        self.failure: str | None = None  # why the app ended by itself
        self.note = ""
        self._note_until = 0.0
        self._timer: Timer | None = None
        self._consumer: Worker[None] | None = None
        # Of an engine one asks first how it does, of a recording what happened.
        self._first = self._back_to = "overview" if source.playback is None else "waterfall"
        set_up_theme(self, theme)
        self._apply_palette()

    # ------------------------------------------------------------------ life
    def compose(self) -> ComposeResult:
        palette, session = self.palette, self.session
        yield LineView(palette, id="too-small")
        yield LineView(palette, id="title")
        yield LineView(palette, id="tabs")
        yield LineView(palette, id="warnings")
        with ContentSwitcher(id="views", initial=self._first):
            yield OverviewView(palette, session, id="overview")
            yield StepView(palette, session, id="step")
            yield BatchView(palette, session, id="batch")
            yield BlocksView(palette, session, id="blocks")
            yield LogView(palette, session, id="log")
            yield WaterfallView(palette, session, id="waterfall")
            yield RequestView(palette, session, id="request")
            yield FrameView(palette, session, id="frame")
            yield PrefixView(palette, session, id="prefix")
            yield HelpView(palette, session, id="help")
        yield LineView(palette, id="replay")
        yield Input(id="entry", classes="off", compact=True)
        yield LineView(palette, id="keys")

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, lambda _: self._apply_palette())
        self.view.focus()
        self._set_timer()
        self._consumer = self.run_worker(self._consume(), name="consume", exit_on_error=True)

    async def on_unmount(self) -> None:
        # Textual cancels workers but does not wait for them; the source is to be closed before the event loop is.
        if self._consumer is not None:
            self._consumer.cancel()
            with contextlib.suppress(WorkerError):
                await self._consumer.wait()

    async def _consume(self) -> None:
        """Take in every item as it comes. A paused view does not stop this."""
        last_pause = time.monotonic()
        try:
            async with self.source as source:
                if self._verify_at_once:
                    await self.action_verify()
                async for item in source:
                    self.session.live.apply(item)
                    if time.monotonic() - last_pause > 0.02:  # a source that always has the next item must not starve the keys
                        await asyncio.sleep(0)
                        last_pause = time.monotonic()
                await asyncio.Event().wait()  # the source stays open: its playback can go back
        except AioEngineError as exc:
            self.failure = str(exc)
            self.exit(return_code=1)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(1 / self.refresh_rate, self.draw)

    # ------------------------------------------------------------------ drawing
    @property
    def view(self) -> View:
        """The screen that is shown."""
        switcher = self.query_one("#views", ContentSwitcher)
        return switcher.query_one(f"#{switcher.current}", View)

    def draw(self) -> None:
        """Bring the screen up to date. Called by the timer, and by keys that change more than their own view."""
        live = self.session.live
        if live.header is not None:
            live.tick(self.source.now())
        if len(self.screen_stack) > 1 or not self.is_running or self.screen.has_class("too-small"):
            return  # the command palette is open
        self._draw_chrome()
        self.view.draw()

    def _draw_chrome(self) -> None:
        state, width = self.session.live, self.size.width
        if time.monotonic() > self._note_until:
            self.note = ""
        current = self.view.id or ""
        self._line("#title", title_line(state, self.source.address, width))
        tabs = [(tab, self.query_one(f"#{tab}", View).screen_title) for tab in TABS]
        self._line("#tabs", tabs_line(tabs, current, self.session.state, width))
        warnings = warnings_line(self.session, width, note=self.note)
        self._line("#warnings", warnings)
        playback, found = self.source.playback, self.session.hindsight.verification
        self._line("#replay", None if playback is None else replay_line(playback, state.status, state, width, verification=found))
        common = _COMMON_HINTS if playback is None else _REPLAY_HINTS
        if self.hindsight is not None:
            common = (*common[:-2], *_HINDSIGHT_HINTS, *common[-2:])
        own = self.view.key_hints
        self._line("#keys", keys_line([*own[:4], *common, *own[4:]] if width >= 70 else [*common[:1], *own, *common[1:]], width))

    def _line(self, selector: str, line: list[Part] | None) -> None:
        widget = self.query_one(selector, LineView)
        widget.set_class(line is None, "off")
        if line is not None:
            widget.show([line])

    def _apply_palette(self) -> None:
        self.palette = Palette(self.current_theme, no_color=self.no_color, ascii_only=self.ascii_only)
        if self.is_running:
            for widget in self.query(LineView):
                widget.set_palette(self.palette)

    def on_resize(self, event: Resize) -> None:
        width, height = event.size
        small = width < _MIN_WIDTH or height < _MIN_HEIGHT
        self.screen.set_class(small, "too-small")
        if small:
            text = f"{width}x{height} is too small: {_MIN_WIDTH}x{_MIN_HEIGHT} at least"
            self.query_one("#too-small", LineView).show([[Part(text, "warn")], [Part("q quits", "muted")]])
        else:
            self.call_after_refresh(self.draw)

    def say(self, text: str) -> None:
        """Show a note for a few seconds."""
        self.note, self._note_until = text, time.monotonic() + _NOTE_S
        if self.is_running:
            self.draw()

    def unsay(self) -> None:
        """Take the note away; the next picture is without it."""
        self.note, self._note_until = "", 0.0

    def action_press(self, key: str) -> None:
        """A key hint was clicked: as if the key had been pressed."""
        self.simulate_key(key)

    # ------------------------------------------------------------------ screens
    def action_show(self, name: str) -> None:
        switcher = self.query_one("#views", ContentSwitcher)
        if switcher.current in TABS:
            self._back_to = switcher.current
        switcher.current = name
        self.close_entry()
        self.view.focus()
        self.call_after_refresh(self.draw)

    def action_next_screen(self, step: int) -> None:
        current = self.view.id or ""
        index = TABS.index(current) + step if current in TABS else TABS.index(self._back_to)
        self.action_show(TABS[index % len(TABS)])

    def action_help(self) -> None:
        if self.view.id != "help":
            self.query_one(HelpView).explain_screen(self.view)
        self.action_show("help")

    def action_return(self) -> None:
        if self.view.id not in TABS:
            self.action_show(self._back_to)

    def action_open_request(self, request_id: str) -> None:
        """A request's name was clicked."""
        self.post_message(OpenRequest(request_id))

    def on_open_request(self, message: OpenRequest) -> None:
        self.query_one(RequestView).open(message.request_id)
        self.action_show("request")

    async def on_open_frame(self, message: OpenFrame) -> None:
        """Of a recording any step can be gone back to; of an engine the latest ones are kept in full."""
        state, playback = self.session.state, self.source.playback
        if state.step(message.step_id) is None and playback is not None:
            await self._do(playback.seek_step(message.step_id))
        elif state.step(message.step_id) is None:
            self.say(f"step {message.step_id} is no longer kept in full: the last {len(state.steps)} steps are")
            return
        self.query_one(FrameView).open(message.step_id)
        self.action_show("frame")

    def on_open_prefix_tree(self, message: OpenPrefixTree) -> None:
        self.action_show("prefix")

    # ------------------------------------------------------------------ pause, speed, themes, files
    def action_pause(self) -> None:
        if self.source.playback is not None:
            self.source.playback.toggle()
        elif self.session.is_frozen:
            self.session.thaw()
        else:
            self.session.freeze()
        self.draw()

    def action_faster(self, direction: int) -> None:
        if self.source.playback is not None:
            self.change_playback_speed(direction)
            return
        nearest = min(range(len(REFRESH_RATES)), key=lambda i: abs(REFRESH_RATES[i] - self.refresh_rate))
        self.refresh_rate = REFRESH_RATES[max(0, min(len(REFRESH_RATES) - 1, nearest + direction))]
        self._set_timer()
        self.say(f"{self.refresh_rate:g} pictures a second")

    def action_next_theme(self) -> None:
        names = [textual_name(name) for name in THEME_NAMES]
        index = (names.index(self.theme) + 1) % len(names) if self.theme in names else 0
        self.theme = names[index]
        self.say(f"theme {THEME_NAMES[index]}")

    def action_export(self, form: ExportFormat) -> None:
        table = self.view.export_table(self.session.state)
        if table is None:
            self.say("there is nothing to save on this screen")
            return
        self._save(table_text(table, form), form, what=f"{len(table.rows)} rows")

    def action_picture(self) -> None:
        self._save(self.export_screenshot(), "svg", what="picture")

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """The screen as SVG."""
        return without_foreign_fonts(super().export_screenshot(title=title, simplify=simplify))

    def _save(self, text: str, suffix: str, *, what: str) -> None:
        """To a new file here; in a browser's page to the browser, which is perhaps elsewhere."""
        if self.is_web:
            self.deliver_text(io.StringIO(text, newline=""), save_filename=f"{self._file_stem()}.{suffix}")
            self.say(f"{what} sent to the browser")
            return
        try:
            path = write_new_file(text, folder=self.folder, stem=self._file_stem(), suffix=suffix)
        except OSError as exc:
            self.say(f"cannot save to {self.folder}: {exc.strerror}")
            return
        self.say(f"{what} saved to {path}")

    def _file_stem(self) -> str:
        return f"aioengine-{self.view.id}-step{self.session.state.last_step_id}"

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        # Textual's Maximize would take away the lines that say STALE and PAUSED.
        yield from (command for command in super().get_system_commands(screen) if command.title not in ("Maximize", "Minimize"))
        for title, text, action in COMMANDS:
            yield SystemCommand(title, text, lambda action=action: self.call_later(self.run_action, action))

    # ------------------------------------------------------------------ the line for typing
    def on_filter_wanted(self, message: FilterWanted) -> None:
        self.open_entry("filter", message.current, "filter: all words must occur")

    def filter_view(self, text: str) -> None:
        view = self.view
        if isinstance(view, FilterView):
            view.set_filter(text)

    def on_sort_wanted(self, message: SortWanted) -> None:
        self.open_entry("sort", "", f"sort by: {', '.join(message.names)}")

    def sort_view(self, text: str) -> None:
        view = self.view
        if not isinstance(view, BatchView):
            return
        name = next((name for name in view.sort_names if name.startswith(text.lower())), None)
        if name is None:
            self.say(f"no column here begins with {text!r}")
        elif name != view.sort:
            view.action_sort_by(name)
