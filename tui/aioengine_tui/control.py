"""The keys that act on what is watched: the playback of a recording, the engine where it allows control."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Literal

from textual.app import App
from textual.events import Key
from textual.widgets import Input

from aioengine.errors import AioEngineError
from aioengine_tui.messages import OpenRequest
from aioengine_tui.model.why.advice import advise
from aioengine_tui.model.why.hindsight import Verification, verification_words, what_if_words
from aioengine_tui.session import Answer, Session

if TYPE_CHECKING:
    from aioengine.events.sources.base import EngineControl, StepSource
    from aioengine_tui.model.why.hindsight import Hindsight

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 100.0)
_CONFIRM_S = 5.0
_ANSWER_TOKENS = 256
_ANSWER_INTERVAL_S = 0.25
_MAX_ANSWERS = 16

EntryMode = Literal["filter", "sort", "seek", "ask"]

if TYPE_CHECKING:
    _Base = App[None]
else:
    _Base = object


class ControlActions(_Base):
    """Part of `DashboardApp`: its actions on the playback and the engine, and the line in which one types."""

    source: StepSource
    session: Session
    hindsight: Hindsight | None
    _entry_mode: EntryMode = "filter"
    _abort_armed: tuple[str, float] = ("", 0.0)
    _pause_armed_until: float = 0.0

    def say(self, text: str) -> None:
        raise NotImplementedError

    def unsay(self) -> None:
        raise NotImplementedError

    def draw(self) -> None:
        raise NotImplementedError

    def filter_view(self, text: str) -> None:
        raise NotImplementedError

    def sort_view(self, text: str) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ the playback
    async def action_step(self, steps: int) -> None:
        if self.source.playback is not None:
            await self._do(self.source.playback.step(steps))
        elif steps > 0:
            await self.action_engine_step()
        else:
            self.say("only a recording can be stepped back")

    async def action_seek_by(self, share: float) -> None:
        playback = self.source.playback
        if playback is None:
            self.say("only a recording can be searched")
            return
        here = (playback.position or 0) / playback.length if playback.length else 0.0
        await self._do(playback.seek_fraction(max(0.0, min(1.0, here + share))))

    def action_seek(self) -> None:
        if self.source.playback is None:
            self.say("only a recording can be searched")
            return
        self.open_entry("seek", "", "go to: a step (812), seconds since the start (12.5s), a share (50%)")

    async def action_jump(self, kind: Literal["preemption", "abort", "slowest"]) -> None:
        if self.source.playback is None:
            self.say("only a recording can be searched")
        elif await self._do(self.source.playback.jump(kind)) is False:
            self.say(f"no {kind} {'step' if kind == 'slowest' else 'after this place'}")

    # ------------------------------------------------------------------ hindsight
    async def action_verify(self) -> None:
        """Run the recording again, in the background; when that is done: go to the first difference."""
        found = self.session.hindsight.verification
        if self.hindsight is None:
            self.say("only a recording can be run again")
        elif found.state == "unknown":
            self.session.hindsight.verification = Verification("running")
            self.run_worker(self._verify(self.hindsight), name="verify")
        elif found.state == "different" and self.source.playback is not None and found.step_id is not None:
            await self._do(self.source.playback.seek_step(found.step_id))
            self.say(found.words)
        else:
            self.say(verification_words(found))

    async def _verify(self, hindsight: Hindsight) -> None:
        try:
            found = await hindsight.verify()
        except AioEngineError as exc:
            found = Verification("refused", words=str(exc))
        self.session.hindsight.verification = found
        self.say(verification_words(found))

    def action_what_if(self) -> None:
        """Simulate the advice that is shown, the heaviest finding first; what is known already is not asked again."""
        if self.hindsight is None:
            self.say("only a recording can be simulated")
            return
        advice = advise(self.session.state)
        for finding in advice.findings if advice is not None else ():
            if finding.present is not None and finding.proposed is not None:
                self._simulate(self.hindsight, finding.setting, finding.present, finding.proposed)
                return
        self.say("there is no advice here to simulate")

    def _simulate(self, hindsight: Hindsight, setting: str, present: int, proposed: int) -> None:
        known = self.session.hindsight.sentences
        if (setting, proposed) in known:
            self.say(known[setting, proposed])
            return
        self.session.hindsight.note(setting, proposed, f"simulating {setting}={proposed} ...")
        self.say(known[setting, proposed])
        self.run_worker(self._what_if(hindsight, setting, present, proposed), name="what if")

    async def _what_if(self, hindsight: Hindsight, setting: str, present: int, proposed: int) -> None:
        try:
            found = await hindsight.what_if(setting, present=present, proposed=proposed)
        except AioEngineError as exc:
            words = f"cannot be simulated: {exc}"
        else:
            words = what_if_words(setting, proposed=proposed, found=found)
        self.session.hindsight.note(setting, proposed, words)
        self.say(words)

    def change_playback_speed(self, direction: int) -> None:
        playback = self.source.playback
        assert playback is not None, "the caller has looked"
        nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - playback.speed))
        playback.set_speed(SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + direction))])
        self.draw()

    async def _seek(self, text: str) -> None:
        playback = self.source.playback
        assert playback is not None, "the entry is only opened with a playback"
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|s|)\s*", text)
        if match is None:
            self.say(f"{text!r} is not a step (812), a time (12.5s) or a share (50%)")
            return
        value, unit = float(match[1]), match[2]
        if unit == "%":
            await self._do(playback.seek_fraction(min(1.0, value / 100)))
        elif unit == "s":
            await self._do(playback.seek_time(value))
        else:
            await self._do(playback.seek_step(int(value)))

    # ------------------------------------------------------------------ the engine
    async def action_engine_pause(self) -> None:
        engine = self.source.engine
        if engine is None:
            self.say("this engine does not allow control")
        else:
            await self._pause_or_resume(engine)

    async def _pause_or_resume(self, engine: EngineControl) -> None:
        """Pausing stops everybody's requests, one shift away from pausing the view: it is asked for twice."""
        if self.session.live.paused:
            await self._do(engine.resume())
        elif time.monotonic() > self._pause_armed_until:
            self._pause_armed_until = time.monotonic() + _CONFIRM_S
            self.say("P again pauses the engine itself, for everybody (p pauses only this view)")
        else:
            self._pause_armed_until = 0.0
            if await self._do(engine.pause()) is not None:
                self.say("the engine is paused: P resumes it, . runs one step")

    async def action_engine_step(self) -> None:
        engine = self.source.engine
        if engine is None:
            self.say("this engine does not allow control")
        elif not self.session.live.paused:
            self.say("the engine runs by itself: P pauses it first")
        else:
            await self._do(engine.step())

    async def action_abort(self) -> None:
        engine, request_id = self.source.engine, self.session.selected
        if engine is None:
            self.say("this engine does not allow control")
            return
        row = self.session.live.row(request_id) if request_id is not None else None
        if row is None or not row.is_live:
            self.say("choose a live request first (screen 3)")
            return
        armed, until = self._abort_armed
        if armed != row.request_id or time.monotonic() > until:
            self._abort_armed = (row.request_id, time.monotonic() + _CONFIRM_S)
            self.say(f"x again aborts {row.request_id}")
            return
        self._abort_armed = ("", 0.0)
        if await self._do(engine.abort(row.request_id)) is not None:
            self.say(f"{row.request_id} aborted")

    def action_ask(self) -> None:
        if self.source.engine is None:
            self.say("this engine does not allow control")
        else:
            self.open_entry("ask", "", "prompt for the engine")

    async def _ask(self, text: str) -> None:
        engine = self.source.engine
        assert engine is not None, "the entry is only opened with an engine"
        request_id = await self._do(engine.submit(text, max_tokens=_ANSWER_TOKENS, chat=True))
        if request_id is None:
            return
        answers = self.session.answers
        answers[request_id] = Answer(text)
        while len(answers) > _MAX_ANSWERS:
            del answers[next(iter(answers))]
        self.say(f"sent as {request_id}")
        self.post_message(OpenRequest(request_id))
        self.run_worker(self._read_answer(engine, request_id), name="answer")

    async def _read_answer(self, engine: EngineControl, request_id: str) -> None:
        """Ask for the text until it has ended: the page of the request shows it."""
        answer = self.session.answers[request_id]
        while not answer.has_ended:
            found = await self._do(engine.read(request_id))
            if not isinstance(found, tuple):
                return  # said in a note, or too long ago
            answer.text, answer.has_ended = found
            await asyncio.sleep(_ANSWER_INTERVAL_S)

    async def _do(self, action: Awaitable[Any]) -> Any:
        """Await it; None and a note on the screen if it fails. True for an action without a result.

        What was said of the action before is not true of this one.
        """
        self.unsay()
        try:
            result = await action
        except AioEngineError as exc:
            self.say(str(exc))
            return None
        self.draw()
        return True if result is None else result

    # ------------------------------------------------------------------ the line for typing
    def open_entry(self, mode: EntryMode, value: str, hint: str) -> None:
        self._entry_mode = mode
        entry = self.query_one("#entry", Input)
        entry.placeholder = hint
        entry.value = value
        entry.remove_class("off")
        entry.focus()

    def close_entry(self) -> None:
        entry = self.query_one("#entry", Input)
        if not entry.has_class("off"):
            entry.add_class("off")
            self.view.focus()  # type: ignore[attr-defined]

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._entry_mode == "filter" and not event.input.has_class("off"):
            self.filter_view(event.value)

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        text, mode = event.value.strip(), self._entry_mode
        self.close_entry()
        if mode == "filter":
            self.filter_view(text)
        elif text and mode == "sort":
            self.sort_view(text)
        elif text and mode == "seek":
            await self._seek(text)
        elif text:
            await self._ask(text)

    def on_key(self, event: Key) -> None:
        entry = self.query_one("#entry", Input)
        if event.key == "escape" and entry.has_focus:
            event.stop()
            if self._entry_mode == "filter":
                self.filter_view("")
            self.close_entry()
