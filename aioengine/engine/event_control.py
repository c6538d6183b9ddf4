"""What a viewer may do to an engine: `aioengine.events.sources.base.EngineControl` over an `AsyncEngine`."""

from __future__ import annotations

import weakref
from typing import Protocol

from aioengine.engine.inputs.input_processor import Prompt
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import AioEngineError
from aioengine.events.sources.base import ControlError
from aioengine.sampling_params import SamplingParams


class Controllable(Protocol):
    """What viewers may ask of an engine; every method raises AioEngineError."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    async def step(self) -> int | None: ...

    def abort_scheduled(self, scheduled_id: str) -> bool: ...

    async def submit_unattended(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> str: ...

    def read_unattended(self, request_id: str) -> tuple[str, bool] | None: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...


class EngineController:
    """Commands of viewers, in this process or from a socket. Belongs to the engine and its event loop, and does not keep it alive.

    Every failure is a ControlError with the engine's own words.
    """

    def __init__(self, engine: Controllable) -> None:
        self._reference = weakref.ref(engine)

    @property
    def _engine(self) -> Controllable:
        engine = self._reference()
        if engine is None:
            raise ControlError("the engine is gone")
        return engine

    async def pause(self) -> None:
        try:
            self._engine.pause()
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc

    async def resume(self) -> None:
        try:
            self._engine.resume()
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc

    async def step(self) -> int | None:
        try:
            return await self._engine.step()
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc

    async def abort(self, request_id: str) -> bool:
        try:
            return self._engine.abort_scheduled(request_id)
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, chat: bool = False) -> str:
        try:
            engine = self._engine
            given: Prompt = [{"role": "user", "content": prompt}] if chat and engine.tokenizer.has_chat_template else prompt
            return await engine.submit_unattended(given, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc

    async def read(self, request_id: str) -> tuple[str, bool] | None:
        return self._engine.read_unattended(request_id)
