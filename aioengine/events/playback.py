"""Plays a recording as if it were an engine."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from aioengine.events.recording_index import LANDMARKS, Landmark, RecordingIndex
from aioengine.events.replay import Player
from aioengine.events.stream import CopyWanted, Foldable, ItemStream, Restored, SourceStatus, StreamItem
from aioengine.events.wire import WireError

MIN_SPEED, MAX_SPEED = 0.01, 1000.0
_MAX_WAIT_S = 2.0  # longer silences are cut short
_STATUS_INTERVAL_S = 0.2
_MIN_WAIT_S = 0.04  # waking up is not free, and no viewer draws more often than ten times a second
_SCAN_BUDGET_S = 0.01


class PlaybackControl(Protocol):
    """What a viewer may do to a recording. What changes comes through the stream."""

    @property
    def position(self) -> int:
        """Events before the present place."""

    @property
    def length(self) -> int:
        """Events found so far; the file is looked through in the background."""

    @property
    def duration(self) -> float:
        """Seconds from the first to the last event found so far."""

    @property
    def elapsed(self) -> float:
        """Seconds from the first event to the present place."""

    @property
    def playing(self) -> bool: ...

    @property
    def speed(self) -> float: ...

    def play(self) -> None: ...

    def pause(self) -> None: ...

    def toggle(self) -> None: ...

    def set_speed(self, speed: float) -> None:
        """Times real time, between 0.01 and 1000."""

    async def step(self, count: int = 1) -> None:
        """Pause, and go to the next scheduled step, or `count` further; back if negative."""

    async def seek_step(self, step_id: int) -> None:
        """Go right behind a step's event."""

    async def seek_time(self, seconds: float) -> None:
        """Go to so many seconds after the first event."""

    async def seek_fraction(self, fraction: float) -> None:
        """0 is the beginning, 1 the end."""

    async def jump(self, kind: Landmark, *, backwards: bool = False) -> bool:
        """Pause at the next preemption or abort, or at the slowest step (again: the next slowest); False if there is none."""


class FileSource(ItemStream):
    """A `StepSource` over a recording; also its own `PlaybackControl`.

    make_state: builds the state that a seek folds and a `Restored` item holds. While the recording plays only the viewer folds,
    and is asked for a copy now and then (`CopyWanted`). whole_history: see `Player`.
    """

    engine = None

    def __init__(self, path: str | Path, *, make_state: Callable[[], Foldable], playing: bool = True, whole_history: bool = False) -> None:
        self.address = str(path)
        self._make_state = make_state
        self._whole_history = whole_history
        self._playing = playing
        self._speed = 1.0
        self._player: Player[Any] | None = None
        self._pending: deque[StreamItem] = deque()
        self._wake_up = asyncio.Event()
        self._seeking = asyncio.Lock()
        self._scanning: asyncio.Task[None] | None = None
        self._closed = False
        self._failed = False
        # The playing clock: the engine's time `_anchor_engine` is shown at our time `_anchor`.
        self._anchor = time.perf_counter()
        self._anchor_engine: float | None = None
        self._last_status = 0.0

    # ------------------------------------------------------------------ StepSource
    @property
    def player(self) -> PlaybackControl:
        return self

    def now(self) -> float:
        if self._player is None:
            return 0.0
        shown = self._player.last_time
        if shown is None:
            return self._player.index.header.perf_counter
        if not self._playing or self._anchor_engine is None:
            return shown
        upcoming = self._player.peek_time()
        running = self._engine_time()
        return max(shown, running if upcoming is None else min(running, upcoming))

    async def open(self) -> None:
        """Raises WireError if the file is no recording."""
        player: Player[Any] = await asyncio.to_thread(
            lambda: Player(self.address, make_state=self._make_state, whole_history=self._whole_history)
        )
        self._player = player
        self._pending.append(player.index.header)
        self._push_status()
        self._scanning = asyncio.create_task(self._scan(), name="aioengine-scan-recording")

    async def close(self) -> None:
        self._closed = True
        self._wake_up.set()
        if self._scanning is not None:
            self._scanning.cancel()
            await asyncio.wait([self._scanning])
        if self._player is not None:
            self._player.close()

    async def __anext__(self) -> StreamItem:
        while not self._closed:
            if self._pending:
                return self._pending.popleft()
            if not self._playing or self._failed or self._seeking.locked():
                await self._sleep(None)
                continue
            item = await self._play_on()
            if item is not None:
                return item
        raise StopAsyncIteration

    async def _play_on(self) -> StreamItem | None:
        """The next event if it is due; otherwise wait for it, or for a command."""
        player = self._opened
        upcoming = player.peek_time()
        if upcoming is None and not player.index.is_complete:
            await self._sleep(0.05)  # the last line was torn when the scan came by
            return None
        if upcoming is None:  # the end, or a damaged line
            return self._next_event()
        if self._anchor_engine is None:
            self._set_anchor(player.last_time if player.last_time is not None else upcoming)
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
        player = self._opened
        try:
            event = player.next_event()
        except WireError as exc:
            self._failed = True
            self._playing = False
            self._push_status(str(exc))
            return None
        if event is None:
            self._playing = False
            self._push_status("the end of the recording")
        elif player.wants_state:
            self._want_copy()
        return event

    def _want_copy(self) -> None:
        player = self._opened
        self._pending.append(CopyWanted(functools.partial(player.put_aside, player.position)))

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
            await asyncio.sleep(1.0 if done else _SCAN_BUDGET_S)  # half of the time at most; and the file may grow

    # ------------------------------------------------------------------ PlaybackControl
    @property
    def position(self) -> int:
        return self._opened.position

    @property
    def length(self) -> int:
        return self._opened.index.num_events

    @property
    def duration(self) -> float:
        return max(0.0, self._opened.index.last_time - self._opened.index.first_time)

    @property
    def elapsed(self) -> float:
        player = self._opened
        return 0.0 if player.last_time is None or player.position == 0 else max(0.0, player.last_time - player.index.first_time)

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
        player = self._opened
        async with self._seeking:
            for _ in player.index.scan_in_parts(_SCAN_BUDGET_S) if complete else ():
                await asyncio.sleep(0)
            target = find(player.index, player.position)
            if target is not None:
                self._pending.clear()  # events from before the jump
                for _ in player.seek_in_parts(target):
                    await asyncio.sleep(0)
                self._anchor_engine = None
                self._pending.append(Restored(player.state.copy()))
        self._push_status()
        return target is not None

    # ------------------------------------------------------------------ parts
    @property
    def _opened(self) -> Player[Any]:
        assert self._player is not None, "open() comes first"
        return self._player

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
        player = self._opened
        self._pending.append(
            SourceStatus(
                "playing" if state == "playing" else "paused",
                detail or self.address,
                position=player.position,
                length=player.index.num_events,
                speed=self._speed,
            )
        )
        self._wake_up.set()
