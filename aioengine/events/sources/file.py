"""Plays a recording as if it were an engine."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from aioengine.events.recording.cursor import HISTORY_EVENTS, Foldable, RecordingCursor
from aioengine.events.recording.index import LANDMARKS, Landmark, RecordingIndex
from aioengine.events.sources.base import CopyWanted, ItemStream, PlaybackControl, Restored, SourceStatus, StreamItem
from aioengine.events.wire import WireError

MIN_SPEED, MAX_SPEED = 0.01, 1000.0
_MAX_WAIT_S = 2.0  # longer silences are cut short
_STATUS_INTERVAL_S = 0.2
_MIN_WAIT_S = 0.04  # waking up is not free, and no viewer draws more often than ten times a second
_SCAN_BUDGET_S = 0.01
_MAX_CATCHING_UP = 8


class _Place(NamedTuple):
    position: int  # events before it
    time: float | None  # of the latest of them


class FileSource(ItemStream):
    """A `StepSource` over a recording; also its own `PlaybackControl`.

    make_state: builds the state that a seek folds and a `Restored` item holds. While the recording plays only the viewer folds,
    and is asked for a copy now and then (`CopyWanted`). whole_history: see `RecordingCursor`.
    """

    engine = None

    def __init__(self, path: str | Path, *, make_state: Callable[[], Foldable], playing: bool = True, whole_history: bool = False) -> None:
        self.address = str(path)
        self._make_state = make_state
        self._whole_history = whole_history
        self._playing = playing
        self._speed = 1.0
        self._cursor: RecordingCursor[Any] | None = None
        self._pending: deque[StreamItem] = deque()
        self._wake_up = asyncio.Event()
        self._seeking = asyncio.Lock()
        self._arriving: _Place | None = None  # of the state of a jump that waits to be handed out
        self._shown = _Place(0, None)  # of the latest item that was handed out
        self._scanning: asyncio.Task[None] | None = None
        self._filling: asyncio.Task[None] | None = None
        self._closed = False
        self._failed = False
        # The playing clock: the engine's time `_anchor_engine` is shown at our time `_anchor`.
        self._anchor = time.perf_counter()
        self._anchor_engine: float | None = None
        self._last_status = 0.0

    # ------------------------------------------------------------------ StepSource
    @property
    def playback(self) -> PlaybackControl:
        return self

    def now(self) -> float:
        if self._cursor is None:
            return 0.0
        shown = self._shown.time
        if shown is None:
            return self._cursor.index.header.perf_counter
        if not self._playing or self._anchor_engine is None or self.seeking:
            return shown
        upcoming = self._cursor.peek_time()
        running = self._engine_time()
        return max(shown, running if upcoming is None else min(running, upcoming))

    async def open(self) -> None:
        """Raises WireError if the file is no recording."""
        cursor: RecordingCursor[Any] = await asyncio.to_thread(
            lambda: RecordingCursor(self.address, make_state=self._make_state, whole_history=self._whole_history)
        )
        self._cursor = cursor
        self._pending.append(cursor.index.header)
        self._push_status()
        self._scanning = asyncio.create_task(self._scan(), name="aioengine-scan-recording")

    async def close(self) -> None:
        self._closed = True
        self._wake_up.set()
        tasks = [task for task in (self._scanning, self._filling) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._cursor is not None:
            self._cursor.close()

    async def __anext__(self) -> StreamItem:
        while not self._closed:
            if self._pending:
                told = self._pending.popleft()
                if isinstance(told, Restored):
                    self._shown, self._arriving = self._arriving or self._shown, None
                return told
            if not self._playing or self._failed or self._seeking.locked():
                await self._sleep(None)
                continue
            item = await self._play_on()
            if item is not None:
                return item
        raise StopAsyncIteration

    async def _play_on(self) -> StreamItem | None:
        """The next event if it is due; otherwise wait for it, or for a command."""
        cursor = self._opened
        upcoming = cursor.peek_time()
        if upcoming is None and not cursor.index.is_complete:
            await self._sleep(0.05)  # the last line was torn when the scan came by
            return None
        if upcoming is None:  # the end, or a damaged line
            return self._next_event()
        if self._anchor_engine is None:
            self._set_anchor(cursor.last_time if cursor.last_time is not None else upcoming)
        wait = (upcoming - self._engine_time()) / self._speed
        if wait > _MAX_WAIT_S:
            self._set_anchor(upcoming - _MAX_WAIT_S * self._speed)
        elif wait > 0:
            await self._sleep(max(wait, _MIN_WAIT_S))
            return None
        if time.monotonic() - self._last_status > _STATUS_INTERVAL_S:
            self._push_status()
        return self._next_event()

    def _next_event(self) -> StreamItem | None:
        cursor = self._opened
        try:
            event = cursor.next_event()
        except WireError as exc:
            self._failed = True
            self._playing = False
            self._push_status(str(exc))
            return None
        if event is None:
            self._playing = False
            self._push_status("the end of the recording")
        else:
            self._shown = _Place(cursor.position, cursor.last_time)
            if cursor.wants_state:
                self._want_copy()
        return event

    def _want_copy(self) -> None:
        cursor = self._opened
        self._pending.append(CopyWanted(functools.partial(cursor.put_aside, cursor.position)))

    async def _sleep(self, seconds: float | None) -> None:
        """Until something happens, or for so many seconds."""
        self._wake_up.clear()
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._wake_up.set)
        try:
            await self._wake_up.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _scan(self) -> None:
        index = self._opened.index
        while not self._closed:
            done = index.scan(budget_s=_SCAN_BUDGET_S)
            await asyncio.sleep(1.0 if done else 0)  # the file may grow

    # ------------------------------------------------------------------ PlaybackControl
    @property
    def position(self) -> int:
        return self._shown.position

    @property
    def length(self) -> int:
        return self._opened.index.num_events

    @property
    def duration(self) -> float:
        return max(0.0, self._opened.index.last_time - self._opened.index.first_time)

    @property
    def elapsed(self) -> float:
        place = self._shown
        return 0.0 if place.time is None or place.position == 0 else max(0.0, place.time - self._opened.index.first_time)

    @property
    def seeking(self) -> bool:
        return self._seeking.locked() or self._arriving is not None

    @property
    def playing(self) -> bool:
        return self._playing

    @property
    def speed(self) -> float:
        return self._speed

    def play(self) -> None:
        self._set_playing(True)

    def pause(self) -> None:
        self._set_playing(False)

    def toggle(self) -> None:
        self._set_playing(not self._playing)

    def set_speed(self, speed: float) -> None:
        if self._playing and self._anchor_engine is not None:
            self._set_anchor(self._engine_time())
        self._speed = min(MAX_SPEED, max(MIN_SPEED, speed))
        self._push_status()

    async def step(self, count: int = 1) -> None:
        self._playing = False
        if count:
            await self._seek(lambda index, position: index.position_of_steps_from(position, count), complete=count > 0)

    async def seek_step(self, step_id: int) -> None:
        await self._seek(lambda index, _: index.position_of_step(step_id))

    async def seek_time(self, seconds: float) -> None:
        await self._seek(lambda index, _: index.position_of_time(seconds))

    async def seek_fraction(self, fraction: float) -> None:
        await self._seek(lambda index, _: round(index.num_events * min(1.0, max(0.0, fraction))))

    async def jump(self, kind: Landmark, *, backwards: bool = False) -> bool:
        if kind not in LANDMARKS:
            raise ValueError(f"unknown landmark {kind!r}; known: {', '.join(LANDMARKS)}")
        self._playing = False
        return await self._seek(lambda index, position: index.next_landmark(kind, position, backwards=backwards))

    async def _seek(self, find: Callable[[RecordingIndex, int], int | None], *, complete: bool = True) -> bool:
        """Go where `find` says; False if it finds nothing. complete: the answer needs the whole file looked through."""
        cursor = self._opened
        if self._filling is not None:
            self._filling.cancel()
        async with self._seeking:
            for _ in cursor.index.scan_in_parts(_SCAN_BUDGET_S) if complete else ():
                await asyncio.sleep(0)
            target = find(cursor.index, cursor.position)
            if target is not None:
                self._pending.clear()  # events from before the jump
                self._arriving = None
                for _ in cursor.seek_in_parts(target):
                    await asyncio.sleep(0)
                self._anchor_engine = None
                self._arriving = _Place(cursor.position, cursor.last_time)
                self._pending.append(Restored(cursor.state.copy()))
        self._push_status()
        if target is not None and cursor.lacks_history and not self._whole_history:
            self._filling = asyncio.create_task(self._fill_history(), name="aioengine-fill-history")
        return target is not None

    async def _fill_history(self) -> None:
        """What was before the place that was jumped to comes after it: the place itself is shown at once."""
        cursor = self._opened
        with closing(RecordingCursor(self.address, make_state=self._make_state, index=cursor.index)) as behind:
            for _ in range(_MAX_CATCHING_UP):  # while it is folded, the recording may play on
                if behind.position == cursor.position and behind.position:
                    break
                for _ in behind.seek_in_parts(cursor.position, history=HISTORY_EVENTS):
                    await asyncio.sleep(0)
            else:
                return
            cursor.adopt(behind.state.copy())
            self._pending.append(Restored(behind.state.copy()))
            self._wake_up.set()

    def marks(self, kind: Landmark, num_cells: int) -> list[bool]:
        return self._opened.index.marks(kind, num_cells)

    # ------------------------------------------------------------------ parts
    @property
    def _opened(self) -> RecordingCursor[Any]:
        assert self._cursor is not None, "open() comes first"
        return self._cursor

    def _set_playing(self, playing: bool) -> None:
        self._playing = playing
        self._anchor_engine = None
        self._push_status()

    def _engine_time(self) -> float:
        assert self._anchor_engine is not None
        return self._anchor_engine + (time.perf_counter() - self._anchor) * self._speed

    def _set_anchor(self, engine_time: float) -> None:
        self._anchor, self._anchor_engine = time.perf_counter(), engine_time

    def _push_status(self, detail: str = "") -> None:
        self._last_status = time.monotonic()
        state = "playing" if self._playing else "paused"
        cursor = self._opened
        self._pending.append(
            SourceStatus(
                "playing" if state == "playing" else "paused",
                detail or self.address,
                position=self._arriving.position if self._arriving is not None else self._shown.position,
                length=cursor.index.num_events,
                speed=self._speed,
            )
        )
        self._wake_up.set()
