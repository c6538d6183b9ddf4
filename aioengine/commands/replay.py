"""`aioengine replay`: runs a recording again and says whether it comes out the same."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aioengine.events.recording.reader import Recording, read_recording
from aioengine.events.step_event import Event
from aioengine.printable import printable, printable_json
from aioengine.replay.frames import FrameReport, replay_frames

if TYPE_CHECKING:
    from aioengine.replay.tokens import TokenReport

Verify = Literal["frames", "tokens"]


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    path: str
    verify: Verify
    until: int | None
    as_json: bool
    model: str | None


def replay(settings: ReplaySettings) -> bool:
    """Print what came out; True if nothing differs. Raises WireError, and ConfigError for a recording that cannot be run again."""
    recording = read_recording(Path(settings.path))
    start = time.perf_counter()
    report = _run(recording, settings)
    seconds = time.perf_counter() - start
    if settings.as_json:
        print(printable_json(_as_json(settings, report, seconds, recording.events)))
    else:
        print(printable(_as_text(settings, report, seconds, recording.events)))
    return report.difference is None


def _run(recording: Recording, settings: ReplaySettings) -> FrameReport | TokenReport:
    if settings.verify == "frames":
        return replay_frames(recording.header, recording.events, until=settings.until)
    from aioengine.replay.tokens import replay_tokens

    return asyncio.run(replay_tokens(recording.header, recording.events, model=settings.model, until=settings.until))


def _recorded_seconds(events: list[Event], num_steps: int) -> float:
    """From the first event to the last one of that many steps."""
    steps = [event.time for event in events if event.step_id <= num_steps]
    return steps[-1] - steps[0] if steps else 0.0


def _as_json(settings: ReplaySettings, report: FrameReport | TokenReport, seconds: float, events: list[Event]) -> dict[str, Any]:
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    return {
        "file": settings.path,
        "verify": settings.verify,
        "verified": report.difference is None,
        **fields,
        "difference": None if report.difference is None else report.difference.as_json(),
        "seconds": seconds,
        "recorded_seconds": _recorded_seconds(events, report.num_steps),
    }


def _as_text(settings: ReplaySettings, report: FrameReport | TokenReport, seconds: float, events: list[Event]) -> str:
    recorded = _recorded_seconds(events, report.num_steps)
    if isinstance(report, FrameReport):
        what = f"{report.num_steps} steps and {report.num_results} results, {report.num_preemptions} preemptions"
        notes: list[str] = []
    else:
        what, notes = f"{report.num_steps} steps, {report.num_token_lists} lists of tokens", report.notes
    speed = f"{seconds:.2f} s for what took {recorded:.2f} s" + (f", {recorded / seconds:.0f} times faster" if recorded > seconds else "")
    if report.difference is None:
        return "\n".join([f"{settings.path}: {settings.verify} verified: {what}: no difference ({speed})", *notes])
    return "\n".join([f"{settings.path}: {report.difference}", f"the same until then: {what} ({speed})", *notes])
