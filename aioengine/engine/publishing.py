"""Where an engine's events go beside its own process: a recording, a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aioengine.engine.publish_options import PublishOptions
from aioengine.events.bus import StepBus
from aioengine.events.recording.locked_file import RecordingFile
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.server import EventServer
from aioengine.events.sources.base import EngineControl
from aioengine.events.step_event import EngineSnapshot
from aioengine.events.wire import WireHeader


class Publisher:
    """Owns the recorder and the event server of one engine."""

    def __init__(self, options: PublishOptions, *, bus: StepBus) -> None:
        self.options = options
        self._bus = bus
        self._server: EventServer | None = None
        self._recording: RecordingFile | None = None  # until a recorder has taken it over
        self._recorder: StepRecorder | None = None
        self.header: WireHeader | None = None

    def bind(self) -> None:
        """Take the recording's file and the socket's address, early. Raises ConfigError."""
        options = self.options
        if options.record is not None:
            self._recording = RecordingFile(options.record)
        if options.events is not None:
            self._server = EventServer(options.events, token=options.events_token, include_text=options.publish_text)

    def record(self, model: str, config: Any, *, num_kv_cache_blocks: int, facts: Mapping[str, Any]) -> None:
        """Fix the header and start the recording, if one is wanted. Raises ConfigError."""
        self.header = WireHeader.create(
            model, config, include_prompts=self.options.publish_text, num_kv_cache_blocks=num_kv_cache_blocks, facts=facts
        )
        if self._recording is not None:
            self._recorder = StepRecorder(self._recording, self.header)
            self._recording = None
            self._bus.add_observer(self._recorder)

    async def serve(self, *, snapshot: Callable[[], EngineSnapshot], control: EngineControl) -> None:
        """Let viewers in."""
        if self._server is not None:
            assert self.header is not None
            allowed = control if self.options.allow_events_control else None
            await self._server.start(bus=self._bus, header=self.header, snapshot=snapshot, control=allowed)

    async def close(self) -> None:
        """End the connections and the recording. Idempotent."""
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(self.close_recording)

    def abandon(self) -> None:
        """As `close`, without waiting, after the event loop was closed; the recording stays open."""
        if self._server is not None:
            self._server.abandon()

    def close_recording(self) -> None:
        """Write the rest of the recording and close it; blocks. Idempotent."""
        if self._recording is not None:
            self._recording.close()
        if self._recorder is not None:
            self._recorder.close()
