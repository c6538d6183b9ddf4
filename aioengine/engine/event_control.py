"""What a viewer may do to an engine: `aioengine.events.sources.base.EngineControl` over an `AsyncEngine`."""

from __future__ import annotations

import weakref
from typing import Protocol

from aioengine.errors import AioEngineError
from aioengine.events.sources.base import ControlError
from aioengine.sampling_params import SamplingParams


class Controllable(Protocol):
    """What viewers may ask of an engine; every method raises AioEngineError."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    async def step(self) -> int | None: ...

    def abort_scheduled(self, scheduled_id: str) -> bool: ...

    async def submit_unattended(self, prompt: str, sampling_params: SamplingParams | None = None) -> str: ...


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

    async def submit(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0) -> str:
        try:
            return await self._engine.submit_unattended(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        except AioEngineError as exc:
            raise ControlError(str(exc)) from exc
