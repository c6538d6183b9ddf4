"""`aioengine top --tour`: scenes that teach, each a recording that plays slowly with a few words above it.

The dashboard is the usual one, with all its keys; `TourSource` gives it one recording after the other.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from textual.binding import BindingType
from textual.widgets import Input

from aioengine.events.sources.base import ItemStream, PlaybackControl, Restored, StreamItem
from aioengine.events.sources.file import FileSource
from aioengine_tui.app import DashboardApp
from aioengine_tui.keymap import TOUR_BINDINGS
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.frame import FrameView
from aioengine_tui.screens.step import StepView
from aioengine_tui.widgets.line_view import LineView
from aioengine_tui.widgets.text import Line, Part, beside, fit_line

SPEED = 0.025
"""Of the scenes' clock: a step of 15 ms takes about 0.6 s."""

_MIN_HEIGHT_FOR_PEACE = 20
_MIN_HEIGHT_FOR_WORDS = 36  # where the frame screen explains its fields too
_WORDS_PER_S = 3.5  # of a reader who looks at the screen as well
_FIRST_S = 1.0  # until one has found the words


@dataclass(frozen=True, slots=True)
class Caption:
    """Words that are shown from a step on. 0: from the beginning."""

    step_id: int
    text: str
    field: str | None = None  # on the frame screen: the field that they are about

    @property
    def reading_s(self) -> float:
        """Seconds that it takes to read them."""
        return _FIRST_S + len(self.text.split()) / _WORDS_PER_S


@dataclass(frozen=True, slots=True)
class Scene:
    """A recording, the screen on which it is watched, and what is said about it."""

    title: str
    screen: str  # the id of a view
    captions: tuple[Caption, ...]  # by step
    path: Path
    is_about_lanes: bool = False  # of the step screen

    def caption_at(self, step_id: int) -> int:
        """The index of the words for the time from a step on."""
        return max(index for index, caption in enumerate(self.captions) if caption.step_id <= step_id or index == 0)


def tour_text(scenes: Sequence[Scene], *, width: int = 100) -> str:
    """What is said about the scenes, as plain text."""
    parts: list[str] = []
    for number, scene in enumerate(scenes, 1):
        parts.append(f"{number}. {scene.title}")
        for caption in scene.captions:
            head = f"   step {caption.step_id}: " if caption.step_id else "   "
            parts.append(textwrap.fill(caption.text, width, initial_indent=head, subsequent_indent="   "))
        parts.append("")
    return "\n".join(parts).rstrip()


class TourSource(ItemStream):
    """A `StepSource` over the recordings of the scenes, one at a time."""

    engine = None
    address = "tour"

    def __init__(self, scenes: Sequence[Scene], *, make_state: Callable[[], DashboardState]) -> None:
        self.scenes = list(scenes)
        self.index = 0
        self._make_state = make_state
        self._inner = self._source_of(0)
        self._is_new = False  # the scene has changed: the viewer begins with an empty state

    def _source_of(self, index: int) -> FileSource:
        return FileSource(self.scenes[index].path, make_state=self._make_state, playing=False)  # the first words come first

    @property
    def scene(self) -> Scene:
        return self.scenes[self.index]

    @property
    def playback(self) -> PlaybackControl:
        return self._inner

    def now(self) -> float:
        return self._inner.now()

    async def open(self) -> None:
        await self._inner.open()
        self._inner.set_speed(SPEED)

    async def close(self) -> None:
        await self._inner.close()

    async def go_to(self, index: int) -> None:
        """Begin a scene, from its start."""
        self.index = max(0, min(index, len(self.scenes) - 1))
        source = self._source_of(self.index)
        await source.open()
        source.set_speed(SPEED)
        before, self._inner, self._is_new = self._inner, source, True
        await before.close()

    async def __anext__(self) -> StreamItem:
        while True:
            if self._is_new:
                self._is_new = False
                return Restored(self._make_state())
            source = self._inner
            try:
                item: Any = await source.__anext__()
            except StopAsyncIteration:
                if source is self._inner:
                    raise
                continue
            if source is self._inner:
                return item  # type: ignore[no-any-return]


class TourApp(DashboardApp):
    """The dashboard with the words of a scene above its screen.

    When new words come the scene waits until they can have been read, then goes on by itself.
    """

    BINDINGS: ClassVar[list[BindingType]] = TOUR_BINDINGS

    source: TourSource

    def __init__(self, source: TourSource, **options: Any) -> None:
        super().__init__(source, **options)
        self._shown: tuple[int, int] = (-1, -1)  # scene and caption
        self._go_on_at: float | None = None  # the scene waits for its reader until then

    def on_mount(self) -> None:
        # Textual calls the base class's handler too.
        self.mount(LineView(self.palette, id="tour"), after="#warnings")
        self.call_after_refresh(self._show_screen)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("scene", "replay_scene") and self.query_one("#entry", Input).has_focus:
            return False  # a letter that is typed
        return super().check_action(action, parameters)

    # ------------------------------------------------------------------ keys
    async def action_scene(self, step: int) -> None:
        last = len(self.source.scenes) - 1
        if not 0 <= self.source.index + step <= last:
            self.say("this is the last scene: q quits, b goes back" if step > 0 else "this is the first scene")
            return
        await self._begin(self.source.index + step)

    async def action_replay_scene(self) -> None:
        await self._begin(self.source.index)

    async def _begin(self, index: int) -> None:
        self._go_on_at = None
        self._shown = (-1, -1)
        await self.source.go_to(index)
        self._show_screen()

    def _show_screen(self) -> None:
        frame = self.query_one(FrameView)
        frame.open(None)
        is_large = self.size.height >= _MIN_HEIGHT_FOR_WORDS
        frame.with_words = is_large
        self.query_one(StepView).lanes_first = self.source.scene.is_about_lanes and not is_large
        self.action_show(self.source.scene.screen)

    def action_pause(self) -> None:
        self._go_on_at = None
        super().action_pause()

    # ------------------------------------------------------------------ drawing
    def draw(self) -> None:
        if self.is_running and self.query("#tour"):
            self._mind_the_reader()
            lines = self.tour_lines(self.size.width)
            view = self.query_one("#tour", LineView)
            view.styles.height = len(lines)
            view.show(lines)
        super().draw()

    def _mind_the_reader(self) -> None:
        playback, scene = self.source.playback, self.source.scene
        caption = scene.caption_at(self.session.live.last_step_id)
        now = time.monotonic()
        if (self.source.index, caption) != self._shown:
            self._shown = (self.source.index, caption)
            if (field := scene.captions[caption].field) is not None:
                self.query_one(FrameView).point_at(field)
            if playback.playing or caption == 0:
                playback.pause()
                self._go_on_at = now + scene.captions[caption].reading_s
        elif self._go_on_at is not None and now >= self._go_on_at:
            self._go_on_at = None
            playback.play()

    def tour_lines(self, width: int) -> list[Line]:
        """Title and words. Where there is room: as many lines whatever the words, so that the screen below does not jump."""
        scene = self.source.scene
        wrapped = [textwrap.wrap(caption.text, max(20, width - 4)) for caption in scene.captions]
        shown = wrapped[scene.caption_at(self.session.live.last_step_id)]
        words = (("n", "next"), ("b", "back"), ("r", "again"), ("space", "wait or go on"))
        keys: Line = [part for key, text in words[: 4 if width >= 80 else 3] for part in (Part(key, "key"), Part(f" {text} ", "muted"))]
        title: Line = [Part(f" tour {self.source.index + 1}/{len(self.source.scenes)} ", "tab_on"), Part(f" {scene.title} ", "title")]
        waits = " · waits while you read" if self._go_on_at is not None and width >= 100 else ""
        lines = [fit_line(beside([*title, Part(waits, "muted")], keys, width), width)]
        lines += [[Part("  "), Part(text, "text")] for text in shown]
        most = min(max(map(len, wrapped)), max(3, self.size.height // 3))
        lines = (lines + [[] for _ in range(most)])[: most + 1] if self.size.height >= _MIN_HEIGHT_FOR_PEACE else lines
        return [fit_line(line, width) for line in lines] + [[Part("─" * width, "border")]]
