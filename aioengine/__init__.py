"""An asyncio LLM engine that shows every step it takes.

The public names are loaded on first use, so that `import aioengine` costs nothing and the parts that need no torch
never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.config import EngineConfig
    from aioengine.core.scheduler_output import SchedulerOutput
    from aioengine.engine.async_engine import AsyncEngine
    from aioengine.engine.outputs.output_stream import OutputStream
    from aioengine.errors import (
        AioEngineError,
        ConfigError,
        EngineDeadError,
        EngineOverloadedError,
        InvalidRequestError,
        ModelError,
        RequestTimeoutError,
        StepTimeoutError,
    )
    from aioengine.events.step_event import StepEvent, StepResultEvent
    from aioengine.outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
    from aioengine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

_MODULES = {
    "AioEngineError": "aioengine.errors",
    "AsyncEngine": "aioengine.engine.async_engine",
    "CompletionOutput": "aioengine.outputs",
    "ConfigError": "aioengine.errors",
    "EmbeddingOutput": "aioengine.outputs",
    "EngineConfig": "aioengine.config",
    "EngineDeadError": "aioengine.errors",
    "EngineOverloadedError": "aioengine.errors",
    "InvalidRequestError": "aioengine.errors",
    "ModelError": "aioengine.errors",
    "OutputStream": "aioengine.engine.outputs.output_stream",
    "RepetitionDetectionParams": "aioengine.sampling_params",
    "RequestMetrics": "aioengine.outputs",
    "RequestOutput": "aioengine.outputs",
    "RequestOutputKind": "aioengine.sampling_params",
    "RequestTimeoutError": "aioengine.errors",
    "SamplingParams": "aioengine.sampling_params",
    "SchedulerOutput": "aioengine.core.scheduler_output",
    "StepEvent": "aioengine.events.step_event",
    "StepResultEvent": "aioengine.events.step_event",
    "StepTimeoutError": "aioengine.errors",
    "StructuredOutputsParams": "aioengine.sampling_params",
}

__all__ = [
    "AioEngineError",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineOverloadedError",
    "InvalidRequestError",
    "ModelError",
    "OutputStream",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestTimeoutError",
    "SamplingParams",
    "SchedulerOutput",
    "StepEvent",
    "StepResultEvent",
    "StepTimeoutError",
    "StructuredOutputsParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aioengine' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
